"""The server over the real engine: a tiny model with a tokenizer of bytes, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from laconic.cli.main import main
from laconic.errors import ConfigError
from laconic.infer import Engine, InferencePlan
from laconic.infer.server import ByteTokenizer, HuggingFaceTokenizer, ServerSettings, create_app, load_text_tokenizer
from tests.distributed.processes import wait_until
from tests.infer.models import generated, make
from tests.infer.serving import FakeEngine, running, served
from tests.patience import patient

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def bytewise(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=template)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = bytewise(TEMPLATE)
    assert len(tokenizer) == 257
    path = make(
        "qwen2_moe",
        tmp_path_factory.mktemp("models"),
        vocab_size=257,
        eos_token_id=256,
        pad_token_id=256,
        max_position_embeddings=128,
    )
    tokenizer.save_pretrained(path)
    return path


def greedy(model: Path, prompt: str, new_tokens: int) -> str:
    """What transformers generates after `prompt`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = generated(model, [tokenizer(prompt)["input_ids"]], new_tokens)[0]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_the_models_tokenizer(model: Path) -> None:
    tokenizer = load_text_tokenizer(model)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    text = "a 😀 é"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode([*tokens, 256]) == text
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat) == "user: Hi\nassistant:"
    assert len({tokenizer.token_name(token) for token in range(257)}) == 257


def test_templates_get_tools_and_variables() -> None:
    called = "{% set call = messages[0].tool_calls[0].function %}{{ call.name }}({{ call.arguments.a }})"
    template = "{{ tools | tojson if tools else 'no tools' }} {{ thinks }} " + called
    ours = HuggingFaceTokenizer(bytewise(template))
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ours.decode(ours.encode_chat(messages)) == "no tools  f(1)"
    assert ours.decode(ours.encode_chat(messages, [{"type": "function"}], {"thinks": False})) == (
        '[{"type": "function"}] False f(1)'
    )
    for name in ("think", "no", "call", "tokenize", "messages", "chat_template"):
        with pytest.raises(ConfigError, match=f"no variable '{name}' that a request can set"):
            ours.encode_chat(messages, variables={name: True})
    assert "tojson" in str(ours.chat_template)
    assert HuggingFaceTokenizer(bytewise("")).chat_template in (None, "")


@pytest.mark.parametrize(
    ("role", "tools", "what"),
    [
        ("developer", [], r"messages\.1, whose role is developer; give it another role"),
        ("tool", [], r"messages\.1, whose role is tool"),
        ("assistant", [], r"tool_calls of messages\.1"),
        ("user", [{"type": "function", "function": {"name": "f"}}], r"tools\.0"),
    ],
)
def test_what_a_template_passes_over_is_refused(role: str, tools: list[dict[str, Any]], what: str) -> None:
    """As Qwen's with the role developer: the answer would be to a conversation without it."""
    known = "{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }}{% endif %}"
    ours = HuggingFaceTokenizer(bytewise("tools{% for m in messages %}" + known + "{% endfor %}"))
    message: dict[str, Any] = {"role": role, "content": "brief"}
    if role == "assistant":
        message["tool_calls"] = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "system", "content": "S"}, message, {"role": "user", "content": "brief"}]
    with pytest.raises(ConfigError, match=f"chat template has no place for {what}"):
        ours.encode_chat(messages, tools)
    assert ours.decode(ours.encode_chat([messages[0], messages[2]])) == "toolsSbrief"


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ("{% for m in messages %}{% if m.content is not string %}{{ m.content }}{% endif %}{% endfor %}", 0),
        ("{% for m in messages %}{{ m.content if m.role == 'user' else m.content[0] | tojson }}{% endfor %}", 1),
        ("{{ messages[-1].content }}", 0),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", 1),
    ],
)
def test_a_text_that_a_template_passes_over_is_refused(template: str, place: int) -> None:
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    with pytest.raises(ConfigError, match=rf"no place for messages\.{place}, .*; leave it out, or ask /v1/completions"):
        HuggingFaceTokenizer(bytewise(template)).encode_chat(said)


