"""Orders of the attention stream: the search finds the best of all, the bound holds, ASAS is within its distance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kit.inference_orders import best_word, lower_bound_seconds, word_seconds
from laconic.schedule.inference import (
    BlockTimes,
    InferencePlan,
    Order,
    Times,
    inference_plan,
    inference_seconds,
    order_word,
)
from laconic.schedule.streams import simulate
from tests.benchmark_runs import tables
from tests.schedule.test_inference import workloads

_seconds = st.integers(0, 4).map(float) | st.floats(0, 10)


def _all_words(r1: int, num_layers: int, word: str = "") -> Iterator[str]:
    """Every word that can run."""
    attentions, shared = word.count("A"), word.count("S")
    if shared == r1 * num_layers:
        yield word
    if attentions < r1 * num_layers and attentions - shared < r1:
        yield from _all_words(r1, num_layers, word + "A")
    if shared < attentions:
        yield from _all_words(r1, num_layers, word + "S")


@st.composite
def _with_words(draw: st.DrawFn) -> tuple[Times, InferencePlan, int, str]:
    times, plan, num_layers = draw(workloads(3))
    word, total = "", plan.num_micro_batches * num_layers
    while len(word) < 2 * total:
        ahead = 2 * word.count("A") - len(word)
        possible = "A" * (word.count("A") < total and ahead < plan.num_micro_batches) + "S" * (ahead > 0)
        word += draw(st.sampled_from(possible))
    return times, plan, num_layers, word


@settings(max_examples=150)
@given(_with_words())
def test_a_word_takes_what_its_simulation_takes(workload: tuple[Times, InferencePlan, int, str]) -> None:
    times, plan, num_layers, word = workload
    seconds = simulate(inference_plan(times, plan, num_layers, word=word)).makespan_seconds
    assert word_seconds(times, plan, num_layers, word) == pytest.approx(seconds, rel=1e-12, abs=0)
    assert lower_bound_seconds(times, plan, num_layers) <= seconds * (1 + 1e-12)


def _uniform(generator: random.Random, num_slices: int) -> BlockTimes:
    """Whole seconds half of the time, so that many words tie."""
    draw = generator.choice((lambda: float(generator.randint(0, 4)), lambda: generator.lognormvariate(0, 1)))
    return BlockTimes.uniform(*[draw() for _ in range(5)], num_slices=num_slices)


@pytest.mark.parametrize(("r1", "num_layers"), [(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
def test_the_search_finds_the_best_of_all_words(r1: int, num_layers: int) -> None:
    generator = random.Random(0)
    words = list(_all_words(r1, num_layers))
    dense = BlockTimes(2.0, 1.0, (), (), ())
    for _ in range(max(3, 400 // len(words))):
        r2 = generator.randint(1, 3)
        layers = [generator.choice((_uniform(generator, r2), dense)) for _ in range(num_layers)]
        for times in (_uniform(generator, r2), layers):
            plan = InferencePlan(r1, r2)
            seconds = {word: word_seconds(times, plan, num_layers, word) for word in words}
            best = best_word(times, plan, num_layers)
            assert seconds[best] <= min(seconds.values()) * (1 + 1e-12)
            assert seconds.keys() >= {
                order_word(times, InferencePlan(r1, r2, order), num_layers) for order in get_args(Order)
            }


@settings(max_examples=300)
@given(*[_seconds] * 5, st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_asas_is_slower_than_no_order_by_more_than_the_shared_experts_of_all_but_one_micro_batch(
    attention: float,
    shared: float,
    dispatch: float,
    experts: float,
    combine: float,
    r1: int,
    r2: int,
    num_layers: int,
) -> None:
    times = BlockTimes.uniform(attention, shared, dispatch, experts, combine, r2)
    plan = InferencePlan(r1, r2)
    excess = inference_seconds(times, plan, num_layers) - lower_bound_seconds(times, plan, num_layers)
    assert -1e-9 <= excess <= (r1 - 1) * shared + 1e-9


@pytest.mark.slow
def test_the_benchmark_writes_its_tables() -> None:
    found = tables("infer-orders", "--smoke")
    assert found.count("\n| balanced | ") == found.count("\n| skewed | ") == 5
    assert found.count("\n| experts differ by layer | 60 | ") == 2
    assert "\n| equal | greedy | " in found
