"""Plans for arrivals: brute force on small spaces, Little's law, monotone in the rate, and a simulated queue."""

from __future__ import annotations

import functools
import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line
from laconic.cost.infer import (
    MODELS,
    Arrivals,
    InferenceRates,
    Search,
    Split,
    Steady,
    WorkerRates,
    Workers,
    choose_for_arrivals,
    worker_nbytes,
)
from laconic.cost.infer.arrivals import _Pricing, _Way
from laconic.cost.infer.choice_text import arrivals_text
from laconic.cost.infer.planner import pass_seconds, plans_of
from laconic.cost.infer.rates import LinkPair
from laconic.errors import PlanError
from laconic.schedule.inference import InferencePlan
from tests.cost.infer_models import RATES, shape_of

SHAPE, SEARCH = shape_of(), Search(2, 2, orders=("ASAS",))

gemms = st.builds(Line, st.floats(1e-7, 1e-4), st.floats(1e-13, 1e-10))
rates_of = st.builds(
    lambda gemm, link, read, experts: InferenceRates(gemm, gemm, LinkPair(link, link), read, experts=experts),
    gemms,
    st.builds(Line, st.floats(0, 1e-3), st.floats(1e-11, 1e-8)),
    st.floats(1e-13, 1e-10),
    st.none() | st.builds(WorkerRates, gemms, st.floats(1e-13, 1e-10), st.booleans()),
)
"""Of one kind of worker, or of two."""
loads = st.builds(Arrivals, st.floats(0.1, 2000), st.integers(1, 100), st.integers(1, 40))
memories = st.integers(5_000_000, 12_000_000)


