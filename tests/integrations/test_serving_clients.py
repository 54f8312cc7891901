"""The server asked by released clients: langchain-openai, litellm and lm-evaluation-harness, each as its users call it.

`make clients` installs them; the tests of one that is not there skip. OpenAI's own client asks in tests/infer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from laconic.infer import Engine
from laconic.infer.server import ByteTokenizer, ServerSettings, create_app, load_text_tokenizer
from tests.distributed.processes import wait_until
from tests.infer.models import make
from tests.infer.serving import FakeEngine, running

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
MODEL = "tiny"


class ToolBytes(ByteTokenizer):
    """Bytes with a chat template of Hermes' calls."""

    chat_template = "{{ tools }}<tool_call>"

    def encode_chat(self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Any = None) -> list[int]:
        return self.encode(json.dumps([messages, tools]))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.max_request_tokens = 4096
    yield engine
    engine.close()


def test_langchain_chats_calls_tools_and_gets_structures(engine: FakeEngine) -> None:
    openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    pytest.importorskip("llguidance")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with running(create_app(engine, ToolBytes(), ServerSettings(MODEL))) as url:
        chat = openai.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)
        engine.says("Hello")
        assert chat.invoke("Hi").content == "Hello"
        assert "".join(str(chunk.content) for chunk in chat.stream("Hi")) == "Hello"

        engine.says('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
        asked = messages.HumanMessage("1 + 2?")
        answer = chat.bind_tools([add]).invoke([asked])
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
        engine.says("3")
        told = messages.ToolMessage("3", tool_call_id=call["id"])
        assert chat.bind_tools([add]).invoke([asked, answer, told]).content == "3"

        schema = {"title": "Sum", "type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        for method in ("json_schema", "function_calling", "json_mode"):
            seen = engine.says('{"sum": 3}')
            assert chat.with_structured_output(schema, method=method).invoke("1 + 2?") == {"sum": 3}, method
            assert seen[0].grammar is not None

        engine.says("Hello")
        responses = openai.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, use_responses_api=True)
        assert responses.invoke("Hi").text == "Hello"


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    monkeypatch.setenv("LITELLM_LOG", "CRITICAL")
    return pytest.importorskip("litellm")


def test_litellm_chats_completes_and_streams(litellm: Any, engine: FakeEngine) -> None:
    with running(create_app(engine, ToolBytes(), ServerSettings(MODEL, api_key="key"))) as url:
        ask: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "key", "max_retries": 0}
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
        seen = engine.says("Hello")
        options = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"], "logit_bias": {"65": 1}, "top_k": 4}
        done = litellm.completion(**ask, **asked, **options, n=2, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in done.choices] == ["Hello"] * 2
        assert [entry.token for entry in done.choices[0].logprobs.content][:5] == list("Hello")
        assert (seen[0].temperature, seen[0].top_p, seen[0].top_k, seen[0].seed) == (0.5, 0.9, 4, 3)
        assert seen[0].rules == {"sequence_bias": [[[65], 1.0]]}

        chunks = list(litellm.completion(**ask, **asked, stream=True, stream_options={"include_usage": True}))
        whole = litellm.stream_chunk_builder(chunks, messages=asked["messages"])
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello", "stop")
        assert whole.usage.completion_tokens == 6
        answered = [*asked["messages"], whole.choices[0].message, *asked["messages"]]
        assert litellm.completion(**ask, messages=answered).choices[0].message.content == "Hello"
        marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
        marked_message = {"role": "user", "content": marked}
        assert litellm.completion(**ask, messages=[marked_message]).choices[0].message.content == "Hello"

        plain = ask | {"model": f"text-completion-openai/{MODEL}", "max_tokens": 4}
        done = litellm.text_completion(**plain, prompt="Hi", echo=True, logprobs=1)
        assert done.choices[0].text == "HiHell"
        assert done.choices[0].logprobs.token_logprobs == [None, -1.0, *[-0.5] * 4]
        done = litellm.text_completion(**plain, prompt=[[1, 2], [3]])
        assert [choice.text for choice in done.choices] == ["Hell"] * 2
        chunks = list(litellm.text_completion(**plain, prompt="Hi", stream=True))
        assert "".join(chunk.choices[0].text or "" for chunk in chunks) == "Hell"

        async def several() -> list[str]:
            answers = await asyncio.gather(*(litellm.acompletion(**ask, **asked) for _ in range(3)))
            return [answer.choices[0].message.content for answer in answers]

        assert asyncio.run(several()) == ["Hello"] * 3
        assert litellm.completion(**ask | {"model": f"hosted_vllm/{MODEL}"}, **asked).choices[0].message.content
        del ask["max_retries"]
        assert litellm.responses(**ask, input="Hi", include=["reasoning.encrypted_content"]).output_text == "Hello"
        said = litellm.anthropic.messages.create(**ask, **asked, max_tokens=9, system="Be", metadata={"user_id": "me"})
        assert [part["text"] for part in said["content"]] == ["Hello"]


