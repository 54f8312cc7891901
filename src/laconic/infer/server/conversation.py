"""Messages, tools that a model may call, and what an answer must be, as clients give them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from laconic.infer.server.tool_calls import read_json
from laconic.infer.server.unserved import Neutral

CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Where a prompt's cache may end, as Anthropic's and OpenAI's APIs mark it: taken and not used, it changes no token."""


class Strict(BaseModel):
    """An object with no other fields than its own, of the types that are written there.

    `neutral` has fields that are not served, with their values that ask for nothing.
    """

    neutral: ClassVar[Neutral] = {}
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def check_false(value: object) -> object:
    """Return None for what asks for nothing; refuse the rest, as a validator of a field that is not served."""
    if value is not None and value is not False:
        raise ValueError("must be false: it is not served; leave it out")
    return None


def _check_nothing(value: object) -> object:
    if value is not None and value not in ([], ""):
        raise ValueError("must be null: only text is served; leave it out")
    return None


def _check_content(value: object) -> object:
    if isinstance(value, list) and value:
        if not all(
            isinstance(part, dict)
            and part.keys() - CACHE_MARKS == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in value
        ):
            raise ValueError("must be a string or a list of parts of type text; other parts are not served")
        return "".join(part["text"] for part in value)
    return value


def _check_arguments(value: str) -> str:
    if not isinstance(read_json(value or "{}"), dict):
        raise ValueError("must be a JSON object, as a string, without a name twice and of finite numbers")
    return value


class _CalledFunction(Strict):
    name: str
    arguments: Annotated[str, AfterValidator(_check_arguments)]


class _ToolCall(Strict):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # of a stream, from which a client has the call

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates know of a call: arguments as an object."""
        called = {"name": self.function.name, "arguments": read_json(self.function.arguments or "{}")}
        return {"id": self.id, "type": self.type, "function": called}


class ChatMessage(Strict):
    """A message of a conversation.

    Attributes:
        role: who says it.
        content: the text, or a list of {"type": "text", "text": ...}, which are joined; an assistant's may be null.
        name: of the speaker, for templates that use it.
        tool_calls: of an assistant.
        tool_call_id: of the call that a tool answers.
        annotations, audio, function_call, reasoning, reasoning_content, refusal: null or empty, as clients send answers
            back.
        cache_control: see CACHE_MARKS.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_check_content)] = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[None, BeforeValidator(_check_nothing)] = None
    audio: Annotated[None, BeforeValidator(_check_nothing)] = None
    function_call: Annotated[None, BeforeValidator(_check_nothing)] = None
    reasoning: Annotated[None, BeforeValidator(_check_nothing)] = None
    reasoning_content: Annotated[None, BeforeValidator(_check_nothing)] = None
    refusal: Annotated[None, BeforeValidator(_check_nothing)] = None
    cache_control: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates know of a message."""
        found: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found


def in_order_of_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages with answers of tools in the order of their calls: many templates show no ids to tell them by."""
    found: list[ChatMessage] = []
    order: dict[str | None, int] = {}
    counter = itertools.count()
    for answers, run in itertools.groupby(messages, lambda each: each.tool_call_id is not None):
        some = list(run)
        order |= {call.id: next(counter) for each in some for call in each.tool_calls or ()}
        found += sorted(some, key=lambda each: order[each.tool_call_id]) if answers else some
    return found


class _Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[None, BeforeValidator(check_false)] = None


class Tool(Strict):
    """A function that the model may call, by its name, a description and the JSON schema of its arguments.

    That it is shown only once it has been searched for, `defer_loading`, is not served; see CACHE_MARKS for the rest.
    """

    type: Literal["function"]
    function: _Function
    defer_loading: Annotated[None, BeforeValidator(check_false)] = None
    cache_control: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates know of a tool."""
        return self.model_dump(exclude_none=True, exclude={"cache_control"})


class NamedTool(Strict):
    """The function that the model must call, by name."""

    name: str


def _check_tool_choice(value: object) -> object:
    if value is None or value in ("none", "auto", "required"):
        return value
    if (
        isinstance(value, dict)
        and value.keys() == {"type", "function"}
        and value["type"] == "function"
        and isinstance(function := value["function"], dict)
        and function.keys() == {"name"}
        and isinstance(function["name"], str)
    ):
        return NamedTool(name=function["name"])
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': NAME}}")


ToolChoice = Annotated[Any, BeforeValidator(_check_tool_choice)]
"""None, "none", "auto", "required" or a NamedTool."""


def check_kind(kind: str, schema: object) -> None:
    """Refuse a schema beside a type that would not follow it, as a validator of both."""
    if kind != "json_schema" and schema is not None:
        raise ValueError(f"must have type 'json_schema' and not {kind!r} beside a schema")


class _JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer must be: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ResponseFormat:
        check_kind(self.type, self.json_schema)
        return self


class StructuredOutputs(Strict):
    """What an answer must be, as vLLM has it: a JSON schema or object, what a regular expression takes, or a text.

    Or what a grammar in Lark's format takes. One of these is given; what else vLLM has is false or null.
    """

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Annotated[None, BeforeValidator(check_false)] = None
    disable_additional_properties: Annotated[None, BeforeValidator(check_false)] = None
    disable_fallback: Annotated[None, BeforeValidator(check_false)] = None
    structural_tag: Annotated[None, BeforeValidator(check_false)] = None
    whitespace_pattern: Annotated[None, BeforeValidator(check_false)] = None
