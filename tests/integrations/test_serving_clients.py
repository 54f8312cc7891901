"""The server asked by released clients: langchain-openai and lm-evaluation-harness, each as its users call it.

`make clients` installs them; the tests of one that is not there skip. OpenAI's own client asks in tests/infer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from laconic.infer import Engine
from laconic.infer.server import ByteTokenizer, ServerSettings, create_app, load_text_tokenizer
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
