"""The server over an engine without a model, asked by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import openai
import pytest
from openai.types import Completion
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from laconic.errors import ConfigError
from laconic.infer.detokenizer import Detokenizer, byte_stages
from laconic.infer.generation_config import AnswerDefaults
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.server import ByteTokenizer, HuggingFaceTokenizer, ServerSettings, TokenListener, create_app
from laconic.infer.server.bodies import parse_body
from tests.distributed.processes import wait_until
from tests.infer.serving import EOS, MODEL, FakeEngine, answer, client_of, running, served
from tests.infer.test_detokenizer import KINDS, tokenizer
from tests.patience import patient


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template."""

    def encode_chat(self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Any = None) -> list[int]:
        if messages[-1]["role"] != "user":
            raise ConfigError("the last message must be the user's")
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))


def text_of(prompt: str, **options: Any) -> str:
    return bytes(answer(list(prompt.encode()), Sampling(**options))).decode()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, ChatBytes(), ServerSettings(MODEL))) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def test_completions_are_what_the_engine_generates(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="one", seed=7, max_tokens=9)
    assert done.choices[0].text == text_of("one", seed=7, max_new_tokens=9)
    assert done.choices[0].finish_reason == "length"
    assert done.choices[0].logprobs is None
    assert (done.object, done.model) == ("text_completion", MODEL)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 9, 12)


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=["one", "two"], n=3, seed=7, max_tokens=5)
    expected = [text_of(p, seed=7, request=r, max_new_tokens=5) for p in ("one", "two") for r in range(3)]
    assert [choice.text for choice in done.choices] == expected
    assert [choice.index for choice in done.choices] == list(range(6))
    assert len(set(expected)) == 6
    tokens = client.completions.create(model=MODEL, prompt=[list(b"one"), list(b"two")], seed=7, max_tokens=5)
    assert [choice.text for choice in tokens.choices] == [expected[0], expected[3]]


def test_streams_give_the_same_text(client: openai.OpenAI) -> None:
    found = ["", ""]
    reasons: list[Any] = [None, None]
    usage = None
    for chunk in client.completions.create(
        model=MODEL, prompt="one", n=2, seed=7, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            found[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage
    assert found == [text_of("one", seed=7, request=r, max_new_tokens=20) for r in range(2)]
    assert reasons == ["length", "length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 40)


def test_chats(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    ]
    expected = text_of("system: Be brief.\nuser: Hi\n", seed=1, max_new_tokens=12)
    done = client.chat.completions.create(model=MODEL, messages=messages, seed=1, max_completion_tokens=12)
    assert (done.choices[0].message.role, done.choices[0].message.content) == ("assistant", expected)
    assert done.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(model=MODEL, messages=messages, seed=1, max_tokens=12, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "length"


def test_an_answer_of_a_chat_takes_what_fits_by_default(client: openai.OpenAI) -> None:
    for length in (5, 500):
        done = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * length}])
        assert done.usage is not None
        assert done.usage.completion_tokens == 512 - done.usage.prompt_tokens


def test_choices_of_a_chat_share_the_cache_by_default(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=USER, n=64)
    assert done.usage is not None
    assert done.usage.completion_tokens == 64 * (4096 // 64 - done.usage.prompt_tokens)


def test_what_a_request_does_not_say_is_the_models(engine: FakeEngine, url: str, client: openai.OpenAI) -> None:
    asked: list[Sampling] = []

    def note(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        asked.append(sampling)
        return [*b"one END", *b" two"][: sampling.max_new_tokens]

    engine.answer = note
    engine.answer_defaults = AnswerDefaults(0.6, 0.9, 20, max_new_tokens=11, stop=("END",))
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one ", "stop")
    assert (asked[-1].temperature, asked[-1].top_p, asked[-1].top_k, asked[-1].max_new_tokens) == (0.6, 0.9, 20, 11)
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "stop": []}
    text = client.completions.create(model=MODEL, prompt="one", max_tokens=11, extra_body=neutral)
    assert text.choices[0].text == "one END two"
    assert (asked[-1].temperature, asked[-1].top_p, asked[-1].top_k, asked[-1].max_new_tokens) == (1, 1, 0, 11)
    with running(create_app(engine, ChatBytes(), ServerSettings(MODEL, default_max_tokens=5))) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, "messages": messages}).status_code == 200
    assert asked[-1].max_new_tokens == 5