PARTS = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    "shown",
    [
        PARTS,
        "{{ m['content'][0]['text'] }}",
        "{{ m.role + ': ' + m['content'][0]['text'] }}",  # raises at a text
        "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}",
        "{% if m.role == 'system' %}{{ 'Be: ' + m.content }}{% else %}" + PARTS + "{% endif %}",
    ],
)
@pytest.mark.parametrize("said", ["Hi é", "[{'type': 'text'}]", ""])
def test_templates_that_take_contents_as_lists_of_parts_get_them(shown: str, said: str) -> None:
    """As those of models that see images, whose texts alone are served."""
    tokenizer = bytewise("{% for m in messages %}<{{ m.role }}>" + shown + "{{ m.tool_calls or '' }}{% endfor %}")
    ours = HuggingFaceTokenizer(tokenizer)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}}}
    told = [{"role": role, "content": content} for role, content in (("system", "S"), ("user", said), ("tool", "T"))]
    told.insert(2, {"role": "assistant", "content": "I call.", "tool_calls": [call]})
    template_takes = [
        message
        if message["role"] == "system" and "'Be: '" in shown
        else message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in told
    ]
    expected = tokenizer.apply_chat_template(template_takes, tokenize=False)
    assert "I call." in expected
    assert ours.decode(ours.encode_chat(told)) == expected