def test_litellm_calls_tools_and_gets_structures(litellm: Any, engine: FakeEngine) -> None:
    pytest.importorskip("llguidance")

    class Sum(BaseModel):
        sum: int

    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": numbers}}]
    with running(create_app(engine, ToolBytes(), ServerSettings(MODEL))) as url:
        ask: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "tools": tools}
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        engine.says('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        done = litellm.completion(**ask, messages=messages)
        chunks = list(litellm.completion(**ask, messages=messages, stream=True))
        for choice in (done.choices[0], litellm.stream_chunk_builder(chunks).choices[0]):
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
            assert json.loads(call.function.arguments) == {"a": 1}
        engine.says("3")
        for message in (done.choices[0].message, done.choices[0].message.model_dump()):
            told = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}
            answer = litellm.completion(**ask, messages=[*messages, message, told])
            assert answer.choices[0].message.content == "3"
        del ask["tools"]
        for kind in (Sum, {"type": "json_object"}):
            seen = engine.says('{"sum": 3}')
            done = litellm.completion(**ask, messages=messages, response_format=kind)
            assert json.loads(done.choices[0].message.content) == {"sum": 3}
            assert seen[0].grammar is not None


def test_litellm_raises_what_its_users_catch(litellm: Any, engine: FakeEngine) -> None:
    engine.says("Hello")
    settings = ServerSettings(MODEL, api_key="key", max_waiting=0)
    with running(create_app(engine, ToolBytes(), settings)) as url:
        ask: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "key", "max_retries": 0}
        ask["messages"] = [{"role": "user", "content": "Hi"}]
        for error, changed in (
            (litellm.NotFoundError, {"model": "openai/other"}),
            (litellm.BadRequestError, {"temperature": 3}),
            (litellm.BadRequestError, {"reasoning_effort": "high", "allowed_openai_params": ["reasoning_effort"]}),
            (litellm.AuthenticationError, {"api_key": "another"}),
            (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "Hi" * 5000}]}),
        ):
            with pytest.raises(error):
                litellm.completion(**ask | changed)
        with pytest.raises(litellm.NotFoundError, match="embeddings is not served"):
            litellm.embedding(model=ask["model"], api_base=ask["api_base"], api_key="key", input=["Hi"], max_retries=0)
        engine.paused.set()
        with pytest.raises(litellm.Timeout):
            litellm.completion(**ask, timeout=0.2)
        threads = [threading.Thread(target=litellm.completion, kwargs=ask | {"max_tokens": 2000}) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.free_cache_tokens < 2000)
        with pytest.raises(litellm.RateLimitError):
            litellm.completion(**ask, max_tokens=2000)
        threading.Timer(0.2, engine.paused.clear).start()
        done = litellm.completion(**ask | {"max_tokens": 2000, "max_retries": 3})  # after the seconds of Retry-After
        assert done.choices[0].message.content == "Hello"
        for thread in threads:
            thread.join()
        engine.fail("a worker is lost")
        with pytest.raises(litellm.ServiceUnavailableError, match="a worker is lost"):
            litellm.completion(**ask)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>", chat_template="{{ messages }}")
    path = make("llama", tmp_path_factory.mktemp("models"), vocab_size=257, eos_token_id=256, pad_token_id=256)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 3}, {"batch_size": 2, "tokenized_requests": False}]
)
def test_lm_evaluation_harness_has_the_likelihoods_of_the_plain_model(model: Path, options: dict[str, Any]) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    pairs = [("The cache", " is full"), ("The cache", " is warm and full"), ("A", "b"), ("One two three", " four")]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with (
        Engine(model, experts=0, dtype="float32", threads=1, cache_tokens=2048, batch_tokens=24) as engine,
        running(create_app(engine, load_text_tokenizer(model), ServerSettings(MODEL))) as url,
    ):
        evaluated = completions.LocalCompletionsAPI(
            model=MODEL,
            base_url=f"{url}/v1/completions",
            tokenizer=str(model),
            tokenizer_backend="huggingface",
            max_length=128,
            **options,
        )
        asked = [instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        found = evaluated.loglikelihood(asked)
        for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
            tokens = load_text_tokenizer(model).encode(context + continuation)
            with torch.no_grad():
                rows = plain(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
            places = range(len(context.encode()), len(tokens))
            assert logprob == pytest.approx(sum(float(rows[p - 1, tokens[p]]) for p in places), abs=1e-3)
            assert is_greedy == all(int(rows[p - 1].argmax()) == tokens[p] for p in places)
        until = instance("generate_until", {}, ("The cache", {"until": ["\n"], "max_gen_toks": 5}), 0)
        (text,) = evaluated.generate_until([until])
        assert isinstance(text, str)


def test_lm_evaluation_harness_chats(engine: FakeEngine) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    engine.says("Hello")
    with running(create_app(engine, ToolBytes(), ServerSettings(MODEL))) as url:
        chat = completions.LocalChatCompletion(
            model=MODEL, base_url=f"{url}/v1/chat/completions", tokenizer_backend=None
        )
        context = chat.apply_chat_template([{"role": "user", "content": "Hi"}])
        asked = instance("generate_until", {}, (context, {"until": ["x"], "max_gen_toks": 50}), 0)
        assert chat.generate_until([asked]) == ["Hello"]