def test_other_requests_are_answered_while_a_long_body_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, answered = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> Any:
        reading.set()
        assert answered.wait(patient(10))
        return parse_body(*arguments)

    monkeypatch.setattr("laconic.infer.server.app.parse_body", read_slowly)
    body = {"model": MODEL, "prompt": "x" * 2**16}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(httpx.post, f"{url}/tokenize", json=body, timeout=patient(30))
        assert reading.wait(patient(10))
        assert httpx.get(f"{url}/health", timeout=patient(5)).status_code == 200
        answered.set()
        assert long.result().json()["count"] == 2**16


def test_stop_strings_across_tokens_end_the_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    full = text_of("one", seed=7, max_new_tokens=200)
    stop = full[30:34]
    for stream in (False, True):
        done: Any = client.completions.create(
            model=MODEL, prompt="one", seed=7, max_tokens=200, stop=["no such", stop], stream=stream
        )
        choices = [chunk.choices[0] for chunk in done] if stream else done.choices
        assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
        assert choices[-1].finish_reason == "stop"
        wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)


class MarkedBytes(ChatBytes):
    """Bytes of which "!" is a special token, whose text no answer has."""

    special_tokens: ClassVar = {"<|mark|>": 33}

    def decode(self, tokens: Sequence[int]) -> str:
        return super().decode([token for token in tokens if token != 33])

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(lambda token: None if token in (33, EOS) else chr(token), byte_stages())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_name_special_tokens_and_wait_for_min_tokens(engine: FakeEngine, stream: bool) -> None:
    def said(client: openai.OpenAI, **fields: Any) -> tuple[str, str | None]:
        asked = client.completions.create(model=MODEL, prompt="x", max_tokens=9, stream=stream, extra_body=fields)
        choices = [each.choices[0] for each in ([asked] if isinstance(asked, Completion) else asked)]
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    engine.says("ab!cd!ef!gh")
    with served(engine, MarkedBytes()) as client:
        assert said(client) == ("abcdef", "length")
        assert said(client, stop="<|mark|>") == ("ab", "stop")
        assert said(client, stop=["x", "<|mark|>"], min_tokens=3) == ("abcd", "stop")
        assert said(client, stop="b", min_tokens=2) == ("abcdef", "length")
        assert said(client, stop="bc", min_tokens=2) == ("a", "stop")  # complete with the fourth token
        with pytest.raises(openai.BadRequestError, match=r"no answer has the text of '<\|mark\|>'") as refused:
            said(client, stop="<|mark|>\n")
        assert refused.value.param == "stop"
        assert engine.free_cache_tokens == engine.cache_tokens


def test_stop_strings_of_a_model_that_end_no_answer_are_named(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.answer_defaults = AnswerDefaults(stop=("<|mark|>", "END"))
    create_app(engine, MarkedBytes(), ServerSettings(MODEL))
    assert caplog.messages == []
    engine.answer_defaults = AnswerDefaults(stop=("END", "<|mark|>\n"))
    create_app(engine, MarkedBytes(), ServerSettings(MODEL))
    (message,) = caplog.messages
    assert "has '<|mark|>\\n' in stop_strings, which ends no answer" in message
    engine.eos_token_ids = frozenset({EOS, 33})  # ends the answer before the string could
    create_app(engine, MarkedBytes(), ServerSettings(MODEL))
    assert len(caplog.messages) == 1


def test_characters_across_tokens_come_whole(engine: FakeEngine, client: openai.OpenAI) -> None:
    text = "a😀é€ b"
    engine.answer = lambda prompt, sampling: [*text.encode(), EOS]
    chunks = list(client.completions.create(model=MODEL, prompt="one", max_tokens=50, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == [*text, ""]
    assert chunks[-1].choices[0].finish_reason == "stop"
    done = client.completions.create(model=MODEL, prompt="one", max_tokens=50)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text, "stop")
    assert done.usage is not None
    assert done.usage.completion_tokens == len(text.encode()) + 1
    cut = client.completions.create(model=MODEL, prompt="one", max_tokens=3)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("a\ufffd", "length")


def test_an_answer_whose_pieces_are_not_its_text_is_an_error_with_both(engine: FakeEngine) -> None:
    class Wrong(ChatBytes):
        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode(tokens).upper()

    engine.answer = lambda prompt, sampling: [*b"abc", EOS]
    with running(create_app(engine, Wrong(), ServerSettings(MODEL))) as url:
        body = {"model": MODEL, "prompt": "one"}
        for options in ({}, {"max_tokens": 2}, {"stop": "b"}):
            given = "ab" if options else "abc"
            expected = f"pieces of this answer make {given!r}, but its tokens decode to {given.upper()!r}"
            whole = httpx.post(f"{url}/v1/completions", json=body | options)
            assert (whole.status_code, expected in whole.json()["error"]["message"]) == (500, True)
            streamed = httpx.post(f"{url}/v1/completions", json=body | options | {"stream": True})
            assert expected in json.loads(streamed.text.strip().split("data: ")[-1])["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_that_cannot_be_made_fails_its_request_alone(
    engine: FakeEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    decode = ByteTokenizer.decode

    def fails(self: ByteTokenizer, tokens: Sequence[int]) -> str:
        if 7 in tokens:
            raise KeyError("no such token")
        return decode(self, tokens)

    monkeypatch.setattr(ByteTokenizer, "decode", fails)
    engine.answer = lambda prompt, sampling: [65, 7 if prompt == list(b"bad") else 66, EOS]
    with pytest.raises(openai.APIError, match="an error of the server's own"):
        list(client.completions.create(model=MODEL, prompt="bad", stream=stream))
    assert client.completions.create(model=MODEL, prompt="good").choices[0].text == "AB"
    wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)


def test_logprobs(client: openai.OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="one", seed=7, max_tokens=3, logprobs=2)
    logprobs, text = done.choices[0].logprobs, text_of("one", seed=7, max_new_tokens=3)
    assert logprobs is not None
    assert logprobs.tokens == list(text)
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"A": -1.0, "B": -2.0, token: -0.5} for token in text]  # with the chosen one
    assert logprobs.text_offset == [0, 1, 2]
    none = client.completions.create(model=MODEL, prompt="one", seed=7, max_tokens=3, logprobs=0).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs == [{token: -0.5} for token in text]
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for stream in (False, True):
        chat: Any = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=3, logprobs=True, top_logprobs=1, stream=stream
        )
        choices = [chunk.choices[0] for chunk in chat] if stream else chat.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert len(entries) == 3
        assert entries[0].bytes == list(entries[0].token.encode())
        assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("A", -1.0)]


