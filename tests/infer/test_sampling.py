"""Sampling: what is drawn, how often, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from laconic.errors import ConfigError, ModelError
from laconic.infer.sampling import Sampling, sample
from tests.grid import grid

LOGITS = st.lists(st.one_of(st.floats(-20, 20), st.just(-math.inf)), min_size=1, max_size=8).filter(
    lambda values: max(values) > -math.inf
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 3),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 9),
    seed=st.integers(-(2**63), 2**63 - 1),
    request=st.integers(0, 2**63 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 9)),
)


def allowed(logits: list[float], sampling: Sampling) -> set[int]:
    """The tokens that may be drawn, by the definitions and in plain Python."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return {order[0]}
    best = max(logits)
    kept = order[: sampling.top_k or None]
    weights = [math.exp((logits[token] - best) / sampling.temperature) for token in kept]
    found, total = set(), 0.0
    for token, weight in zip(kept, weights, strict=True):
        if total >= sampling.top_p * sum(weights) * (1 + 1e-12):
            break
        total += weight
        if weight > 0:
            found.add(token)
    return found


@given(LOGITS, SAMPLINGS, st.integers(0, 1000))
@example([1.0, -1e-85, 0.0], Sampling(temperature=1.0, top_k=2, seed=0), 1)
def test_tokens_are_among_the_allowed(logits: list[float], sampling: Sampling, position: int) -> None:
    assert sample(torch.tensor(logits, dtype=torch.float64), sampling, position).token in allowed(logits, sampling)


@given(LOGITS, SAMPLINGS, st.integers(0, 1000))
def test_a_draw_depends_on_its_arguments_only(logits: list[float], sampling: Sampling, position: int) -> None:
    row = torch.tensor(logits)
    first = sample(row, sampling, position)
    state = torch.get_rng_state()
    sample(row, Sampling(1.0, seed=1), position + 1)
    torch.rand(3)
    assert sample(row.clone(), sampling, position) == first
    torch.set_rng_state(state)


