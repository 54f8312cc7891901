"""Plans for an engine: no plan in reach is faster, what is fixed stays, and not splitting is an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line
from laconic.cost.infer import (
    Demand,
    EngineLimits,
    Fixed,
    InferenceCostModel,
    InferenceRates,
    Search,
    Split,
    WorkerRates,
    Workload,
    choose_for_engine,
)
from laconic.cost.infer.engine_plan import EngineCosts
from laconic.cost.infer.planner import replicated_seconds
from laconic.cost.infer.rates import LinkPair
from laconic.errors import PlanError, ScheduleError
from laconic.schedule.inference import InferencePlan, inference_plan
from laconic.schedule.streams import simulate
from tests.cost.infer_models import RATES, SLOW_WORKER, shape_of

SHAPE, LIMITS = shape_of(num_dense_layers=1, dense_hidden=100), EngineLimits(1000, 64)
SLOW_LINKS = replace(RATES, link=LinkPair(Line(0.1, 1e-6), Line(0.1, 1e-6)))
SLOW_PRODUCTS = replace(RATES, gemm=Line(1e-5, 2e-9), link=LinkPair(Line(1e-6, 1e-10), Line(1e-6, 1e-10)))

gemms = st.builds(Line, st.floats(0, 1e-4), st.floats(1e-13, 1e-9))
rates_of = st.builds(
    lambda gemm, link, read, experts: InferenceRates(gemm, gemm, LinkPair(link, link), read, experts=experts),
    gemms,
    st.builds(Line, st.floats(0, 1e-3), st.floats(1e-11, 1e-7)),
    st.floats(0, 1e-9),
    st.none() | st.builds(WorkerRates, gemms, st.floats(0, 1e-9), st.booleans()),
)
"""Of one kind of worker, or of two."""
plans = st.builds(
    InferencePlan,
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["ASAS", "greedy"]),
    st.sampled_from(["tokens", "experts"]),
)
demands = st.builds(Demand, st.integers(1, 300), st.integers(1, 40), st.integers(1, 30))


@settings(max_examples=60)
@given(rates_of, demands, plans, st.integers(1, 3), st.integers(1, 3))
def test_no_plan_in_reach_is_faster(
    rates: InferenceRates, demand: Demand, plan: InferencePlan, attention: int, experts: int
) -> None:
    split, search = Split(attention, experts), Search(4, 3)
    choice = choose_for_engine(SHAPE, rates, split, demand, LIMITS, search=search)
    per_host = -(-demand.requests // min(attention, demand.requests))
    in_reach = plan.num_micro_batches <= per_host and (plan.slicing == "experts" or plan.num_slices <= per_host)
    if in_reach:
        assert choice.seconds <= EngineCosts(SHAPE, rates, demand, LIMITS).seconds(split, plan) * (1 + 1e-6)
    assert choice.unsplit_seconds is not None
    unsplit = Split(attention if rates.are_of_two_kinds else attention + experts, 0)
    assert choice.unsplit_seconds == EngineCosts(SHAPE, rates, demand, LIMITS).seconds(unsplit, InferencePlan())
    if rates.are_of_two_kinds:
        assert choice.split == split
    else:
        assert choice.seconds <= choice.unsplit_seconds * (1 + 1e-6)
    ran = Split(attention + experts, 0) if choice.split is None else choice.split
    assert choice.seconds == pytest.approx(EngineCosts(SHAPE, rates, demand, LIMITS).seconds(ran, choice.plan))


def test_seconds_are_those_of_the_passes_that_the_engine_makes() -> None:
    """Two attention workers with 2 x 5 requests each: 700 cached tokens hold 3 of 200 + 30 at a time."""
    demand, limits, plan = Demand(200, 30, 20), EngineLimits(700, 64), InferencePlan(2, 2)
    got = EngineCosts(SHAPE, RATES, demand, limits).seconds(Split(2, 1), plan)
    split = Split(2, 1)

    def seconds(work: Workload, batch: int) -> float:
        layers = InferenceCostModel(SHAPE, RATES, work).layer_times(batch, split, plan)
        return simulate(inference_plan(layers, plan, len(layers))).makespan_seconds

    prefill = 10 * seconds(Workload(64, 68), 1)  # 3 x 200 tokens, 64 at a time
    decode = 29 * seconds(Workload(1, 215), 3)
    assert got == pytest.approx(2 * (prefill + decode))


def test_whole_models_are_priced_alone() -> None:
    got = EngineCosts(SHAPE, RATES, Demand(10, 5, 6), LIMITS).seconds(Split(3, 0), InferencePlan())
    prefill = replicated_seconds(InferenceCostModel(SHAPE, RATES, Workload(10)), 2)
    decode = replicated_seconds(InferenceCostModel(SHAPE, RATES, Workload(1, 12)), 2)
    assert got == pytest.approx(prefill + 4 * decode)


def test_not_to_split_is_an_answer_unless_something_is_fixed() -> None:
    demand = Demand(100, 20, 8)
    whole = choose_for_engine(SHAPE, SLOW_LINKS, Split(1, 1), demand, LIMITS)
    assert (whole.split, whole.plan, whole.num_workers) == (None, InferencePlan(), 2)
    assert str(whole).startswith("do not split: 2 workers with the whole model, ")
    for kept in (
        choose_for_engine(SHAPE, SLOW_LINKS, Split(1, 1), demand, LIMITS, may_unsplit=False),
        choose_for_engine(SHAPE, SLOW_LINKS, Split(1, 1), demand, LIMITS, fixed=Fixed(order="ASAS")),
    ):
        assert kept.split == Split(1, 1)
        assert kept.seconds > whole.seconds
    small = choose_for_engine(SHAPE, SLOW_LINKS, Split(1, 1), demand, LIMITS, memory_nbytes=1000)
    assert small.split == Split(1, 1)
    assert small.unsplit_seconds is None
    assert "does not fit on every worker" in str(small)


def test_expert_workers_of_another_kind_are_kept_and_compared_with_attention_workers_alone() -> None:
    """Whole models run on two of three workers: those of attention. One model is what their memory has to hold."""
    demand, split = Demand(100, 20, 8), Split(2, 1)
    rates = replace(RATES, experts=SLOW_WORKER)
    found = choose_for_engine(SHAPE, rates, split, demand, LIMITS, memory_nbytes=10**15)
    assert (found.split, found.num_workers) == (split, 2)
    whole = EngineCosts(SHAPE, RATES, demand, LIMITS).seconds(Split(2, 0), InferencePlan())
    assert found.unsplit_seconds == whole
    assert max(found.busy, key=found.busy.__getitem__) == "expert workers"
    assert f", bottleneck expert workers (busy for {found.busy['expert workers']:.0%} of a pass" in str(found)
    ratio = f"{whole / found.seconds:.2f}x"
    assert str(found).endswith(
        f", {ratio} of the attention workers alone with the whole model, which is faster: give experts = 0"
    )
    fast = choose_for_engine(
        SHAPE, replace(SLOW_PRODUCTS, experts=replace(SLOW_WORKER, gemm=Line(0, 0))), split, demand, LIMITS
    )
    assert str(fast).endswith("x of the attention workers alone with the whole model")
    two = 2 * SHAPE.num_parameters * SHAPE.item_nbytes
    assert choose_for_engine(SHAPE, rates, split, demand, LIMITS, memory_nbytes=two).unsplit_seconds == whole
    small = choose_for_engine(SHAPE, rates, split, demand, LIMITS, memory_nbytes=two - 1)
    assert str(small).endswith("the whole model does not fit on an attention worker")


def test_one_micro_batch_where_links_cost_most_and_more_where_work_does() -> None:
    """A link's start-up is paid per micro-batch and slice; overlap pays where products take the time."""
    demand = Demand(60, 4, 16)
    roomy = EngineLimits(10_000, 2000)
    slow = choose_for_engine(SHAPE, SLOW_LINKS, Split(1, 1), demand, roomy, may_unsplit=False)
    assert (slow.plan.num_micro_batches, slow.plan.num_slices) == (1, 1)
    busy = choose_for_engine(SHAPE, SLOW_PRODUCTS, Split(1, 1), demand, roomy, may_unsplit=False)
    assert busy.plan.num_micro_batches * busy.plan.num_slices > 1


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(num_micro_batches=3),
        Fixed(num_slices=5, slicing="tokens"),
        Fixed(order="greedy", num_micro_batches=2),
        Fixed(shared_first=True),
        Fixed(7, 9, "ASAS", "experts", True),
    ],
)
def test_what_is_fixed_stays(fixed: Fixed) -> None:
    plan = choose_for_engine(SHAPE, RATES, Split(1, 2), Demand(20, 5, 4), LIMITS, fixed=fixed).plan
    for name in ("num_micro_batches", "num_slices", "order", "slicing"):
        assert getattr(fixed, name) in (None, getattr(plan, name))
    assert plan.shared_first == fixed.shared_first