def test_streams_of_a_tokenizer_with_byte_fallback_are_its_text(engine: FakeEngine) -> None:
    original = tokenizer("Llama 2", False)
    generator, size = random.Random(0), len(original)
    answers: list[list[int]] = []

    def say(prompt: Sequence[int], sampling: Sampling) -> list[int]:
        few = [generator.randrange(size) for _ in range(generator.choice([3, size]))]
        answers.append(generator.choices([token for token in few if token != EOS], k=sampling.max_new_tokens))
        return answers[-1]

    engine.answer = say
    with served(engine, HuggingFaceTokenizer(original)) as client:
        for number in range(40):
            stop = [] if number % 2 else ["\ufffdt", "é"]
            chunks = client.completions.create(model=MODEL, prompt=[1], max_tokens=30, stop=stop, stream=True)
            text = "".join(chunk.choices[0].text for chunk in chunks)
            whole = str(original.decode(answers[-1], skip_special_tokens=True))
            ends = [place for each in stop if (place := whole.find(each)) >= 0]
            assert text == whole[: min(ends, default=len(whole))]


@pytest.mark.parametrize("as_ids", [False, True])
def test_logprobs_lose_no_token_though_texts_are_the_same(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, as_ids: bool
) -> None:
    """Llama's "▁one" and "one", "." and its byte, halves of characters."""
    model, decoder = KINDS["Llama 2"]
    rust = Tokenizer(model())
    rust.decoder = decoder
    ours = HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, chat_template="two{{ messages[0].content }}")
    )
    ids = [rust.token_to_id(name) for name in ["two", "<0x74>", "<0x0A>", ".", "<0x2E>", "<0xC3>", "▁one", "▁"]]
    dot, dot_byte, by_ids = ids[3], ids[4], [f"token_id:{token}" for token in ids]
    top = tuple((token, -1.0 - place) for place, token in enumerate(ids))
    monkeypatch.setattr(engine, "stream", lambda prompt, sampling, listener: say(listener, [dot_byte, dot], top))
    options: dict[str, Any] = {"model": MODEL, "extra_body": {"return_tokens_as_token_ids": as_ids}}
    with served(engine, ours) as client:
        text = client.completions.create(prompt=[1], logprobs=8, **options).choices[0].logprobs
        chat = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=8, **options)
    assert text is not None
    assert text.top_logprobs is not None
    for place, found in enumerate(text.top_logprobs):
        assert list(found.values()) == [logprob for _, logprob in top]  # none has been lost
        texts = ["two", "t", "\n", *[[by_ids[3], "."], [".", by_ids[4]]][place], "<0xC3>", " one", " "]
        assert list(found) == (by_ids if as_ids else texts)
    assert text.tokens == ([by_ids[4], by_ids[3]] if as_ids else [".", "."])
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    entry = chat.choices[0].logprobs.content[0]
    assert (entry.bytes, entry.logprob) == ([ord(".")], -0.5)
    given = [bytes(each.bytes or []) for each in entry.top_logprobs]
    assert given == [b"two", b"t", b"\n", b".", b".", b"\xc3", b" one", b" "]
    texts = ["two", "t", "\n", ".", ".", "<0xC3>", " one", " "]
    assert [each.token for each in entry.top_logprobs] == (by_ids if as_ids else texts)


