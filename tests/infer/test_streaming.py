"""Sampling inside the workers: tokens as they come, the same in any batch, and as the model's logits say."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from laconic.errors import LaconicError
from laconic.infer import ChosenToken, Engine, InferencePlan, Sampling
from laconic.infer.sampling import sample
from laconic.infer.transformers_seam import load_attention_model
from tests.distributed.processes import wait_until
from tests.infer.alone import Asked
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, make
from tests.patience import patient

DRAWN = Sampling(temperature=1.5, top_p=0.95, top_k=40, seed=3, max_new_tokens=NEW_TOKENS, logprobs=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    plan = InferencePlan(num_micro_batches=2)
    with Engine(model, attention=1, experts=1, plan=plan, cache_tokens=256, batch_tokens=24, threads=1) as engine:
        yield engine


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[ChosenToken] = []
        self.ends: queue.Queue[LaconicError | None] = queue.Queue()

    def on_token(self, token: ChosenToken) -> None:
        self.tokens.append(token)

    def on_end(self, error: LaconicError | None) -> None:
        self.ends.put(error)


@torch.no_grad()
def drawn_alone(path: Path, prompt: Sequence[int], sampling: Sampling) -> list[ChosenToken]:
    """What a request gets by the definition: a forward over all its tokens for each new one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found: list[ChosenToken] = []
    for position in range(sampling.max_new_tokens):
        ids = torch.tensor([[*prompt, *(chosen.token for chosen in found)]])
        found.append(sample(model(ids).logits[0, -1], sampling, position))
    return found


def test_tokens_are_drawn_from_the_models_logits(model: Path) -> None:
    """The first prompt, drawn for twice alike, greedily and with another number, between all others."""
    samplings = {
        "drawn": DRAWN,
        "greedy": Sampling(max_new_tokens=NEW_TOKENS),
        "again": DRAWN,
        "numbered": replace(DRAWN, request=1),
    }
    asked = Asked(load_attention_model(model, torch.float32, None), batch_tokens=24)
    for name, sampling in samplings.items():
        asked.add(name, PROMPTS[0], **vars(sampling))
    for number, prompt in enumerate(PROMPTS):
        asked.add(str(number), prompt, max_new_tokens=NEW_TOKENS)
    found = {name: end.tokens for name, end in asked.ends(len(samplings) + len(PROMPTS)).items()}
    asked.requests.stop()
    assert found == {name: [chosen.token for chosen in tokens] for name, tokens in asked.heard.items()}
    assert [found[str(number)] for number in range(len(PROMPTS))] == expected(model)
    assert found["greedy"] == expected(model)[0]
    assert found["drawn"] == found["again"]
    assert len({tuple(found[name]) for name in samplings}) == 3
    wanted = drawn_alone(model, PROMPTS[0], DRAWN)
    assert found["drawn"] == [chosen.token for chosen in wanted]
    for chosen, want in zip(asked.heard["drawn"], wanted, strict=True):
        assert chosen.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert [token for token, _ in chosen.top] == [token for token, _ in want.top]
        assert [logprob for _, logprob in chosen.top] == pytest.approx([logprob for _, logprob in want.top], abs=1e-4)


@pytest.mark.slow
def test_a_listener_hears_what_a_request_alone_gets(engine: Engine, model: Path) -> None:
    others = [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
    heard = [Heard() for _ in range(3)]
    for each in heard:
        engine.stream(PROMPTS[0], DRAWN, each)
    wanted = drawn_alone(model, PROMPTS[0], DRAWN)
    for each in heard:
        assert each.ends.get(timeout=patient(60)) is None
        assert [chosen.token for chosen in each.tokens] == [chosen.token for chosen in wanted]
        assert all(len(chosen.top) == 3 for chosen in each.tokens)
    assert [other.result(patient(60)) for other in others] == expected(model)


@pytest.mark.slow
def test_stop_tokens_end_a_request(engine: Engine, model: Path) -> None:
    stop = expected(model)[0][4]
    heard = Heard()
    engine.stream(PROMPTS[0], Sampling(max_new_tokens=NEW_TOKENS, stop_token_ids=(stop,)), heard)
    assert heard.ends.get(timeout=patient(60)) is None
    tokens = expected(model)[0]
    assert [chosen.token for chosen in heard.tokens] == tokens[: tokens.index(stop) + 1]
    assert engine.eos_token_ids == frozenset()


@pytest.mark.slow
def test_requests_beyond_the_cache_wait_and_get_their_tokens(engine: Engine, model: Path) -> None:
    """12 requests of 63 tokens and more on two caches of 256: they wait, or lose their place and come again."""
    assert engine.cache_tokens == engine.free_cache_tokens == 512
    heard = [Heard() for _ in range(12)]
    for number, each in enumerate(heard):
        sampling = Sampling(0.8, seed=number % 3, max_new_tokens=60)
        engine.stream(PROMPTS[number % 2], sampling, each)
    assert engine.free_cache_tokens < 0
    for each in heard:
        assert each.ends.get(timeout=patient(120)) is None
        assert len(each.tokens) == 60
    for number in range(6):
        assert heard[number].tokens == heard[number + 6].tokens
    assert engine.free_cache_tokens == 512


@pytest.mark.slow
def test_cancelled_requests_are_not_heard_of_again_and_free_the_cache(engine: Engine) -> None:
    heard = [Heard() for _ in range(2)]
    handles = [engine.stream(PROMPTS[0], Sampling(max_new_tokens=250), each) for each in heard]
    wait_until(lambda: all(each.tokens for each in heard))
    assert all(handle.cancel() for handle in handles)
    assert engine.free_cache_tokens == 512
    after = Heard()
    engine.stream([1] * 236, Sampling(max_new_tokens=20), after)
    assert after.ends.get(timeout=patient(60)) is None
    assert all(each.ends.empty() and len(each.tokens) < 250 for each in heard)


def test_logits_that_are_no_numbers_fail_their_request(model: Path) -> None:
    whole: Any = load_attention_model(model, torch.float32, None)
    with torch.no_grad():
        whole.lm_head.weight[60] = torch.nan
    asked = Asked(whole)
    asked.add("bad", PROMPTS[0], max_new_tokens=3)
    finished = asked.end()
    assert finished.name == "bad"
    assert "logits at position 0 hold NaN" in str(finished.error)
    with torch.no_grad():
        whole.lm_head.weight[60] = 0.0
    asked.add("good", PROMPTS[0], max_new_tokens=3)
    while (finished := asked.end()).name == "bad":
        pass
    asked.requests.stop()
    assert (finished.name, finished.error, len(finished.tokens)) == ("good", None, 3)