@given(LOGITS, SAMPLINGS)
def test_logprobs_are_those_of_the_model(logits: list[float], sampling: Sampling) -> None:
    chosen = sample(torch.tensor(logits, dtype=torch.float64), sampling, 0)
    if sampling.logprobs is None:
        assert chosen.logprob is None
        assert chosen.top == ()
        return
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(0).tolist()
    assert chosen.logprob == pytest.approx(expected[chosen.token])
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: sampling.logprobs]
    assert [token for token, _ in chosen.top] == order
    assert [logprob for _, logprob in chosen.top] == pytest.approx([expected[token] for token in order])


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(1.0), [8, 4, 2, 1, 1]),
        (Sampling(0.5), [64, 16, 4, 1, 1]),
        (Sampling(2.0), [math.sqrt(8), 2, math.sqrt(2), 1, 1]),
        (Sampling(1.0, top_k=2), [8, 4, 0, 0, 0]),
        (Sampling(1.0, top_k=4), [8, 4, 2, 1, 0]),
        (Sampling(1.0, top_p=0.75), [8, 4, 0, 0, 0]),
        (Sampling(1.0, top_p=0.7501), [8, 4, 2, 0, 0]),
        (Sampling(1.0, top_p=0.9, top_k=3), [8, 4, 2, 0, 0]),
        (Sampling(1.0, top_p=0.85, top_k=3), [8, 4, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability(sampling: Sampling, weights: list[float]) -> None:
    from scipy.stats import chisquare  # takes a third of a second, in every worker

    draws = [(sampling, position) for position in range(300)]
    draws += [(replace(sampling, seed=number), 3) for number in range(300)]
    draws += [(replace(sampling, request=number), 3) for number in range(300)]
    counts = [0] * 5
    for each, position in draws:
        counts[sample(torch.tensor([8.0, 4, 2, 1, 1]).log(), each, position).token] += 1
    assert [count > 0 for count in counts] == [weight > 0 for weight in weights]
    some = [token for token in range(5) if weights[token]]
    expected = [len(draws) * weights[token] / sum(weights) for token in some]
    assert chisquare([counts[token] for token in some], expected).pvalue > 1e-4


def test_ties_go_to_lower_ids() -> None:
    logits = torch.tensor([-math.inf, 1.0, 1.0, 1.0])
    assert sample(logits, Sampling(), 0).token == 1
    drawn = {sample(logits, Sampling(1.0, top_k=2), position).token for position in range(64)}
    assert drawn == {1, 2}
    drawn = {sample(logits, Sampling(1.0, top_p=0.3), position).token for position in range(64)}
    assert drawn == {1}
    assert [token for token, _ in sample(logits, Sampling(logprobs=2), 0).top] == [1, 2]


def test_a_top_k_of_the_whole_vocabulary_draws_as_none_does() -> None:
    logits = torch.rand(50, generator=torch.Generator().manual_seed(1)) * 3
    for top_p in (1.0, 0.7):
        drawn = [[sample(logits, Sampling(1.0, top_p, k), at) for at in range(40)] for k in (0, 50, 2**31)]
        assert drawn[0] == drawn[1] == drawn[2]


def test_a_large_vocabulary_and_narrow_dtypes() -> None:
    logits = torch.full((50_000,), -math.inf, dtype=torch.bfloat16)
    logits[[7, 40_000]] = 3.0
    assert {sample(logits, Sampling(1e-300), position).token for position in range(64)} == {7, 40_000}
    assert {sample(logits, Sampling(1e300, top_p=0.5), position).token for position in range(64)} == {7}
    assert sample(logits, Sampling(1.0, top_p=5e-324), 0).token == 7


@pytest.mark.parametrize(
    ("top_k", "top_p", "levels"), grid([0, 3, 1300, 3000], [0.2, 0.9, 0.9999999, 1.0], [40, 2, 10**6], strength=1)
)
def test_a_large_vocabulary_is_cut_as_by_the_definition(top_k: int, top_p: float, levels: int) -> None:
    """More tokens than top_p looks at first, with many ties or none, flat enough that most of them count."""
    generator = torch.Generator().manual_seed(levels)
    logits = (torch.rand(2000, generator=generator) * levels).floor().double() / levels * 3
    sampling = Sampling(1.0, top_p=top_p, top_k=top_k, logprobs=7)
    permitted = allowed(logits.tolist(), sampling)
    drawn = [sample(logits, sampling, position) for position in range(200)]
    assert {each.token for each in drawn} <= permitted
    # A cut-off list is drawn from up to its end.
    ranks = {token: rank for rank, token in enumerate(sorted(range(2000), key=lambda token: -logits[token]))}
    assert max(ranks[each.token] for each in drawn) >= 0.7 * len(permitted) - 1
    assert [token for token, _ in drawn[0].top] == sorted(range(2000), key=lambda token: -logits[token])[:7]


@pytest.mark.parametrize(
    ("logits", "what"),
    [([0.0, math.nan], "NaN"), ([math.inf, 0.0], r"\+inf"), ([-math.inf] * 3, "nothing but -inf")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(logits: list[float], what: str, temperature: float) -> None:
    with pytest.raises(ModelError, match=f"^the logits at position 5 hold {what}"):
        sample(torch.tensor(logits), Sampling(temperature), 5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", True),
        ("request", -1),
        ("max_new_tokens", 0),
        ("logprobs", -1),
    ],
)
def test_values_that_break_a_rule_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*, but it must be "):
        Sampling(**{name: value})


def test_an_answer_has_room_for_its_least_tokens() -> None:
    Sampling(rules={"min_new_tokens": 20})
    with pytest.raises(ConfigError, match="min_new_tokens is 21, but max_new_tokens is 20"):
        Sampling(rules={"min_new_tokens": 21})


def test_stop_tokens_are_ids() -> None:
    assert Sampling(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^stop_token_ids holds -1"):
        Sampling(stop_token_ids=(-1,))


@given(SAMPLINGS)
def test_options_go_there_and_back(sampling: Sampling) -> None:
    assert Sampling.from_options(json.loads(json.dumps(sampling.to_options()))) == sampling


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^top_q, typo: no such option of sampling; there are temperature, "):
        Sampling.from_options({"top_q": 1, "typo": 2, "seed": 3})


@pytest.mark.parametrize("value", [np.float32(1.2), torch.tensor(1.2), {1.2}, object()])
def test_values_of_rules_that_cannot_travel_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"rules has repetition_penalty = .*, but values are made of Python's own"):
        Sampling(rules={"repetition_penalty": value})


def test_a_list_that_holds_itself_is_no_rule() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="rules has bad_words_ids = "):
        Sampling(rules={"bad_words_ids": endless})