def say(listener: TokenListener, tokens: list[int], top: tuple[tuple[int, float], ...]) -> Any:
    for token in tokens:
        listener.on_token(ChosenToken(token, -0.5, top))
    listener.on_end(None)
    return SimpleNamespace(cancel=lambda: False)


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    found = {client.completions.create(model=MODEL, prompt="one").choices[0].text for _ in range(5)}
    assert len(found) == 5
    assert {len(text) for text in found} == {16}


def test_equal_prompts_draw_apart_without_a_seed(client: openai.OpenAI) -> None:
    """With one, each has the choices that it has alone."""

    def texts(**options: Any) -> list[str]:
        made = client.completions.create(model=MODEL, prompt=["one", "one"], n=2, **options)
        return [choice.text for choice in made.choices]

    assert len(set(texts())) == 4
    first, second = text_of("one", seed=7, max_new_tokens=16), text_of("one", seed=7, request=1, max_new_tokens=16)
    assert texts(seed=7) == [first, second] * 2


def test_more_tokens_than_an_answer_has_by_default_are_refused(url: str) -> None:
    body = {"model": MODEL, "prompt": "one", "min_tokens": 17}
    refused = httpx.post(f"{url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert (
        "min_tokens is 17, but an answer without max_tokens has at most 16 here" in refused.json()["error"]["message"]
    )
    assert httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 17}).status_code == 200


