"""Disaggregated inference: the plan's tasks, its fast simulation and its closed forms agree."""

from __future__ import annotations

import itertools
import random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kit.inference_orders import word_seconds
from laconic.errors import ScheduleError
from laconic.schedule import inference
from laconic.schedule.inference import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    BlockTimes,
    InferencePlan,
    Order,
    Times,
    inference_plan,
    inference_seconds,
    order_word,
)
from laconic.schedule.streams import StreamPlan, simulate
from tests.schedule.closed_forms import makespan_asas

# Whole seconds make streams end together, tenths do so but for rounding, the others do not.
_seconds = st.integers(0, 4).map(float) | st.integers(0, 20).map(lambda tenths: tenths / 10) | st.floats(0, 10)
_orders = st.sampled_from(get_args(Order))


def _slices(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[_seconds] * count)


def blocks(num_slices: int) -> st.SearchStrategy[BlockTimes]:
    """Layers with uneven slices, with even ones, and dense ones."""
    uneven = st.builds(BlockTimes, _seconds, _seconds, *[_slices(num_slices)] * 3)
    uniform = st.builds(BlockTimes.uniform, *[_seconds] * 5, st.just(num_slices))
    dense = st.builds(BlockTimes, _seconds, _seconds, *[st.just(())] * 3)
    return uniform | uneven | dense


@st.composite
def workloads(draw: st.DrawFn, max_layers: int = 6) -> tuple[Times, InferencePlan, int]:
    """Times, a plan and a number of layers; layers are often equal, all or some."""
    order = draw(_orders)
    first = draw(st.booleans()) and order != "greedy"
    plan = InferencePlan(draw(st.integers(1, 4)), draw(st.integers(1, 4)), order, "tokens", first)
    kinds = draw(st.lists(blocks(plan.num_slices), min_size=1, max_size=3))
    if len(kinds) == 1:
        return kinds[0], plan, draw(st.integers(1, 5 * max_layers))
    times = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_layers))
    return times, plan, len(times)


def _simulated(*arguments: Any, **keywords: Any) -> float:
    return simulate(inference_plan(*arguments, **keywords)).makespan_seconds


@settings(max_examples=300)
@given(workloads(), st.integers(1, 3))
def test_the_fast_simulation_is_the_simulation(workload: tuple[Times, InferencePlan, int], steps: int) -> None:
    found = inference_seconds(*workload, num_steps=steps)
    assert found == pytest.approx(_simulated(*workload, num_steps=steps), rel=1e-12, abs=0)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 2), _orders, st.booleans(), st.data())
def test_the_layers_that_are_jumped_over_repeat(
    r1: int, r2: int, order: Order, first: bool, data: st.DataObject
) -> None:
    times = data.draw(blocks(r2))
    plan = InferencePlan(r1, r2, order, shared_first=first and order != "greedy")
    assert inference_seconds(times, plan, 200) == pytest.approx(_simulated(times, plan, 200), rel=1e-12, abs=0)


def test_a_state_that_changes_slowly_is_no_steady_state() -> None:
    """Streams that are almost equally busy drift apart a little in each layer, for many layers."""
    generator = random.Random(0)
    for _ in range(120):
        r1, r2 = generator.randint(2, 4), generator.randint(1, 3)
        gap = generator.choice((1e-12, 1e-9, 1e-6, 1e-3))

        def seconds(gap: float = gap) -> float:
            return generator.randint(0, 3) / 2 + gap * generator.randint(0, 1)

        steps = [tuple(seconds() for _ in range(r2)) for _ in range(3)]
        times = BlockTimes(seconds(), seconds(), steps[0], steps[1], steps[2])
        plan = InferencePlan(r1, r2, generator.choice(get_args(Order)))
        found = word_seconds(times, plan, 400, order_word(times, plan, 400))
        assert inference_seconds(times, plan, 400) == pytest.approx(found, rel=1e-12, abs=0)


