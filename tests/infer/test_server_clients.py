"""What clients and evaluations ask for beyond plain text: echoes, formats, /v1/responses, pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import response_create_params

from laconic.infer.server import ServerSettings, create_app
from laconic.infer.server.bodies import parse_body
from laconic.infer.server.responses import ResponsesBody
from laconic.infer.server.wire import Refusal
from tests.infer.serving import MODEL, FakeEngine, running
from tests.infer.test_server import ChatBytes, text_of

USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    settings = ServerSettings(MODEL, api_key="key", allowed_origins=("https://a.example",))
    with running(create_app(engine, ChatBytes(), settings)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def says(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the engine answers; returns what it is asked."""
    monkeypatch.setattr(engine, "answer", engine.answer)  # as it was, afterwards
    return engine.says


def test_echoes_have_the_prompts_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["one", "né"], "seed": 7, "echo": True, "logprobs": 1, "n": 2}
    done = client.completions.create(**ask, max_tokens=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice in done.choices:
        prompt = ["one", "né"][choice.index // 2]
        answer = text_of(prompt, seed=7, request=choice.index % 2, max_new_tokens=2)
        assert choice.text == prompt + answer
        found, size = choice.logprobs, len(prompt.encode())
        assert found is not None
        assert found.token_logprobs == [None, *(-float(place) for place in range(1, size)), -0.5, -0.5]
        assert found.top_logprobs is not None
        assert (found.top_logprobs[0], len(found.top_logprobs)) == (None, size + 2)
        offsets = [0, 1, 2] if prompt == "one" else [0, 1, 1]  # a character of two tokens is there with the second
        assert found.text_offset == [*offsets, len(prompt), len(prompt) + 1]
    alone = client.completions.create(**ask | {"prompt": [list(b"one")]}, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == ("one", "length")
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.tokens == list("one")
    assert alone.usage is not None
    assert (alone.usage.completion_tokens, alone.usage.total_tokens) == (0, 3)


def test_echoes_of_streams_and_of_answers_that_end_at_once(client: openai.OpenAI, says: Any) -> None:
    says("")
    ask: dict[str, Any] = {"model": MODEL, "prompt": "one", "echo": True, "max_tokens": 1}
    chunks = list(client.completions.create(**ask, logprobs=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one"
    (logprobs,) = [chunk.choices[0].logprobs for chunk in chunks]
    # One entry for each token of prompt and answer, as lm-evaluation-harness counts them: the end is one.
    assert logprobs.tokens == ["o", "n", "e", "<0x100>"]
    says("xy")
    for stream in (True, False):
        done: Any = client.completions.create(**ask | {"max_tokens": 3}, stream=stream)
        parts = list(done) if stream else [done]
        assert "".join(part.choices[0].text for part in parts) == "onexy"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, '"type": "object"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            '"null"',
        ),
        ({"guided_json": {"type": "null"}}, '"null"'),
        ({"guided_json": '{"type": "null"}'}, '"null"'),
        ({"json_schema": '{"type": "null"}'}, '"null"'),
        ({"structured_outputs": {"json": {"type": "null"}}}, '"null"'),
        ({"structured_outputs": {"json_object": True}}, '"type": "object"'),
        ({"guided_regex": "a+"}, "a+"),
        ({"regex": "a+"}, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "a+"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "a"'}, "start:"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "start:"),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
    ],
)
def test_formats_reach_the_engine_as_grammars(client: openai.OpenAI, says: Any, fields: Any, part: str | None) -> None:
    pytest.importorskip("llguidance")
    asked = says("null")
    client.completions.create(model=MODEL, prompt="x", extra_body=fields)
    client.chat.completions.create(model=MODEL, messages=USER, extra_body=fields)
    for each in asked:
        assert (each.grammar is None) if part is None else (part in each.grammar)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "guided_regex is no grammar: it is refused: .*regex"),
        ({"guided_json": {"type": "x"}}, "guided_json", "Invalid type: x"),
        ({"guided_json": "{"}, "guided_json", "cannot be read"),
        ({"guided_json": '{"type": "null", "type": "string"}'}, "guided_json", "'type' comes twice"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
            "response_format",
            "must have type 'json_schema' and not 'json_object' beside a schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "must be 'text', 'json_object'"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "must be false"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "an answer follows one; give one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave ignore_eos out"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "leave min_tokens out"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens is not served"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs is not served"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "must be false",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(
    engine: FakeEngine, client: openai.OpenAI, fields: Any, param: str, message: str
) -> None:
    pytest.importorskip("llguidance")
    engine.peak = 0
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body=fields)
    assert (refused.value.param, engine.peak) == (param, 0)


def test_a_model_without_an_end_takes_no_grammar(
    engine: FakeEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "eos_token_ids", frozenset())
    with pytest.raises(openai.BadRequestError, match="no end-of-sequence token"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"guided_regex": "a"})