def test_penalties_biases_and_vllms_fields_reach_the_engine(engine: FakeEngine, client: openai.OpenAI) -> None:
    asked: list[Sampling] = []
    engine.answer = lambda prompt, sampling: asked.append(sampling) or [65, EOS, 66, 67]  # type: ignore[func-returns-value]
    extra = {"min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [67]}
    done = client.completions.create(
        model=MODEL,
        prompt="one",
        frequency_penalty=0.5,
        presence_penalty=-1,
        logit_bias={"65": 3},
        extra_body=extra,
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("AB", "stop")
    rules = {
        "repetition_penalty": 1.1,
        "min_p": 0.1,
        "min_new_tokens": 2,
        "min_length": None,
        "sequence_bias": [[[65], 3.0]],
    }
    found = asked[0]
    assert (found.rules, found.frequency_penalty, found.presence_penalty) == (rules, 0.5, -1)
    assert (found.ignore_eos, found.stop_token_ids) == (True, (67,))


def test_answers_can_be_sent_back_as_they_came(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        message = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3).choices[0].message
        messages += [message.model_dump(), message, {"role": "assistant", "content": None}, *messages[:1]]
    nothing = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "function_call": None}
    whole = [{"role": "user", "content": "Hi"}, nothing, {"role": "user", "content": "Hi"}]
    tokens = client.with_options(base_url=str(client.base_url).removesuffix("v1/")).post(
        "/tokenize", body={"messages": whole}, cast_to=dict[str, Any]
    )
    assert bytes(tokens["tokens"]).decode() == "user: Hi\nassistant: \nuser: Hi\n"


def test_one_model_and_tokens_of_texts(client: openai.OpenAI) -> None:
    found = client.models.retrieve(MODEL)
    assert (found.id, found.object, found.owned_by, found.max_model_len) == (MODEL, "model", "laconic", 512)  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="only 'tiny' is served"):
        client.models.retrieve("other/model")
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    made = root.post(
        "/tokenize", body={"model": MODEL, "prompt": "né", "return_token_strs": True}, cast_to=dict[str, Any]
    )
    assert made["tokens"] == list("né".encode())
    assert made == made | {"count": 3, "max_model_len": 512, "token_strs": ["<0x6E>", "<0xC3>", "<0xA9>"]}
    assert root.post("/detokenize", body={"tokens": made["tokens"]}, cast_to=dict[str, Any]) == {"prompt": "né"}
    for path, body, message in (
        ("/tokenize", {"model": "other", "prompt": "x"}, "only 'tiny'"),
        ("/tokenize", {}, "give one"),
        ("/tokenize", {"prompt": "x", "messages": USER}, "give one"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is given"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is given with prompt"),
        ("/detokenize", {"tokens": [-1]}, "must be a list of ids"),
        ("/detokenize", {"tokens": [9, 257]}, "the token 257, which is none"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            root.post(path, body=body, cast_to=dict[str, Any])


def test_models_health_and_metrics(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    for route in ("health", "ready"):
        assert httpx.get(f"{url}/{route}").json() == {"status": "ok"}
    client.completions.create(model=MODEL, prompt="one", max_tokens=5)
    assert httpx.get(f"{url}/nothing").status_code == 404
    page = httpx.get(f"{url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    assert samples['laconic_http_answers_total{path="/v1/completions",status="200"}'] == "1"
    assert samples['laconic_http_answers_total{path="other",status="404"}'] == "1"
    assert samples['laconic_tokens_total{kind="prompt"}'] == "3"
    assert samples['laconic_tokens_total{kind="completion"}'] == "5"
    assert samples["laconic_first_token_seconds_count"] == "1"
    assert samples['laconic_request_seconds_bucket{le="+Inf"}'] == "1"
    assert samples["laconic_free_cache_tokens"] == samples["laconic_cache_tokens"] == "4096"
    assert samples["laconic_requests_running"] == samples["laconic_requests_waiting"] == "0"


USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", b"{", 400, None, "the body is not JSON"),
        ("completions", b"[" * 100_000, 400, None, "the body is not JSON"),
        ("completions", b'{"model": NaN}', 400, None, "the body is not JSON"),
        ("completions", b"\xff", 400, None, "the body is not JSON"),
        ("completions", b'"text"', 400, None, "must be a JSON object"),
        ("completions", {"prompt": "x"}, 400, "model", "model is missing"),
        ("completions", {"model": "other", "prompt": "x"}, 404, "model", "only 'tiny' is served"),
        ("completions", {"model": 3, "prompt": "x"}, 400, "model", "must be a valid string"),
        ("completions", {"model": MODEL}, 400, "prompt", "prompt is missing"),
        ("completions", {"model": MODEL, "prompt": ""}, 400, "prompt", "no tokens"),
        ("completions", {"model": MODEL, "prompt": []}, 400, "prompt", "no list may be empty"),
        ("completions", {"model": MODEL, "prompt": [[]]}, 400, "prompt", "no list may be empty"),
        ("completions", {"model": MODEL, "prompt": ["x", [1]]}, 400, "prompt", "a list of token ids"),
        ("completions", {"model": MODEL, "prompt": [-1]}, 400, "prompt", "a list of token ids"),
        ("completions", {"model": MODEL, "prompt": [True]}, 400, "prompt", "a list of token ids"),
        ("completions", {"model": MODEL, "prompt": [1, 99_999]}, 400, None, "are from 0 to 256"),
        ("completions", {"model": MODEL, "prompt": [1, 9**99], "echo": True}, 400, "prompt", "none of the model's"),
        ("completions", {"model": MODEL, "prompt": {"a": 1}}, 400, "prompt", "a list of token ids"),
        ("completions", {"model": MODEL, "prompt": "x" * 500}, 400, "prompt", "length is 512"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 512}, 400, "prompt", "length is 512"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 500, "n": 9}, 400, "prompt", "smaller n"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "echo is not true"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}, 400, "max_tokens", "greater than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 1.5}, 400, "max_tokens", "integer"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": True}, 400, "max_tokens", "integer"),
        ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 10**30}, 400, "max_tokens", "max_tokens is"),
        ("completions", {"model": MODEL, "prompt": "x", "temperature": -1}, 400, "temperature", "temperature is -1"),
        ("completions", {"model": MODEL, "prompt": "x", "temperature": 2.1}, 400, "temperature", "less than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "temperature": "1"}, 400, "temperature", "valid number"),
        ("completions", {"model": MODEL, "prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
        ("completions", {"model": MODEL, "prompt": "x", "top_k": -2}, 400, "top_k", "greater than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "seed": 2**63}, 400, "seed", "seed is"),
        ("completions", {"model": MODEL, "prompt": "x", "n": 0}, 400, "n", "greater than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "n": 65}, 400, "n", "less than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "logprobs": 21}, 400, "logprobs", "less than or equal"),
        ("completions", {"model": MODEL, "prompt": "x", "stop": [""]}, 400, "stop", "none of them empty"),
        ("completions", {"model": MODEL, "prompt": "x", "stop": 3}, 400, "stop", "none of them empty"),
        ("completions", {"model": MODEL, "prompt": "x", "stop": ["x"] * 17}, 400, "stop", "at most 16"),
        ("completions", {"model": MODEL, "prompt": "x", "stream": 1}, 400, "stream", "valid boolean"),
        ("completions", {"model": MODEL, "prompt": "x", "stream_options": {}}, 400, "stream_options", "stream is not"),
        ("completions", {"model": MODEL, "prompt": "x", "suffix": "y"}, 400, "suffix", "suffix is not served"),
        ("completions", {"model": MODEL, "prompt": "x", "top_q": 1}, 400, "top_q", "top_q is no field that is served"),
        ("completions", {"model": MODEL, "messages": USER}, 400, "prompt", "prompt is missing"),
        ("chat/completions", {"model": MODEL}, 400, "messages", "messages is missing"),
        ("chat/completions", {"model": MODEL, "messages": []}, 400, "messages", "at least 1 item"),
        ("chat/completions", {"model": MODEL, "messages": [{}]}, 400, "messages.0.role", "is missing"),
        (
            "chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content",
            "parts of type text",
        ),
        (
            "chat/completions",
            {"model": MODEL, "messages": [{"role": "assistant", "content": "x"}]},
            400,
            "messages",
            "must be the user's",
        ),
        ("chat/completions", {"model": MODEL, "messages": USER, "tools": [{}]}, 400, "tools.0.type", "is missing"),
        (
            "chat/completions",
            {"model": MODEL, "messages": USER, "max_tokens": 1, "max_completion_tokens": 2},
            400,
            "max_tokens",
            "give one",
        ),
    ],
)
def test_bad_requests_are_refused_by_name(
    shared_client: httpx.Client, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answered = shared_client.post(f"/v1/{path}", content=content, headers=headers)
    error = answered.json()["error"]
    assert (answered.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert message in error["message"]


@pytest.fixture(scope="module")
def shared_url() -> Iterator[str]:
    engine = FakeEngine()
    with running(create_app(engine, ChatBytes(), ServerSettings(MODEL, max_body_bytes=200_000))) as url:
        yield url
    assert engine.peak == 0
    engine.close()


@pytest.fixture(scope="module")
def shared_client(shared_url: str) -> Iterator[httpx.Client]:
    """One for many requests: each new one reads the system's certificates."""
    with httpx.Client(base_url=shared_url) as client:
        yield client


def test_other_kinds_of_bodies_are_refused(shared_url: str) -> None:
    address = f"{shared_url}/v1/completions"
    answered = httpx.post(address, content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answered.status_code, answered.json()["error"]["type"]) == (415, "invalid_request_error")
    for charset, status in (("latin-1", 415), ("UTF-8", 400), ('"utf-8"', 400), ("utf-16; charset=utf-8", 415)):
        answered = httpx.post(address, content=b"{}", headers={"Content-Type": f"application/json; charset={charset}"})
        assert answered.status_code == status, charset
        assert ("JSON is read as utf-8" in answered.text) == (status == 415)
    long, headers = b" " * 200_001, {"Content-Type": "application/json"}
    answered = httpx.post(address, content=gzip.compress(b"{}"), headers=headers | {"Content-Encoding": "gzip"})
    assert (answered.status_code, "Content-Encoding is 'gzip'" in answered.text) == (415, True)
    for content in (long, iter([long[:100_000], long[100_000:]])):  # with its length in a header, and without
        answered = httpx.post(address, content=content, headers=headers)
        assert answered.status_code == 413
        assert "200000 bytes" in answered.json()["error"]["message"]


def test_no_field_goes_into_a_query_string(client: openai.OpenAI) -> None:
    """There servers of FastAPI pass it over without a word; api-version and others come from proxies and clients."""
    done = client.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_query={"api-version": "1"})
    assert done.usage is not None
    for name in ("stream", "n", "suffix"):
        with pytest.raises(openai.BadRequestError, match=f"{name} is in the query string") as refused:
            client.completions.create(model=MODEL, prompt="x", extra_query={name: "2"})
        assert refused.value.param == name


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    engine = FakeEngine()
    with (
        running(create_app(engine, ChatBytes(), ServerSettings(MODEL, max_body_seconds=1))) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as slow,
    ):
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 500"]
        slow.sendall("\r\n".join([*lines, "", '{"model"']).encode())
        with slow.makefile("rb") as answer:
            found = answer.read()  # until the server hangs up
    assert found.startswith(b"HTTP/1.1 408 ")
    assert b"the body has not arrived within 1 s" in found
    assert engine.peak == 0
    engine.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/reset", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/completions/", 404),
    ],
)
def test_there_are_no_other_routes(shared_url: str, method: str, path: str, status: int) -> None:
    answered = httpx.request(method, shared_url + path)
    assert answered.status_code == status
    assert "is not served here" in answered.json()["error"]["message"]