@pytest.mark.parametrize("shown", ["function.name", "function.arguments"])
def test_a_call_of_a_tool_is_shown_by_its_name_or_its_arguments(shown: str) -> None:
    """Some templates print identifiers, as functions.f:0, in place of names."""
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call." + shown + " }}{% endfor %}{% endfor %}"
    )
    ours = HuggingFaceTokenizer(bytewise(template))
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = ours.decode(ours.encode_chat([{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert text == call["function"][shown.partition(".")[2]]  # type: ignore[index]


def test_completions_continue_the_text_of_their_prompt() -> None:
    """Where a decoder leaves out the space at the start of a text, prompt and answer were run together."""
    symbols = ["<s>", "▁", "a", "b", "c", "▁a"]
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, [("▁", "a")]))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    original = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", chat_template="{{ messages[0].content }}"
    )
    engine, answer = FakeEngine(), [1, 1, 3, 5]
    engine.answer = lambda prompt, sampling: answer
    try:
        with served(engine, HuggingFaceTokenizer(original)) as client:
            for prompt, text in (([0, 5, 4], "  b a"), ([0], " b a")):  # behind a text, and where it begins
                shown = original.decode(prompt, skip_special_tokens=True)
                assert original.decode([*prompt, *answer], skip_special_tokens=True) == shown + text
                ask: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
                assert client.completions.create(**ask, echo=True).choices[0].text == shown + text
                chunks = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
                assert "".join(chunks) == text
            cut = client.completions.create(model="tiny", prompt="a", max_tokens=4, stop="  b")
            assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("", "stop")
            chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
            assert client.chat.completions.create(**chat).choices[0].message.content == " b a"
            pytest.importorskip("llguidance")  # what its grammar has seen is the answer, also where a text begins
            by_grammar = client.chat.completions.create(**chat, extra_body={"guided_choice": ["  b a"]})
            assert by_grammar.choices[0].message.content == "  b a"
    finally:
        engine.close()


def test_models_of_bytes_and_models_without_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(make("llama", tmp_path, vocab_size=257))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0x61, 256, 0xC3]) == "a\ufffd"
    with pytest.raises(ConfigError, match=r"no tokenizer.*; put the tokenizer\.json that it was trained with beside"):
        load_text_tokenizer(make("llama", tmp_path / "other"))
    with pytest.raises(ConfigError, match="without a chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`laconic serve` as its users start it."""
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "laconic", "serve", "--model", str(model), "--port", "0", "--name", "tiny"]
    flags = ["--api-key-file", str(tmp_path / "key"), "--dtype", "float32", "--cache-tokens", "512"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process:
        said = ""
        while "is served at" not in said:
            said = process.stdout.readline()
            assert said, "the server ended"
        yield said.split()[-1], process
        if process.poll() is None:
            process.terminate()


def check_prompt_logprobs(client: openai.OpenAI, model: Path) -> None:
    """An echo of two prompts, one a part of the other, has the logprobs of the plain forward."""
    prompts = ["Once upon a time", "Once upon a time there was é"]
    done = client.completions.create(model="tiny", prompt=prompts, echo=True, max_tokens=0, logprobs=1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, choice in zip(prompts, done.choices, strict=True):
        assert choice.text == prompt
        tokens = AutoTokenizer.from_pretrained(model)(prompt)["input_ids"]
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        assert choice.logprobs is not None
        first, *found = choice.logprobs.token_logprobs or []
        assert first is None
        assert found == pytest.approx(
            [float(row[token]) for row, token in zip(expected, tokens[1:], strict=False)], abs=1e-4
        )


@pytest.mark.slow
def test_the_command_serves_what_transformers_generates(server: tuple[str, subprocess.Popen[str]], model: Path) -> None:
    url, process = server
    assert url.startswith("http://127.0.0.1:")
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        done = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=12, logprobs=1)
        expected = greedy(model, "Once", 12)
        assert done.choices[0].text == expected
        assert done.choices[0].logprobs is not None
        tokens, top = done.choices[0].logprobs.tokens, done.choices[0].logprobs.top_logprobs
        assert top is not None
        assert [list(each) for each in top] == [[token] for token in tokens or []]

        check_prompt_logprobs(client, model)
        extra = {"guided_regex": "[a-c]{3}"}
        by_grammar = client.completions.create(model="tiny", prompt="Once", temperature=0, extra_body=extra)
        assert re.fullmatch("[a-c]{3}", by_grammar.choices[0].text)
        assert by_grammar.choices[0].finish_reason == "stop"

        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        stream = client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == greedy(model, "user: Hi\nassistant:", 12)

        drawn = [
            client.completions.create(model="tiny", prompt="Once", seed=seed, max_tokens=12, n=2).choices
            for seed in (1, 1, 2)
        ]
        assert [choice.text for choice in drawn[0]] == [choice.text for choice in drawn[1]]
        assert len({choice.text for choices in drawn for choice in choices}) == 4
        with pytest.raises(openai.BadRequestError, match="length is 128"):  # what the model was made for
            client.completions.create(model="tiny", prompt="x" * 120, max_tokens=12)

        # A stop drains: the stream that has begun ends as it should.
        stream = client.completions.create(model="tiny", prompt="Once", temperature=0, max_tokens=100, stream=True)
        process.send_signal(signal.SIGTERM)
        assert "".join(chunk.choices[0].text for chunk in stream) == greedy(model, "Once", 100)
    assert process.wait(patient(30)) == 0


def test_the_command_refuses_what_it_cannot_do(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LACONIC_API_KEY", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, message in (
            (["--port", str(taken.getsockname()[1])], "another process listens there"),
            (["--port", "65536"], "from 0 to 65535"),
            (["--drain-seconds", "-1"], "--drain-seconds is -1, but it must be at least 0"),
            (["--host", "0.0.0.0"], "there is no API key"),
            (["--host", "no.such.host.invalid", "--api-key-file", str(tmp_path / "none")], "No such file"),
            (["--api-key-file", str(tmp_path / "empty")], "which is empty"),
            (["--port", "0", "--max-waiting", "-1"], "max_waiting is -1"),
        ):
            assert main(["serve", "--model", str(model), *flags]) == 2
            assert message in capsys.readouterr().err
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 2
    assert "holds no config.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_1000_requests_at_random_times_get_their_own_answers(model: Path) -> None:
    """Every tenth client goes away; the others get the text of their seed, which a second run repeats alone."""
    times = random.Random(5)
    plan = InferencePlan(num_micro_batches=2)
    with Engine(model, dtype="float32", plan=plan, cache_tokens=1024, batch_tokens=64, threads=1) as engine:
        tokenizer = load_text_tokenizer(model)
        settings = ServerSettings("tiny", max_waiting=1000, max_model_tokens=128)
        with running(create_app(engine, tokenizer, settings)) as url:
            bodies = [
                {"model": "tiny", "prompt": f"prompt {number}", "seed": number, "max_tokens": times.randrange(1, 40)}
                for number in range(1000)
            ]
            found = asyncio.run(ask_all(url, bodies, times))
            wait_until(lambda: engine.free_cache_tokens == engine.cache_tokens)
            assert [number for number, text in enumerate(found) if text is None] == list(range(0, 1000, 10))
            for number in times.sample(range(1000), 30):
                alone = httpx.post(f"{url}/v1/completions", json=bodies[number], timeout=patient(60)).json()
                if found[number] is not None:
                    assert alone["choices"][0]["text"] == found[number]


async def ask_all(url: str, bodies: list[dict[str, Any]], times: random.Random) -> list[str | None]:
    """The texts of all requests, started at random times; None for each tenth, which goes away."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str | None:
        stream = number % 2 == 0
        done: Any = await client.completions.create(**bodies[number], stream=stream)
        if number % 10 == 0:
            await done.close()
            return None
        return "".join([chunk.choices[0].text async for chunk in done]) if stream else str(done.choices[0].text)

    # A connection per request: one that is kept may be closed by the server while the client sends on it.
    http = httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), timeout=patient(1200)
    )
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        tasks = []
        for number in range(len(bodies)):
            tasks.append(asyncio.create_task(ask(client, number)))
            await asyncio.sleep(times.expovariate(50))
        return list(await asyncio.gather(*tasks))
