"""Tools: calls in the texts of models, tool_choice, and messages that carry them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from laconic.infer.generation_config import AnswerDefaults
from laconic.infer.server import ByteTokenizer
from laconic.infer.server.conversation import ChatMessage
from laconic.infer.server.tool_calls import PARSERS, CallDelta, NamedCall, RequiredCalls, ToolParser
from tests.infer.serving import EOS, MODEL, FakeEngine, served

TEMPLATE = "{% if tools %}{{ tools }}<tool_call>{% endif %}"
USER: list[Any] = [{"role": "user", "content": "Hi"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
BY_NAME: Any = {"type": "function", "function": {"name": "add"}}
"""The tool_choice that asks for a call of ADD."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def tool_of(parameters: Any) -> Any:
    """The tool f, whose arguments follow a schema."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def parse(parser: ToolParser, text: str, size: int) -> list[str | CallDelta]:
    found: list[str | CallDelta] = []
    for start in range(0, len(text), size):
        found += parser.push(text[start : start + size])
    return found + list(parser.flush())


def summary(found: Sequence[str | CallDelta]) -> tuple[str, list[tuple[int, str | None, Any]]]:
    """All text, and the calls."""
    calls = [(each.index, each.name, json.loads(each.arguments)) for each in found if isinstance(each, CallDelta)]
    return "".join(each for each in found if isinstance(each, str)), calls


ONE = [(0, "add", {"a": 1})]
TWO = [*ONE, (1, "now", {})]


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "no call < at all <tool", "no call < at all <tool", []),
        ("hermes", " spaces stay \n", " spaces stay \n", []),
        ("hermes", CALL, "", ONE),
        ("hermes", f"I add.\n\n{CALL}\n", "I add.", ONE),
        ("hermes", CALL + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", TWO),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", ONE),
        ("hermes", "<tool_call>no JSON</tool_call> so", "<tool_call>no JSON</tool_call> so", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "arg', '<tool_call>{"name": "add", "arg', []),
        ("hermes", "a <tool_call>x</tool_call>" + CALL, "a <tool_call>x</tool_call>", ONE),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", ONE),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
            "",
            TWO,
        ),
        ("llama3_json", '\n{"type": "function", "name": "add", "arguments": {"a": 1}}', "", ONE),
        ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
        (
            "llama3_json",
            '{"name": "add", "parameters": {"a": 1}} as asked',
            '{"name": "add", "parameters": {"a": 1}} as asked',
            [],
        ),
        ("llama3_json", "I {think}", "I {think}", []),
        ("llama3_json", "", "", []),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', "", TWO),
        ("mistral", 'so [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "so ", ONE),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", TWO),
        ("mistral", "[TOOL_CALLS][broken", "[TOOL_CALLS][broken", []),
        ("mistral", "a [TOOL_ here", "a [TOOL_ here", []),
        ("required", '[{"name": "add", "parameters": {"a": 1}},{"name": "now", "parameters": {}}]', "", TWO),
        ("required", '[{"name": "add", "par', '[{"name": "add", "par', []),
    ],
)
def test_calls_in_texts_wherever_they_are_cut(kind: str, text: str, content: str, calls: Any) -> None:
    make = PARSERS.get(kind, RequiredCalls)
    for size in (1, 2, 3, 7, 1000):
        assert summary(parse(make(), text, size)) == (content, calls), size


@pytest.mark.parametrize(
    "value",
    [r'"\ud83d"', "1e400", "NaN", '1, "a": 2', "[" * 9999 + "]" * 9999],
    ids=["half", "huge", "nan", "twice", "deep"],
)
def test_calls_that_could_not_be_written_again_as_they_are_stay_text(value: str) -> None:
    """Half a character made a whole answer an error 500; the others were arguments that are no JSON, or other ones."""
    call = f'{{"name": "add", "arguments": {{"a": {value}}}}}'
    for kind, text in (
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("llama3_json", call),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("mistral", f'[TOOL_CALLS]add{{"a": {value}}}'),
        ("required", f"[{call}]"),
    ):
        assert summary(parse(PARSERS.get(kind, RequiredCalls)(), text, 7)) == (text, [])
    with pytest.raises(ValidationError, match="without a name twice and of finite numbers"):
        ChatMessage(
            role="assistant", tool_calls=[{"id": "x", "function": {"name": "f", "arguments": f'{{"a": {value}}}'}}]
        )


def test_a_named_call_is_told_as_it_comes() -> None:
    found = parse(NamedCall("add"), '{"a": 1}', 3)
    assert found == [CallDelta(0, "add", '{"a'), CallDelta(0, None, '": '), CallDelta(0, None, "1}")]
    assert parse(NamedCall("add"), "", 3) == []


class ToolBytes(ByteTokenizer):
    """Bytes with a chat template that has tools."""

    chat_template = TEMPLATE

    def encode_chat(self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Any = None) -> list[int]:
        self.seen = (messages, tools, variables)
        return self.encode("".join(str(message["content"]) for message in messages) + "|")


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer() -> ToolBytes:
    return ToolBytes()


@pytest.fixture(scope="module")
def client(engine: FakeEngine, tokenizer: ToolBytes) -> Iterator[openai.OpenAI]:
    with served(engine, tokenizer) as client:
        yield client


def test_calls_of_an_answer_and_their_results(engine: FakeEngine, client: openai.OpenAI, tokenizer: ToolBytes) -> None:
    engine.says(f"I add.\n{CALL}")
    ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [ADD, NOW]}
    done = client.chat.completions.create(**ask).choices[0]
    assert (done.finish_reason, done.message.content) == ("tool_calls", "I add.")
    assert tokenizer.seen[1] == [ADD, NOW]
    (call,) = done.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})

    chunks = list(client.chat.completions.create(**ask, stream=True, logprobs=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    (streamed,) = [each for delta in deltas for each in delta.tool_calls or ()]
    assert streamed.function is not None
    assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "add", '{"a": 1}')
    entries = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content or ()]
    assert "".join(entry.token for entry in entries) == f"I add.\n{CALL}<0x100>"

    # The client's loop: the answer is sent back as it came, and the tool's result behind it.
    engine.says("It is 1.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    messages = [
        *USER,
        done.message,
        result,
        {"role": "assistant", "content": "", "tool_calls": [streamed.model_dump() | {"id": "x", "type": "function"}]},
        result | {"tool_call_id": "x"},
    ]
    done = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD]).choices[0]
    assert (done.finish_reason, done.message.content, done.message.tool_calls) == ("stop", "It is 1.", None)
    sent = tokenizer.seen[0]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert sent[2] == {"role": "tool", "content": "1", "tool_call_id": call.id}


def called(*ids: str) -> dict[str, Any]:
    calls = [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(*ids: str) -> list[Any]:
    return [{"role": "tool", "tool_call_id": each, "content": f"of {each}"} for each in ids]


def test_answers_of_tools_are_shown_in_the_order_of_their_calls(
    engine: FakeEngine, client: openai.OpenAI, tokenizer: ToolBytes
) -> None:
    """Templates such as Llama's and Qwen's show no ids, so that a model could not tell whose answer is whose."""
    engine.says("x")
    messages = [called("a", "b", "c"), *answered("c", "a", "b"), called("c", "a"), *USER, *answered("a", "c")]
    client.chat.completions.create(model=MODEL, messages=messages)
    shown = [each["tool_call_id"] for each in tokenizer.seen[0] if each["role"] == "tool"]
    assert shown == ["a", "b", "c", "c", "a"]


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([*USER, *answered("a")], "messages.1.tool_call_id", "no message before it has such a call"),
        ([*answered("a"), called("a")], "messages.0.tool_call_id", "no message before it has such a call"),
        ([called("a"), *answered("b")], "messages.1.tool_call_id", "'b', but no message before it has such a call"),
        ([called("a"), *answered("a", "a")], "messages.2.tool_call_id", "that call has been answered"),
        ([called("a", "a")], "messages.0.tool_calls", "tool_calls has an id twice"),
    ],
)
def test_answers_of_no_call_are_refused_by_name(
    client: openai.OpenAI, messages: list[Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert refused.value.param == param


def test_choices_of_tools(engine: FakeEngine, client: openai.OpenAI, tokenizer: ToolBytes) -> None:
    pytest.importorskip("llguidance")
    ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [ADD, NOW]}
    engine.says(CALL)
    none = client.chat.completions.create(**ask, tool_choice="none").choices[0]
    assert (none.message.content, none.finish_reason, tokenizer.seen[1]) == (CALL, "stop", [])
    engine.says(CALL * 2)
    one = client.chat.completions.create(**ask, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls or ()) == 1

    asked = engine.says('{"a": 5}')
    for stream in (False, True):
        named: Any = client.chat.completions.create(**ask, tool_choice=BY_NAME, stream=stream)
        parts = [each.choices[0] for each in named] if stream else named.choices
        calls = [call for part in parts for call in (part.delta if stream else part.message).tool_calls or ()]
        assert "".join(call.function.arguments for call in calls) == '{"a": 5}'
        assert [call.function.name for call in calls if call.function.name] == ["add"]
        assert parts[-1].finish_reason == "tool_calls"
    assert '"integer"' in str(asked[0].grammar)

    asked = engine.says('[{"name": "now", "parameters": {}},{"name": "add", "parameters": {"a": 2}}]')
    done = client.chat.completions.create(**ask, tool_choice="required").choices[0]
    assert [call.function.name for call in done.message.tool_calls or ()] == ["now", "add"]  # type: ignore[union-attr]
    assert done.message.content is None
    assert "%json" in str(asked[0].grammar)


@pytest.mark.parametrize(
    ("parameters", "grammar"),
    [
        (None, '{"type": "object", "properties": {}, "additionalProperties": false}'),
        ({}, '{"type": "object"}'),
        ({"properties": {"a": {}}}, '{"type": "object", "properties": {"a": {}}}'),
        ({"type": ["object"]}, '{"type": "object"}'),
        ({"type": ["null", "object"]}, '{"type": "object"}'),
        ({"anyOf": [{"type": "string"}, {}]}, '{"type": "object", "anyOf": [{"type": "string"}, {}]}'),
    ],
)
def test_arguments_are_an_object_of_the_schema_that_was_given(
    engine: FakeEngine, client: openai.OpenAI, parameters: Any, grammar: str
) -> None:
    pytest.importorskip("llguidance")
    asked = engine.says("[]")
    tool = tool_of(parameters)
    if parameters is None:
        del tool["function"]["parameters"]
    named: Any = {"type": "function", "function": {"name": "f"}}
    client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], tool_choice="required")
    client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], tool_choice=named)
    assert f"%json {grammar}" in asked[0].grammar
    assert grammar in asked[1].grammar


@pytest.mark.parametrize(
    "given",
    [
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        {"oneOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/f",
            "definitions": {"f": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        },
    ],
)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(
    engine: FakeEngine, client: openai.OpenAI, given: Any
) -> None:
    llguidance = pytest.importorskip("llguidance")
    asked = engine.says("{}")
    named: Any = {"type": "function", "function": {"name": "f"}}
    client.chat.completions.create(model=MODEL, messages=USER, tools=[tool_of(given)], tool_choice=named)
    follows = {}
    for text in ('{"a": 1}', '{"a": "1"}', '{"b": 1}', '"a"', "null", "1", "[]"):
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), asked[0].grammar)
        follows[text] = matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
    assert [text for text, whole in follows.items() if whole] == ['{"a": 1}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [BY_NAME, "required"])
def test_a_clients_stop_strings_cut_no_call_that_must_come(
    engine: FakeEngine, client: openai.OpenAI, choice: Any, stream: bool
) -> None:
    pytest.importorskip("llguidance")
    arguments = '{"a": 5, "b": 6}'
    engine.says(arguments if choice != "required" else f'[{{"name": "add", "parameters": {arguments}}}]')
    ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [ADD], "stop": [", ", "}"]}
    done: Any = client.chat.completions.create(**ask, tool_choice=choice, stream=stream)
    parts = [each.choices[0] for each in done] if stream else done.choices
    calls = [call for part in parts for call in (part.delta if stream else part.message).tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == arguments
    assert parts[-1].finish_reason == "tool_calls"
    text: Any = client.chat.completions.create(**ask, tool_choice="none").choices[0].message.content
    assert (
        text == (arguments if choice != "required" else f'[{{"name": "add", "parameters": {arguments}').split(", ")[0]
    )


def test_the_models_stop_strings_cut_no_call(
    engine: FakeEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(engine, "answer_defaults", AnswerDefaults(stop=(", ",)))
    engine.says('{"a": 5, "b": 6}')
    ask: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [ADD]}
    done = client.chat.completions.create(**ask, tool_choice=BY_NAME).choices[0]
    assert done.message.tool_calls[0].function.arguments == '{"a": 5, "b": 6}'  # type: ignore[index,union-attr]
    assert client.chat.completions.create(**ask, tool_choice="none").choices[0].message.content == '{"a": 5'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required'"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tools are add",
        ),
        ({"tools": [ADD, ADD]}, "tools", "a name twice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"tools": [ADD], "response_format": {"type": "json_object"}}, "response_format", "tool_choice 'none'"),
        ({"tools": [ADD], "tool_choice": "required", "stop_token_ids": [9]}, "stop_token_ids", "leave stop_token_ids"),
        (
            {"tools": [ADD], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
            "guided_regex and tool_choice are both given",
        ),
        (
            {"tools": [tool_of({"type": "array"})], "tool_choice": "required"},
            "tools",
            "parameters of the tool 'f' have the type 'array', but arguments are an object",
        ),
        (
            {"tools": [tool_of({"type": ["null", "array"]})], "tool_choice": "required"},
            "tools",
            r"'f' have the type \['null', 'array'\], but arguments are an object",
        ),
        (
            {"tools": [ADD, tool_of({"anyOf": [{"type": "string"}]})], "tool_choice": "required"},
            "tools",
            "parameters of the tool 'f' are no schema that arguments, which are an object, can follow: .*Unsatisfiable",
        ),
        (
            {"tools": [tool_of({"properties": {"a": 1}})], "tool_choice": "required"},
            "tools",
            "parameters of the tool 'f' are no schema that arguments",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.tool_call_id",
            "must be given with the role tool",
        ),
        (
            {"messages": [*USER, {"role": "user", "content": "x", "tool_call_id": "y"}]},
            "messages.1.tool_call_id",
            "no other",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "must be a JSON object, as a string",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(client: openai.OpenAI, fields: Any, param: str, message: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(model=MODEL, messages=USER, extra_body=fields)
    assert refused.value.param == param


def test_a_missing_package_is_no_fault_of_the_parameters(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="tool_choice is no grammar: answers by a grammar need llguidance"):
        client.chat.completions.create(model=MODEL, messages=USER, tools=[ADD], tool_choice="required")


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        ("{{ messages }}", {}, "has no place for them"),
        ("{{ tools }}", {}, "--tool-call-parser hermes|llama3_json|mistral"),
        ("{{ tools }}", {"tool_call_parser": "mistral"}, None),
        ("{{ tools }}[TOOL_CALLS]", {}, None),
        ('{{ tools }} {"name": name, "parameters": dictionary of names}', {}, None),
        ("{{ tools }}<tool_call><function=x>", {}, "does not tell"),
        ("{{ tools }}<tool_call></tool_call><tool_calls>[", {}, "does not tell"),  # Apriel, Hunyuan
    ],
)
def test_formats_are_read_off_the_template(
    engine: FakeEngine, template: str, settings: Any, message: str | None
) -> None:
    tokenizer = ToolBytes()
    tokenizer.chat_template = template
    engine.says("text")
    with served(engine, tokenizer, **settings) as client:
        if message is None:
            done = client.chat.completions.create(model=MODEL, messages=USER, tools=[ADD])
            assert done.choices[0].message.content == "text"
            return
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=USER, tools=[ADD])
        assert message in str(refused.value)


def test_a_marker_that_is_a_special_token_is_found(engine: FakeEngine) -> None:
    tokenizer = ToolBytes()
    tokenizer.chat_template = "{{ tools }}[TOOL_CALLS]"
    tokenizer.token_name = lambda token: "[TOOL_CALLS]" if token == 299 else ByteTokenizer.token_name(tokenizer, token)  # type: ignore[method-assign]
    engine.answer = lambda prompt, sampling: [299, *b'[{"name": "add", "arguments": {"a": 1}}]', EOS]
    with served(engine, tokenizer) as client:
        done = client.chat.completions.create(model=MODEL, messages=USER, tools=[ADD]).choices[0]
        ends = {"stop_token_ids": [299]}
        cut = client.chat.completions.create(model=MODEL, messages=USER, tools=[ADD], extra_body=ends).choices[0]
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("", None, "stop")
    (call,) = done.message.tool_calls or []
    assert len(call.id) == 9  # as Mistral's templates ask for
    assert done.message.content is None


FLAT = [{"type": "function"} | tool["function"] for tool in (ADD, NOW)]
"""The tools in the shape of /v1/responses."""


def test_calls_by_responses(engine: FakeEngine, client: openai.OpenAI, tokenizer: ToolBytes) -> None:
    engine.says(f"I add.\n{CALL}\n{CALL}")
    ask: dict[str, Any] = {"model": MODEL, "tools": FLAT}
    done = client.responses.create(input="Hi", **ask)
    assert tokenizer.seen[1] == [ADD, NOW]
    assert (done.status, done.output_text, done.tool_choice) == ("completed", "I add.", "auto")
    assert [tool.to_dict(exclude_none=True) for tool in done.tools] == FLAT
    one, two = done.output[1:]
    assert one.type == two.type == "function_call"
    assert [(call.name, call.arguments, call.status) for call in (one, two)] == [("add", '{"a": 1}', "completed")] * 2
    assert len({one.call_id, two.call_id, one.id, two.id}) == 4

    with client.responses.stream(input="Hi", **ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (final.output_text, final.status) == ("I add.", "completed")
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    (kind,) = {event.type for event in events} & {"response.function_call_arguments.done"}
    for index, event in enumerate([event for event in events if event.type == kind], start=1):
        assert (event.output_index, event.item_id, event.arguments) == (index, final.output[index].id, '{"a": 1}')

    # Answers and results are one turn each of the conversation, as in chats.
    engine.says("It is 1.")
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in (one, two)]
    results[1]["output"] = [{"type": "input_text", "text": "1"}]
    for answered in (final.output, [item.model_dump() for item in final.output]):
        client.responses.create(input=[*USER, *answered, *USER], **ask)
        assert [message["role"] for message in tokenizer.seen[0]] == ["user", "assistant", "user"]
    again = client.responses.create(input=[*USER, *done.output, *results], **ask)
    assert (again.output_text, len(again.output)) == ("It is 1.", 1)
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": call.call_id, "type": "function", "function": function} for call in (one, two)]
    assert tokenizer.seen[0] == [
        *USER,
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        *({"role": "tool", "content": "1", "tool_call_id": call.call_id} for call in (one, two)),
    ]


def test_text_with_any_letters_is_one_item_of_responses(engine: FakeEngine, client: openai.OpenAI) -> None:
    text = "I <tool_call>did it</tool_call>, provided"  # no call, which comes in one piece
    engine.says(text)
    done = client.responses.create(model=MODEL, input="Hi", tools=FLAT)
    assert ([item.type for item in done.output], done.output_text) == (["message"], text)


def test_choices_of_tools_by_responses(engine: FakeEngine, client: openai.OpenAI, tokenizer: ToolBytes) -> None:
    pytest.importorskip("llguidance")
    ask: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": FLAT}
    engine.says(CALL * 2)
    none = client.responses.create(**ask, tool_choice="none")
    assert (none.output_text, tokenizer.seen[1]) == (CALL * 2, [])
    assert len(client.responses.create(**ask, parallel_tool_calls=False).output) == 1

    asked = engine.says('{"a": 5}')
    choice: Any = {"type": "function", "name": "add"}
    for most, arguments, status in ((None, '{"a": 5}', "completed"), (3, '{"a', "incomplete")):
        with client.responses.stream(**ask, tool_choice=choice, max_output_tokens=most) as stream:
            events: list[Any] = list(stream)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (call,) = events[-1].response.output
        assert (call.name, call.arguments, call.status, deltas) == ("add", arguments, status, list(arguments))
    assert '"integer"' in str(asked[0].grammar)
    assert client.responses.create(**ask, tool_choice=choice).tool_choice.to_dict() == choice  # type: ignore[union-attr]

    engine.says('[{"name": "now", "parameters": {}},{"name": "add", "parameters": {"a": 2}}]')
    done = client.responses.create(**ask, tool_choice="required")
    assert [item.name for item in done.output if item.type == "function_call"] == ["now", "add"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"tools": [FLAT[0] | {"defer_loading": True}]}, "tools.0.function.defer_loading", "must be false"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "{'type': 'function', 'name': NAME}"),
        (
            {"tools": FLAT, "text": {"format": {"type": "json_object"}}},
            "text.format",
            "text.format is given with tools",
        ),
        ({"input": [{"type": ["message"]}]}, "input", "must have items of these types"),
        ({"input": [{"type": "computer_call"}]}, "input", "function_call_output of call_id, name, output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "messages.0.tool_call_id", "must be given"),
    ],
)
def test_bad_tools_of_responses_are_refused_by_name(
    client: openai.OpenAI, fields: Any, param: str, message: str
) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.responses.create(**{"model": MODEL, "input": "Hi"} | fields)
    assert refused.value.param == param