def test_the_key_is_asked_for_everywhere_but_at_health(engine: FakeEngine) -> None:
    with running(create_app(engine, ChatBytes(), ServerSettings(MODEL, api_key="secret"))) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/metrics", "/nothing"):
                answered = httpx.get(url + path, headers=headers)
                assert answered.status_code == 401
                assert answered.json()["error"]["code"] == "invalid_api_key"
            assert httpx.post(f"{url}/v1/completions", json={}, headers=headers).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        page = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer secret"}).text
        assert 'laconic_http_answers_total{path="/v1/models",status="401"} 3' in page
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="one", seed=7).choices[0].text
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="Secret", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_cache(engine: FakeEngine, url: str, stream: bool) -> None:
    engine.answer = lambda prompt, sampling: [97] * sampling.max_new_tokens
    engine.paused.set()
    body = {"model": MODEL, "prompt": "one", "max_tokens": 500, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    assert engine.peak > 0
    wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)
    wait_until(lambda: 'laconic_cancelled_total{reason="disconnect"} 1' in httpx.get(f"{url}/metrics").text)
    engine.paused.clear()
    assert httpx.post(f"{url}/v1/completions", json=body | {"stream": False}).status_code == 200


def test_a_client_that_goes_away_within_its_body_is_no_error(
    url: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as short:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        short.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
    wait_until(lambda: 'path="/v1/completions",status="499"} 1' in httpx.get(f"{url}/metrics").text)
    assert engine.peak == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.ci
def test_overload_is_refused_at_once_and_the_rest_is_served(engine: FakeEngine) -> None:
    settings = ServerSettings(MODEL, max_waiting=2, retry_after_seconds=3)
    with running(create_app(engine, ChatBytes(), settings)) as url:

        async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
            body = {"model": MODEL, "prompt": f"p{number}", "max_tokens": 500, "seed": number}
            return await client.post(f"{url}/v1/completions", json=body)

        async def check() -> None:
            limits = httpx.Limits(max_connections=50)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                engine.paused.set()
                running_now = [asyncio.create_task(ask(client, number)) for number in range(8)]  # 8 x 502 of 4096
                while engine.free_cache_tokens > 100:
                    await asyncio.sleep(0.01)
                waiting = [asyncio.create_task(ask(client, number)) for number in range(8, 10)]
                while "laconic_requests_waiting 2" not in (await client.get(f"{url}/metrics")).text:
                    await asyncio.sleep(0.01)
                refused = await ask(client, 10)
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "3"
                assert refused.json()["error"]["type"] == "rate_limit_error"
                waiting[0].cancel()  # a client that waits may go, too: its place is free again
                while "laconic_requests_waiting 1" not in (await client.get(f"{url}/metrics")).text:
                    await asyncio.sleep(0.01)
                waiting.append(asyncio.create_task(ask(client, 11)))
                while "laconic_requests_waiting 2" not in (await client.get(f"{url}/metrics")).text:
                    await asyncio.sleep(0.01)
                engine.paused.clear()
                for number, task in zip([*range(8), 9, 11], [*running_now, *waiting[1:]], strict=True):
                    done = await task
                    expected = text_of(f"p{number}", seed=number, max_new_tokens=500)
                    assert done.json()["choices"][0]["text"] == expected

        asyncio.run(check())
        assert engine.free_cache_tokens == engine.cache_tokens


def test_a_client_that_does_not_read_is_cancelled_and_blocks_nobody(engine: FakeEngine) -> None:
    engine.answer = lambda prompt, sampling: [97] * sampling.max_new_tokens
    model = "m" * 4000  # every event names it: 18 MB, more than all buffers between the server and the client hold
    settings = ServerSettings(model, max_unread_tokens=8)
    with running(create_app(engine, ChatBytes(), settings)) as url:
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": 500, "n": 8, "stream": True, "logprobs": 20})
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            slow.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            wait_until(lambda: engine.peak > 0)
            quick = {"model": model, "prompt": "y", "max_tokens": 5}
            assert httpx.post(f"{url}/v1/completions", json=quick).status_code == 200
            wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)
            read = b""
            while chunk := slow.recv(1 << 16):
                read += chunk
                if b"0\r\n\r\n" in read[-5:]:
                    break
        assert b"left 8 tokens unread" in read
        assert b"[DONE]" not in read
        assert 'laconic_cancelled_total{reason="slow_client"} 1' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_engine_fails_its_requests(engine: FakeEngine, url: str, stream: bool) -> None:
    engine.paused.set()
    with client_of(url) as client:
        if stream:
            chunks = client.completions.create(model=MODEL, prompt="one", stream=True)
            wait_until(lambda: engine.peak > 0)
            engine.fail("expert worker 0 was lost")
            with pytest.raises(openai.APIError, match="expert worker 0 was lost"):
                list(chunks)
        else:
            asyncio.run(fail_during_a_request(engine, url))
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        with pytest.raises(openai.InternalServerError, match="takes no requests: expert worker 0 was lost"):
            client.completions.create(model=MODEL, prompt="one")