def test_a_thousand_layers_cost_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, simulated = random.Random(0), []
    layer = inference._layer
    monkeypatch.setattr(inference, "_layer", lambda *given: simulated.append(1) or layer(*given))
    for _ in range(200):
        times = BlockTimes.uniform(*[generator.lognormvariate(0, 1) for _ in range(5)], num_slices=4)
        for order in get_args(Order):
            inference_seconds(times, InferencePlan(3, 4, order), 1000)
    assert len(simulated) / 600 < 20


def test_tasks_wait_for_what_they_need() -> None:
    times = BlockTimes(1.0, 2.0, (0.1, 0.2), (0.3, 0.4), (0.5, 0.6))
    plan = inference_plan(times, InferencePlan(2, 2), 2)
    for layer, batch in itertools.product(range(2), range(2)):
        here, before = f"{layer}.{batch}", f"{layer - 1}.{batch}"
        needs = (f"shared {before}", f"combine {before}.0", f"combine {before}.1") if layer else ()
        attention, shared = plan[f"attention {here}"], plan[f"shared {here}"]
        assert (attention.stream, attention.seconds, attention.after) == (ATTENTION, 1.0, needs)
        assert (shared.stream, shared.seconds, shared.after) == (ATTENTION, 2.0, (attention.name,))
        for number in range(2):
            dispatch, experts, combine = (
                plan[f"{step} {here}.{number}"] for step in ("dispatch", "experts", "combine")
            )
            assert (dispatch.stream, dispatch.seconds, dispatch.after) == (
                DISPATCH,
                times.dispatch[number],
                (attention.name,),
            )
            assert (experts.stream, experts.seconds, experts.after) == (
                EXPERTS,
                times.experts[number],
                (dispatch.name,),
            )
            assert (combine.stream, combine.seconds, combine.after) == (
                COMBINE,
                times.combine[number],
                (experts.name,),
            )
    assert len(plan) == 2 * 2 * (2 + 3 * 2)


def _on(plan: StreamPlan, stream: str) -> list[str]:
    return [task.name for task in plan.tasks if task.stream == stream]


def test_streams_work_in_order_of_micro_batch_and_slice() -> None:
    times = BlockTimes.uniform(1, 1, 1, 1, 1, 2)
    asas, aass, greedy = (inference_plan(times, InferencePlan(2, 2, order), 2) for order in get_args(Order))
    assert _on(asas, ATTENTION) == [
        f"{step} {here}" for here in ("0.0", "0.1", "1.0", "1.1") for step in ("attention", "shared")
    ]
    assert _on(aass, ATTENTION) == [
        f"{step} {layer}.{batch}" for layer in range(2) for step in ("attention", "shared") for batch in range(2)
    ]
    for plan, (stream, step) in itertools.product(
        (asas, aass, greedy), ((DISPATCH, "dispatch"), (EXPERTS, "experts"), (COMBINE, "combine"))
    ):
        assert _on(plan, stream) == [
            f"{step} {layer}.{batch}.{number}" for layer, batch, number in itertools.product(range(2), repeat=3)
        ]


def test_with_shared_first_rows_leave_after_the_shared_experts() -> None:
    times = BlockTimes.uniform(1, 1, 1, 1, 1)
    plan = inference_plan(times, InferencePlan(2, shared_first=True), 1)
    assert {plan[f"dispatch 0.{batch}.0"].after for batch in range(2)} == {("shared 0.0",), ("shared 0.1",)}


def test_a_dense_layer_is_attention_and_its_feed_forward_block() -> None:
    dense, sparse = BlockTimes(1.0, 2.0, (), (), ()), BlockTimes.uniform(1.0, 0.5, 0.25, 0.25, 0.25, 2)
    plan = inference_plan([dense, sparse, dense], InferencePlan(2, 2), 3)
    assert {task.name.split()[0] for task in plan.tasks if " 1." not in task.name} == {"attention", "shared"}
    assert plan["attention 1.0"].after == ("shared 0.0",)
    assert plan["attention 2.1"].after == ("shared 1.1", "combine 1.1.0", "combine 1.1.1")
    assert dense.is_dense
    assert not sparse.is_dense


