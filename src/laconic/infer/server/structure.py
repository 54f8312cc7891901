"""What an answer must be, as the fields of a request say it in several ways, as one grammar."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from laconic.errors import ConfigError
from laconic.infer.grammars import GrammarKind, make_grammar
from laconic.infer.server.bodies import ChatBody, RequestBody
from laconic.infer.server.conversation import NamedTool, Tool
from laconic.infer.server.wire import Refusal
from laconic.infer.token_engine import TokenEngine

_ANY_OBJECT = {"type": "object"}
_Asked = tuple[str, GrammarKind, Any]
"""A field's name, and arguments of `make_grammar`."""


def grammar_of(body: RequestBody, engine: TokenEngine, format_field: str = "response_format") -> str | None:
    """Return the grammar that a request asks for, or None; compiling a large one takes a second.

    `format_field` is what the client calls response_format. It is a Refusal (400) if it is no grammar, there are
    several, or no answer of the engine could end by one.
    """
    asked = [*_format(body, format_field), *_structured(body), *_guided(body), *_tools(body)]
    if not asked:
        return None
    field, kind, value = asked[0]
    if len(asked) > 1:
        raise Refusal(f"{field} and {asked[1][0]} are both given, but an answer follows one; give one", field)
    of_calls = ("stop_token_ids",) if field == "tool_choice" else ()  # a cut call would pass for a whole one
    for name in ("ignore_eos", "min_tokens", *of_calls):
        if getattr(body, name):
            raise Refusal(
                f"{name} is given with {field}, but an answer ends where its grammar allows no more; leave {name} out",
                name,
            )
    if isinstance(body, ChatBody) and body.callable_tools and body.tool_choice in (None, "auto"):
        raise Refusal(
            f"{field} is given with tools that may be called, but a call would not follow it; give tool_choice 'none'"
            " or leave one of both out",
            field,
        )
    if not engine.eos_token_ids:
        raise Refusal(
            f"{field} is given, but the model has no end-of-sequence token to end such an answer; set eos_token_id in"
            " its generation_config.json",
            field,
        )
    try:
        return make_grammar(kind, value)
    except ConfigError as error:
        if field == "tool_choice" and find_spec("llguidance"):
            _check_parameters(body)
        raise Refusal(f"{field} is no grammar: {error}", field) from error


def _format(body: RequestBody, field: str) -> list[_Asked]:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [(field, "json_schema", _ANY_OBJECT)]
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        name = f"{field}.json_schema" + (".schema" if asked.json_schema else "")
        raise Refusal(f"{name} is missing, but the type json_schema needs it", name)
    return [(field, "json_schema", asked.json_schema.schema_)]


def _structured(body: RequestBody) -> list[_Asked]:
    asked = body.structured_outputs
    if asked is None:
        return []
    found = _given("structured_outputs", asked.json_, asked.regex, asked.choice, asked.grammar)
    return found + ([("structured_outputs.json_object", "json_schema", _ANY_OBJECT)] if asked.json_object else [])


def _guided(body: RequestBody) -> list[_Asked]:
    found = _given("guided", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    found = [(name.replace(".", "_"), kind, value) for name, kind, value in found]
    if body.json_schema is not None:
        found.append(("json_schema", "json_schema", body.json_schema))
    return found if body.regex is None else [*found, ("regex", "regex", body.regex)]


def _given(prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None) -> list[_Asked]:
    asked: list[_Asked] = [
        (f"{prefix}.json", "json_schema", schema),
        (f"{prefix}.regex", "regex", regex),
        (f"{prefix}.choice", "choice", choice),
        (f"{prefix}.grammar", "lark", grammar),
    ]
    return [each for each in asked if each[2] is not None]


def _tools(body: RequestBody) -> list[_Asked]:
    """Return the grammar of calls that must come: arguments of one function, or a list of calls."""
    if not isinstance(body, ChatBody) or not body.must_call:
        return []
    tools = _tools_to_call(body)
    if isinstance(body.tool_choice, NamedTool):
        return [("tool_choice", "json_schema", _parameters(tools[0]))]
    more = "" if body.parallel_tool_calls is False else ' ("," call)*'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        # Each schema is a root of its own, as it may refer to its own definitions.
        begin = f'{{"name": {json.dumps(tool.function.name)}, "parameters": '
        lines.append(f'call{place}: {json.dumps(begin)} arguments{place} "}}"')
        lines.append(f"arguments{place}: %json {json.dumps(_parameters(tool))}")
    return [("tool_choice", "lark", "\n".join(lines))]


def _tools_to_call(body: ChatBody) -> list[Tool]:
    """Return the tools of which a call must come."""
    choice, tools = body.tool_choice, body.tools or []
    return [tool for tool in tools if not isinstance(choice, NamedTool) or tool.function.name == choice.name]


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object also where its own schema leaves that open."""
    given = tool.function.parameters
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = given.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise Refusal(
            f"parameters of the tool {tool.function.name!r} have the type {kind!r}, but arguments are an object; give"
            " the type 'object'",
            "tools",
        )
    return _ANY_OBJECT | given | _ANY_OBJECT  # the type in front, where a schema names none


def _check_parameters(body: RequestBody) -> None:
    """Refuse the tool whose parameters are no grammar of arguments; compiling them again is for an error alone."""
    assert isinstance(body, ChatBody)
    for tool in _tools_to_call(body):
        try:
            make_grammar("json_schema", _parameters(tool))
        except ConfigError as error:
            raise Refusal(
                f"parameters of the tool {tool.function.name!r} are no schema that arguments, which are an object, can"
                f" follow: {error}; mend them, or give tool_choice 'auto', which follows no schema",
                "tools",
            ) from error