def every_way(pricing: _Pricing, workers: Workers) -> list[_Way]:
    ways = [_Way("replicated", Split(1, 1), InferencePlan(), workers.total)]
    for size in range(2, workers.total + 1):
        if workers.total % size == 0:
            ways += [_Way("sharded", Split(size, size), InferencePlan(r1), workers.total // size) for r1 in (1, 2)]
    for groups, split in workers.splits(SHAPE.num_experts):
        ways += [_Way("naive", split, plan, groups) for plan in plans_of("naive", "tokens", SEARCH)]
        ways += [_Way("pppipe", split, plan, groups) for plan in plans_of("pppipe", "tokens", SEARCH)]
        for slicing in SEARCH.slicings:
            ways += [_Way("findep", split, plan, groups) for plan in plans_of("findep", slicing, SEARCH)]
    return ways


def least_by_brute_force(pricing: _Pricing, workers: Workers, load: Arrivals) -> float | None:
    """Seconds from arrival to the last token, over all ways and batches, by the formulas of the module's docstring."""
    best: float | None = None
    for way in every_way(pricing, workers):

        @functools.cache
        def decode_seconds(size: int, way: _Way = way) -> float:
            return pass_seconds(pricing.decode, way.kind, way.split, size, way.plan)

        batch = 1
        while batch <= pricing.most_prefill(way):
            rate = load.requests_per_second / way.num_groups
            p = pass_seconds(pricing.prefill, way.kind, way.split, batch, way.plan)
            share = rate * p / (batch * way.slots)
            least = way.plan.num_slices if way.plan.slicing == "tokens" and load.output > 1 else 1
            for size in range(least, pricing.most_decode(way, batch) + 1):
                d = decode_seconds(size) if load.output > 1 else 0.0
                if share >= 1:
                    continue
                backlog = (share + share**2 / (2 * (1 - share))) * p / (1 - share) if load.output > 1 else 0.0
                rest = (load.output - 1) * d / (1 - share) + backlog
                if rate * rest <= size * way.slots:
                    seconds = p + share * p / (2 * (1 - share)) + (1 - share) * d / 2 + rest
                    best = seconds if best is None else min(best, seconds)
            batch *= 2
    return best


@settings(max_examples=20)
@given(rates_of, loads, st.integers(1, 3), memories, memories)
def test_it_is_brute_force(rates: InferenceRates, load: Arrivals, total: int, memory: int, of_experts: int) -> None:
    workers = Workers(total, memory, expert_memory_nbytes=rates.experts and of_experts)
    pricing = _Pricing(SHAPE, rates, load, memory, expert_memory_nbytes=workers.expert_memory_nbytes)
    rooms = [pricing.most_decode(way, 1) for way in every_way(pricing, workers) if pricing.most_prefill(way)]
    assume(rooms and max(rooms) < 400)
    least = least_by_brute_force(pricing, workers, load)
    if least is None:
        with pytest.raises(PlanError, match=r"no plan carries .* requests/s"):
            choose_for_arrivals(SHAPE, rates, workers, load, SEARCH)
    else:
        choice = choose_for_arrivals(SHAPE, rates, workers, load, SEARCH)
        assert choice.best.seconds == pytest.approx(least, rel=1e-6)


@settings(max_examples=20)
@given(rates_of, loads, st.floats(1.0, 3.0), st.integers(1, 4))
def test_more_requests_take_no_less_time_and_what_carries_more_carries_less(
    rates: InferenceRates, load: Arrivals, factor: float, total: int
) -> None:
    workers = Workers(total, 12_000_000)
    more = replace(load, requests_per_second=load.requests_per_second * factor)
    try:
        slower = choose_for_arrivals(SHAPE, rates, workers, more, SEARCH).best
    except PlanError:
        assume(False)
        raise
    assert choose_for_arrivals(SHAPE, rates, workers, load, SEARCH).best.seconds <= slower.seconds * (1 + 1e-6)


@settings(max_examples=20)
@given(rates_of, loads, st.integers(1, 4))
def test_batches_are_littles_law_and_fit(rates: InferenceRates, load: Arrivals, total: int) -> None:
    memory = 12_000_000
    try:
        choice = choose_for_arrivals(SHAPE, rates, Workers(total, memory), load, Search(3, 3))
    except PlanError:
        assume(False)
        raise
    pricing = _Pricing(SHAPE, rates, load, memory)
    for one in choice.candidates:
        tokens = load.output - 1
        assert one.requests_in_flight == pytest.approx(load.requests_per_second * tokens * one.token_seconds)
        assert one.requests_in_flight <= one.decode_slots * (1 + 1e-9)
        assert one.seconds == pytest.approx(one.first_token_seconds + tokens * one.token_seconds)
        assert 0 < one.prefill_share < 1
        if one.split is not None:
            r1 = one.plan.num_micro_batches
            attention = worker_nbytes(pricing.prefill, one.split, one.prefill_batch, r1)["attention worker"]
            cache = worker_nbytes(pricing.decode, one.split, one.decode_batch, r1)["attention worker"][
                "key-value cache"
            ]
            assert sum(attention.values()) + (cache if tokens else 0) <= memory


def queue(rate: float, prefill: float, decode: float, output: int, slots: int) -> tuple[float, float]:
    """Simulate one worker, prefill first, one prompt a pass; mean seconds to the first token, and per further token."""
    rng, now, waiting, active = random.Random(1), 0.0, [], {}
    arrivals = [(at := 0.0)]
    while len(arrivals) < 20_000:
        arrivals.append(at := at + rng.expovariate(rate))
    firsts, rests, upcoming = [], [], 0
    while upcoming < len(arrivals) or waiting or active:
        while upcoming < len(arrivals) and arrivals[upcoming] <= now:
            waiting.append(arrivals[upcoming])
            upcoming += 1
        if waiting:
            now += prefill
            arrived = waiting.pop(0)
            firsts.append(now - arrived)
            active[upcoming, len(firsts)] = [now, output - 1]
        elif active:
            now += decode
            for name in list(active)[:slots]:
                active[name][1] -= 1
                if not active[name][1]:
                    rests.append((now - active.pop(name)[0]) / (output - 1))
        else:
            now = arrivals[upcoming]
    return sum(firsts) / len(firsts), sum(rests) / len(rests)


@pytest.mark.parametrize("rate", [2.0, 5.0, 10.0])
def test_expected_times_are_those_of_a_simulated_queue(rate: float) -> None:
    """One worker with the whole model: 29 ms for a prompt, 2 ms for a token; prefill takes 6 to 29 % of the time."""
    rates = InferenceRates(Line(1e-5, 2e-9), Line(1e-5, 2e-12), LinkPair(Line(1, 1), Line(1, 1)), 1e-9)
    load = Arrivals(rate, 40, 20)
    one = choose_for_arrivals(SHAPE, rates, Workers(1, 10**9), load).best
    assert (one.kind, one.prefill_batch) == ("replicated", 1)
    pricing = _Pricing(SHAPE, rates, load, 10**9)
    prefill = pass_seconds(pricing.prefill, "replicated", Split(1, 1), 1, InferencePlan())
    decode = pass_seconds(pricing.decode, "replicated", Split(1, 1), one.decode_batch, InferencePlan())
    first, token = queue(rate, prefill, decode, load.output, 10**6)
    assert one.first_token_seconds == pytest.approx(first, rel=0.05)
    assert one.token_seconds == pytest.approx(token, rel=0.05)


def test_what_no_plan_carries_is_refused_with_what_is_carried() -> None:
    with pytest.raises(PlanError) as refused:
        choose_for_arrivals(SHAPE, RATES, Workers(2, 50_000_000), Arrivals(1e7, 64, 16))
    text = str(refused.value)
    assert text.startswith("no plan carries 1e+07 requests/s of 64 + 16 tokens on 2 workers; at least ")
    carried = float(text.split("at least ")[1].split()[0])
    assert choose_for_arrivals(SHAPE, RATES, Workers(2, 50_000_000), Arrivals(carried * 0.99, 64, 16)).best
    with pytest.raises(PlanError, match="does not fit on 2 workers"):
        choose_for_arrivals(SHAPE, RATES, Workers(2, 1000), Arrivals(1, 64, 16))
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="requests_per_second is"):
            Arrivals(rate, 1, 1)
    with pytest.raises(PlanError, match="output is 0"):
        Arrivals(1, 1, 0)


def test_tables_and_json_say_what_was_chosen() -> None:
    load = Arrivals(20, 64, 16)
    workers = Workers(3, 50_000_000)
    choice = choose_for_arrivals(SHAPE, RATES, workers, load)
    text = arrivals_text(SHAPE, RATES, workers, load, choice)
    assert "20 requests/s, prompts of 64 tokens, answers of 16" in text
    assert len(text.split("\n\n")[1].splitlines()) == 2 + len(choice.candidates)
    assert text.splitlines()[-2].startswith("plan: ")
    assert text.splitlines()[-1].startswith("bottleneck")
    listed = [one.seconds for one in choice.candidates]
    assert listed == sorted(listed)
    data = json.loads(json.dumps(choice.best.to_dict()))
    assert data["first_token_seconds"] == choice.best.first_token_seconds
    assert isinstance(choice.best, Steady)


@pytest.mark.ci
def test_thirty_two_workers_are_planned_quickly() -> None:
    """Under one second where it runs alone; processor time here, with room for slow machines."""
    shape = MODELS["qwen3-235b-a22b"]
    line = Line(2e-5, 4e-15)
    rates = InferenceRates(line, line, LinkPair(Line(2e-5, 2.5e-11), Line(2e-5, 2.5e-11)), 4e-13)
    for rate in (1, 20):
        started = time.process_time()
        choose_for_arrivals(shape, rates, Workers(32, 80 * 10**9), Arrivals(rate, 4096, 256))
        assert time.process_time() - started < 10