@settings(max_examples=50)
@given(workloads(3), st.integers(1, 4))
def test_steps_of_decoding_follow_like_further_layers(
    workload: tuple[Times, InferencePlan, int], num_steps: int
) -> None:
    times, plan, num_layers = workload
    layers = [times] * num_layers if isinstance(times, BlockTimes) else list(times)
    repeated = inference_plan(layers * num_steps, plan, num_layers * num_steps)
    assert inference_plan(times, plan, num_layers, num_steps) == repeated


@settings(max_examples=50)
@given(workloads(3))
def test_tasks_are_issued_after_what_they_wait_for(workload: tuple[Times, InferencePlan, int]) -> None:
    plan = inference_plan(*workload)
    assert plan.in_order() == plan.tasks
    assert StreamPlan.from_json(plan.to_json()) == plan


def test_rows_are_sent_before_the_shared_experts_begin() -> None:
    """An executor that runs the attention stream in its own thread issues nothing while it computes."""
    for order in get_args(Order):
        names = [
            task.name
            for task in inference_plan(BlockTimes.uniform(1, 1, 1, 1, 1), InferencePlan(2, order=order), 2).tasks
        ]
        for layer, batch in itertools.product(range(2), range(2)):
            assert names.index(f"dispatch {layer}.{batch}.0") == names.index(f"attention {layer}.{batch}") + 1


@settings(max_examples=300)
@given(*[_seconds] * 5, st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_the_closed_form_of_asas_is_exact(
    attention: float,
    shared: float,
    dispatch: float,
    experts: float,
    combine: float,
    r1: int,
    r2: int,
    num_layers: int,
    first: bool,
) -> None:
    times = BlockTimes.uniform(attention, shared, dispatch, experts, combine, r2)
    plan = InferencePlan(r1, r2, shared_first=first)
    found = makespan_asas(times, r1, num_layers, first)
    assert found == pytest.approx(_simulated(times, plan, num_layers), rel=1e-12, abs=0)


def test_shared_experts_that_come_first_count_as_attention() -> None:
    merged, apart = BlockTimes.uniform(4.0, 0.0, 1.0, 2.0, 1.5, 3), BlockTimes.uniform(3.0, 1.0, 1.0, 2.0, 1.5, 3)
    seconds = inference_seconds(apart, InferencePlan(3, 3, shared_first=True), 5)
    assert seconds == inference_seconds(merged, InferencePlan(3, 3), 5)
    assert seconds > inference_seconds(apart, InferencePlan(3, 3), 5)


def test_the_words_of_the_orders() -> None:
    assert order_word(_UNIFORM, InferencePlan(3), 2) == "ASASASASASAS"
    assert order_word(_UNIFORM, InferencePlan(3, order="AASS"), 2) == "AAASSSAAASSS"
    # Rows of micro-batch 0 come back after 4 seconds: two attentions and two shared experts.
    assert order_word(_UNIFORM, InferencePlan(2, order="greedy"), 2) == "AASSAASS"
    # They come back after 5, 7 and 9 seconds, and attention waits for none of them.
    late = BlockTimes.uniform(1, 1, 1, 2, 1)
    assert order_word(late, InferencePlan(3, order="greedy"), 2) == "AAASSASASASS"


@settings(max_examples=150)
@given(workloads(4))
def test_greedy_attention_never_waits_for_shared_experts_that_could_wait(
    workload: tuple[Times, InferencePlan, int],
) -> None:
    times, plan, num_layers = workload
    r1 = plan.num_micro_batches
    word = order_word(times, InferencePlan(r1, plan.num_slices, "greedy"), num_layers)
    spans = simulate(inference_plan(times, InferencePlan(r1, plan.num_slices), num_layers, word=word)).spans
    attentions = shared = 0
    free = 0.0
    for letter in word:
        here, number = (attentions, shared)[letter == "S"], attentions
        name = f"{'attention' if letter == 'A' else 'shared'} {here // r1}.{here % r1}"
        before = f"{number // r1 - 1}.{number % r1}"
        rows = max(
            (span.end_seconds for task, span in spans.items() if task.startswith(f"combine {before}.")), default=0
        )
        close = 1e-6 * (free + 1)
        if letter == "A" and attentions > shared:
            assert rows <= free + close
        elif letter == "S" and number < r1 * num_layers and attentions - shared < r1:
            assert rows >= free - close
        attentions, shared = attentions + (letter == "A"), shared + (letter == "S")
        free = spans[name].end_seconds


def test_words_may_reach_into_the_next_layer() -> None:
    """Shared experts of a micro-batch are only needed by its own next attention."""
    plan = inference_plan(BlockTimes.uniform(1, 1, 1, 1, 1), InferencePlan(2), 2, word="AASASASS")
    assert _on(plan, ATTENTION) == [
        *("attention 0.0", "attention 0.1", "shared 0.0", "attention 1.0"),
        *("shared 0.1", "attention 1.1", "shared 1.0", "shared 1.1"),
    ]


_UNIFORM = BlockTimes.uniform(1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0, but must be an integer of at least 1"),
        ({"num_micro_batches": True}, "num_micro_batches is True"),
        ({"num_slices": 1.5}, "num_slices is 1.5"),
        ({"order": "SASA"}, "order is 'SASA', but must be one of 'ASAS', 'AASS', 'greedy'"),
        ({"order": "greedy", "shared_first": True}, "order is 'greedy' with shared_first"),
        ({"slicing": "rows"}, "slicing is 'rows', but must be one of 'tokens', 'experts'"),
        ({"shared_first": 1}, "shared_first is 1"),
    ],
)
def test_plans_check_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        InferencePlan(**arguments)