async def fail_during_a_request(engine: FakeEngine, url: str) -> None:
    """Also the requests that wait are answered."""
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 500}
        asked = [asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(10)]
        while "laconic_requests_waiting 2" not in (await client.get(f"{url}/metrics")).text:
            await asyncio.sleep(0.01)
        engine.fail("expert worker 0 was lost")
        answers = [await each for each in asked]
        assert sorted(answered.status_code for answered in answers) == [500] * 8 + [503] * 2
        assert all("expert worker 0 was lost" in answered.json()["error"]["message"] for answered in answers)


def test_shutdown_lets_requests_end(engine: FakeEngine) -> None:
    engine.paused.set()
    found = []

    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = await client.completions.create(model=MODEL, prompt="one", seed=1, max_tokens=300, stream=True)
            engine.paused.clear()
            found.append("".join([chunk.choices[0].text async for chunk in chunks]))

    with running(create_app(engine, ChatBytes(), ServerSettings(MODEL))) as url:
        asking = threading.Thread(target=lambda: asyncio.run(ask(url)))
        asking.start()
        wait_until(lambda: not engine.paused.is_set())
    asking.join()
    assert found == [text_of("one", seed=1, max_new_tokens=300)]


@pytest.mark.ci
def test_200_requests_at_random_times_get_their_own_answers(engine: FakeEngine, url: str) -> None:
    times = random.Random(5)

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        prompt, length, stream = f"prompt {number}", times.randrange(1, 60), number % 2 == 0
        done: Any = await client.completions.create(
            model=MODEL, prompt=prompt, seed=number, max_tokens=length, stream=stream
        )
        text = "".join([c.choices[0].text async for c in done]) if stream else done.choices[0].text
        assert text == text_of(prompt, seed=number, max_new_tokens=length)

    async def check() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            tasks = []
            for number in range(200):
                tasks.append(asyncio.create_task(ask(client, number)))
                await asyncio.sleep(times.expovariate(200))
            await asyncio.gather(*tasks)

    asyncio.run(check())
    assert 0 < engine.peak <= engine.cache_tokens
    wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_name", ""),
        ("api_key", ""),
        ("api_key", "schlüssel"),
        ("max_model_tokens", 1),
        ("max_waiting", -1),
        ("max_body_bytes", 0),
        ("max_body_seconds", 0),
        ("max_waiting", True),
        ("max_unread_tokens", 2.5),
        ("max_body_bytes", "9"),
        ("allowed_origins", "https://a.example"),
        ("allowed_origins", ["https://a.example/"]),
        ("allowed_origins", ["https://A.example"]),
        ("allowed_origins", ["https://a.example:443"]),
        ("allowed_origins", ["https://a.example:x"]),
        ("allowed_origins", ["https://me@a.example"]),
        ("allowed_origins", ["a.example"]),
        ("allowed_origins", ["https://"]),
        ("allowed_origins", [8080]),
        ("allowed_origins", ["https://*.example.com"]),
        ("allowed_origins", ["http://localhost:"]),
        ("allowed_origins", ["http://a\\b"]),
        ("allowed_origins", ["https://exämple.com"]),
        ("allowed_origins", ["https://a b"]),
        ("allowed_origins", ["https://a%41"]),
        ("allowed_origins", ["https://a?b"]),
        ("allowed_origins", ["https://a#b"]),
        ("allowed_origins", ["https://a.example:08080"]),
        ("allowed_origins", ["https://a.example:0"]),
        ("allowed_origins", ["https://a.example:65536"]),
        ("allowed_origins", ["http://127.1"]),
        ("allowed_origins", ["http://[0:0::1]"]),
        ("allowed_origins", ["http://[::1"]),
        ("allowed_origins", ["http://::1"]),
        ("allowed_origins", ["*://a.example"]),
        ("allowed_origins", ["https://a.example\n"]),
    ],
)
def test_settings_that_break_a_rule_are_refused(name: str, value: Any) -> None:
    origins = ("*", "null", "https://a.example", "http://a.example:8080", "http://[::1]:3000", "app://obsidian.md")
    origins += ("http://localhost", "http://127.0.0.1:5173", "https://xn--exmple-cua.com", "https://a_b.example.")
    origins += ("chrome-extension://abcdefghijklmnop", "moz-extension://5c4a9d2e-0000", "https://a.example:65535")
    ServerSettings(MODEL, allowed_origins=origins)
    with pytest.raises(ConfigError, match=f"^{name} "):
        ServerSettings(**{"model_name": MODEL, name: value})
