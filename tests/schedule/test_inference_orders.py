"""Orders of the attention stream: the search finds the best of all, the bound holds, ASAS is within its distance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from math import comb
from statistics import median
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import infer_orders
from benchmarks.kit.inference_orders import best_word, layer_words, lower_bound_seconds, word_seconds
from laconic.errors import ScheduleError
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
from tests.grid import few
from tests.schedule.test_inference import blocks, workloads

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


def test_the_words_of_a_layer_are_counted_by_catalan() -> None:
    for r1 in range(1, 7):
        words = list(layer_words(r1))
        assert len(words) == len(set(words)) == comb(2 * r1, r1) // (r1 + 1)
        assert set(words) == set(_all_words(r1, 1))
        times = BlockTimes.uniform(1.0, 1.0, 1.0, 1.0, 1.0)
        assert {order_word(times, InferencePlan(r1, order=order), 1) for order in get_args(Order)} <= set(words)


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


@settings(max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_a_narrow_search_is_never_worse_than_the_named_orders(
    data: st.DataObject, r1: int, r2: int, num_layers: int
) -> None:
    times = data.draw(st.lists(blocks(r2), min_size=num_layers, max_size=num_layers))
    plan = InferencePlan(r1, r2)
    found = word_seconds(times, plan, num_layers, best_word(times, plan, num_layers, width=2))
    known = [inference_seconds(times, InferencePlan(r1, r2, order), num_layers) for order in get_args(Order)]
    assert lower_bound_seconds(times, plan, num_layers) * (1 - 1e-12) <= found <= min(known) * (1 + 1e-12)


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


def test_asas_is_best_where_a_link_or_the_experts_are_the_bottleneck() -> None:
    for attention, shared, experts, r1, r2, num_layers in itertools.product(
        (1.0, 2.0), (0.0, 1.0), (2.0, 3.0), (2, 3), (2, 4), (1, 3)
    ):
        times = BlockTimes.uniform(attention, shared, 0.5, experts, 0.5, r2)
        plan = InferencePlan(r1, r2)
        assert r1 * r2 * experts >= attention + 1.0 + r2 * experts  # the full experts' stream is longer than the way
        assert r2 * experts >= attention + shared
        assert inference_seconds(times, plan, num_layers) == lower_bound_seconds(times, plan, num_layers)


def test_there_is_no_order_to_search_with_shared_first() -> None:
    with pytest.raises(ScheduleError, match="shared_first"):
        best_word(BlockTimes.uniform(1, 1, 1, 1, 1), InferencePlan(2, shared_first=True), 1)


def test_greedy_is_hardly_ever_slower_than_the_better_of_the_other_orders() -> None:
    """Layers whose experts take different times, as with routing that differs by layer."""
    generator, ratios = random.Random(0), []
    for _ in range(100):
        r1, r2 = generator.randint(2, 4), generator.randint(1, 8)
        layers = infer_orders._layers("experts differ by layer", generator, r2, 8)
        seconds = [inference_seconds(layers, InferencePlan(r1, r2, order), 8) for order in get_args(Order)]
        ratios.append(min(seconds[:2]) / seconds[2])
    assert sum(ratio < 0.999 for ratio in ratios) <= 5
    assert sum(ratio > 1.001 for ratio in ratios) >= 10
    assert max(ratios) > 1.03


@pytest.mark.parametrize(
    ("most", "gain"),
    few(
        [
            pytest.param(1, 1.39),
            pytest.param(2, 1.34),
            pytest.param(3, 1.05),
            pytest.param(4, 1.035),
            pytest.param(8, 1.03),
        ],
        3,
    ),
)
def test_slices_gain_where_few_samples_fit(most: int, gain: float) -> None:
    """The medians found before for 150 random balanced workloads: large for one or two samples, small from three on."""
    found = infer_orders.speedups(infer_orders.Workload.balanced, most, 30)
    assert median(found) == pytest.approx(gain, rel=0.04)
    share = sum(one >= 1.15 for one in found) / len(found)
    assert share >= 0.85 if most <= 2 else share <= 0.25
    assert min(found) >= 1


@pytest.mark.slow
def test_the_benchmark_writes_its_tables() -> None:
    found = tables("infer-orders", "--smoke")
    assert found.count("\n| balanced | ") == found.count("\n| skewed | ") == 5
    assert found.count("\n| experts differ by layer | 60 | ") == 2
    assert "\n| equal | greedy | " in found