def test_times_check_themselves() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        for place in range(5):
            with pytest.raises(ScheduleError, match="must be finite and >= 0"):
                BlockTimes.uniform(*[wrong if place == number else 1.0 for number in range(5)])
    with pytest.raises(ScheduleError, match="have 2, 1 and 2 entries"):
        BlockTimes(1, 1, (1, 1), (1,), (1, 1))


@pytest.mark.parametrize("call", [inference_plan, inference_seconds])
def test_times_that_do_not_fit_are_refused(call: Any) -> None:
    with pytest.raises(ScheduleError, match="times has 2 entries, but there are 3 layers"):
        call([_UNIFORM] * 2, InferencePlan(), 3)
    with pytest.raises(ScheduleError, match="times of layer 1 have 2 slices, but the plan has num_slices = 1"):
        call([_UNIFORM, BlockTimes.uniform(1, 1, 1, 1, 1, 2)], InferencePlan(), 2)
    with pytest.raises(ScheduleError, match="times of layer 0 have 1 slices"):
        call(_UNIFORM, InferencePlan(2, 2), 2)
    with pytest.raises(ScheduleError, match="num_layers is 0"):
        call(_UNIFORM, InferencePlan(), 0)
    with pytest.raises(ScheduleError, match="num_steps is -1"):
        call(_UNIFORM, InferencePlan(), 1, -1)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("SA", "word begins with 'S', but must always"),
        ("AAAS", "word begins with 'AAA', but must always .* up to 2 more"),
        ("AxAS", "word begins with 'Ax'"),
        ("ASAS", "word has 2 A's and 2 S's, but must have 4 of each"),
        ("ASASASAA", "word has 5 A's and 3 S's"),
    ],
)
def test_words_that_cannot_run_are_refused(word: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        inference_plan(_UNIFORM, InferencePlan(2), 2, word=word)