def test_a_step_of_one_micro_batch_is_its_pass_and_of_several_each_others() -> None:
    demand = Demand(20, 5, 4)
    one = EngineCosts(SHAPE, RATES, demand, LIMITS).step_seconds(Split(1, 1), InferencePlan(num_slices=2))
    layers = InferenceCostModel(SHAPE, RATES, Workload(1, 22)).layer_times(4, Split(1, 1), InferencePlan(num_slices=2))
    plan = inference_plan(layers, InferencePlan(num_slices=2), len(layers))
    assert one == pytest.approx(simulate(plan).makespan_seconds)
    four = EngineCosts(SHAPE, RATES, demand, LIMITS).step_seconds(Split(1, 1), InferencePlan(4))
    alone = EngineCosts(SHAPE, RATES, replace(demand, requests=1), LIMITS).step_seconds(Split(1, 1), InferencePlan(4))
    assert four > alone


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(PlanError, match="requests is 0"):
        Demand(requests=0)
    with pytest.raises(PlanError, match=r"request of 900 \+ 200 tokens is expected, but cache_tokens is 1000"):
        choose_for_engine(SHAPE, RATES, Split(1, 1), Demand(900, 200), LIMITS)
    with pytest.raises(ScheduleError, match="greedy"):
        choose_for_engine(SHAPE, RATES, Split(1, 1), Demand(), LIMITS, fixed=Fixed(order="greedy", shared_first=True))