def test_responses_as_the_client_asks_for_them(client: openai.OpenAI, says: Any) -> None:
    says("Hello é")
    done = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"}, store=False
    )
    assert (done.output_text, done.status, done.object) == ("Hello é", "completed", "response")
    assert (done.instructions, done.metadata, done.incomplete_details) == ("Be brief.", {"a": "b"}, None)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (len("system: Be brief.\nuser: Hi\n"), 9)
    # The answer's output is input of the next turn.
    again = client.responses.create(
        model=MODEL, input=[*USER, *[item.model_dump() for item in done.output], *USER], max_output_tokens=3
    )
    assert (again.output_text, again.status) == ("Hel", "incomplete")
    assert again.incomplete_details is not None
    assert again.incomplete_details.reason == "max_output_tokens"
    assert again.usage is not None
    assert again.usage.input_tokens == len("user: Hi\nassistant: Hello é\nuser: Hi\n".encode())


def test_streams_of_responses(client: openai.OpenAI, says: Any) -> None:
    says("Hello é")
    with client.responses.stream(model=MODEL, input="Hi") as stream:  # puts the answer together itself
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Hello é"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello é"


def test_responses_have_formats(client: openai.OpenAI, says: Any) -> None:
    pytest.importorskip("llguidance")
    asked = says("null")
    asked_format: Any = {"type": "json_schema", "name": "x", "schema": {"type": "null"}}
    done = client.responses.create(model=MODEL, input="Hi", text={"format": asked_format})
    assert '"null"' in str(asked[0].grammar)
    assert done.text is not None
    assert done.text.format is not None
    assert done.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object", "schema": {"type": "null"}}}}, "text.format"),
    ],
)
def test_what_responses_do_not_serve_is_refused_by_name(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": MODEL, "input": "Hi"} | fields)
    assert refused.value.param == param


def test_every_field_of_responses_is_known() -> None:
    def code(name: str, value: Any) -> str | None:
        body = json.dumps({"model": "m", "input": "x", name: value}).encode()
        try:
            parse_body(ResponsesBody, body)
        except Refusal as refusal:
            return f"{refusal.param}: {refusal.code}"
        return None

    for name in set(response_create_params.ResponseCreateParamsBase.__annotations__) - {"model", "input"}:
        assert code(name, None) is None, name
        assert code(name, {"odd": [1]}) != f"{name}: unknown_parameter"


def test_pages_of_other_origins(url: str) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
        asks = httpx.options(f"{url}/v1/chat/completions", headers=asked | {"Origin": origin})
        assert asks.status_code == status
        found = httpx.get(f"{url}/v1/models", headers={"Origin": origin, "Authorization": "Bearer key"})
        assert found.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    assert httpx.get(f"{url}/v1/models", headers={"Origin": "https://a.example"}).status_code == 401


ASKED = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM_BENCH = {  # `vllm bench serve --backend openai-chat`, and `openai`
    "chat": ASKED
    | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_completion_tokens": 5,
    },
    "text": ASKED | {"prompt": "Hi", "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None},
}
SGLANG_BENCH = {  # `python -m sglang.bench_serving --backend sglang-oai-chat`, and `sglang-oai`
    "chat": ASKED | {"messages": USER, "max_completion_tokens": 5, "lora_path": None, "separate_reasoning": True},
    "text": ASKED | {"prompt": "Hi", "best_of": 1, "max_tokens": 5},
}


@pytest.mark.parametrize("bodies", [VLLM_BENCH, SGLANG_BENCH])
def test_load_generators_bodies_are_answered(url: str, bodies: dict[str, dict[str, Any]]) -> None:
    for route, body in zip(("chat/completions", "completions"), bodies.values(), strict=True):
        answered = httpx.post(f"{url}/v1/{route}", json=body, headers={"Authorization": "Bearer key"})
        assert answered.status_code == 200, answered.text
        lines = [line.removeprefix("data: ") for line in answered.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["usage"]["completion_tokens"] == 5
