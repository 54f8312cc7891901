"""Logprobs of prompts, in any batch, are those of the model's plain forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.infer.sampling import ChosenToken
from laconic.infer.transformers_seam import load_attention_model
from laconic.infer.transformers_seam.prompt_rows import PromptRows
from tests.infer.alone import Asked
from tests.infer.models import make

SHARED = list(range(1, 36))  # two pages of the cache, and more than a forward takes
PROMPTS = [SHARED, [5, 9, 2], [17], [*SHARED, 7, 8, 9], [3, 3, 8, 1, 90]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_attention_model(
        make("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=2), torch.float32, None
    )


@torch.no_grad()
def plain(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt])).logits[0].double().log_softmax(-1)


def check(expected: torch.Tensor, prompt: list[int], found: tuple[ChosenToken, ...], count: int) -> None:
    assert [each.token for each in found] == prompt
    assert (found[0].logprob, found[0].top) == (None, ())
    for place, each in enumerate(found[1:], 1):
        assert each.logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=2e-5)
        values, best = expected[place - 1].topk(count)
        assert [token for token, _ in each.top] == best.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(values.tolist(), abs=2e-5)


def test_prompts_of_a_batch_have_the_logprobs_of_the_plain_forward(model: Any) -> None:
    expected = [plain(model, prompt) for prompt in PROMPTS]
    asked = Asked(model, 256, 16)
    for round_ in range(2):  # the second finds all pages of the first in the cache
        for number, prompt in enumerate(PROMPTS):
            asked.add(f"{round_}-{number}", prompt, max_new_tokens=3, prompt_logprobs=number % 3, logprobs=1)
            asked.add(f"{round_}-{number} beside", prompt, max_new_tokens=3)
        ends = asked.ends(2 * len(PROMPTS))
        assert [end.error for end in ends.values()] == [None] * len(ends)
        for number, prompt in enumerate(PROMPTS):
            told, beside = asked.heard[f"{round_}-{number}"], asked.heard[f"{round_}-{number} beside"]
            check(expected[number], prompt, told[0].prompt, number % 3)
            assert [each.prompt for each in [*told[1:], *beside]] == [()] * 5
            assert [each.token for each in told] == [each.token for each in beside]
    asked.requests.stop()


def test_a_prompt_without_a_number_fails_its_request_alone(model: Any) -> None:
    expected = plain(model, SHARED[:10])
    asked = Asked(model, 256, 16)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., -1, 3] = torch.nan  # a row of the prompt, which come behind that of the new token
        return output

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        asked.add("bad", SHARED[:10], max_new_tokens=2, prompt_logprobs=0)
        end = asked.end()
        assert end.is_own
        assert "the logits of the prompt's token 9 hold NaN" in str(end.error)
    finally:
        handle.remove()
    asked.add("good", SHARED[:10], max_new_tokens=2, prompt_logprobs=0)
    while (end := asked.end()).name != "good":
        pass
    assert end.error is None
    check(expected, SHARED[:10], asked.heard["good"][0].prompt, 0)
    asked.requests.stop()


def test_a_row_that_has_not_come_fails_its_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptRows, "hear", lambda self, scores: None)
    asked = Asked(model, 256, 16)
    asked.add("one", [5, 9, 2], max_new_tokens=2, prompt_logprobs=0)
    end = asked.end()
    asked.requests.stop()
    assert end.is_own
    assert "the prompt's token 1 has no logprob" in str(end.error)


def test_tokens_travel_with_their_prompt() -> None:
    token = ChosenToken(7, -0.5, ((7, -0.5),), (ChosenToken(1), ChosenToken(2, -1.0, ((3, -0.1),))))
    assert ChosenToken.from_fields(*token.to_fields()) == token


@pytest.mark.slow
def test_families_of_layers(tmp_path: Path) -> None:
    """Sliding windows, and a model whose forward takes no logits_to_keep, go the same way."""
    model = load_attention_model(make("gpt_oss", tmp_path, num_hidden_layers=2), torch.float32, None)
    expected = plain(model, SHARED)
    asked = Asked(model, 256, 16)
    asked.add("one", SHARED, max_new_tokens=1, prompt_logprobs=2)
    assert asked.ends(1)["one"].error is None
    check(expected, SHARED, asked.heard["one"][0].prompt, 2)
    asked.requests.stop()
