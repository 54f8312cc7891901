"""The pipeline inside of a mixture-of-experts layer: simulated, equal to the paper's closed forms where they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import ScheduleError
from laconic.schedule.moe_pipeline import (
    COMPUTE,
    INTER,
    INTRA,
    ChunkTime,
    LayerTimes,
    best_degree,
    pipeline_plan,
    pipeline_seconds,
)
from laconic.schedule.streams import simulate
from tests.schedule.closed_forms import fsmoe

# Whole seconds, too, so that sides of a predicate are often equal.
_seconds = st.floats(0.01, 10) | st.integers(1, 4).map(float)
chunk_times = st.builds(ChunkTime, st.floats(0, 1) | st.just(0.0), _seconds)


def _layer(a2a: ChunkTime, ag: ChunkTime, experts: ChunkTime, rs: ChunkTime) -> LayerTimes:
    return LayerTimes(a2a, experts, a2a, ag, rs)


def _flat(a2a: float, ag: float, experts: float, rs: float) -> LayerTimes:
    """Seconds per chunk, whatever the degree."""
    return _layer(*(ChunkTime(float(seconds), 0.0) for seconds in (a2a, ag, experts, rs)))


@settings(max_examples=500)
@given(chunk_times, chunk_times, chunk_times, st.integers(1, 9), st.just(0.0) | _seconds)
def test_the_closed_forms_are_exact_where_gather_is_scatter(
    a2a: ChunkTime, ag: ChunkTime, experts: ChunkTime, degree: int, gradient: float
) -> None:
    times = _layer(a2a, ag, experts, ag)
    assert fsmoe(times, degree, gradient) == pytest.approx(pipeline_seconds(times, degree, gradient))


@given(chunk_times, chunk_times, chunk_times, chunk_times, st.integers(1, 9), st.just(0.0) | _seconds)
def test_no_plan_beats_its_busiest_stream_or_one_chunk_after_the_other(
    a2a: ChunkTime, ag: ChunkTime, experts: ChunkTime, rs: ChunkTime, degree: int, gradient: float
) -> None:
    times = _layer(a2a, ag, experts, rs)
    timeline = simulate(pipeline_plan(times, degree, gradient))
    busy = [timeline.busy_seconds(stream) for stream in (INTER, INTRA, COMPUTE)]
    assert max(busy) <= timeline.makespan_seconds * (1 + 1e-9)
    assert timeline.makespan_seconds <= sum(busy) * (1 + 1e-9)
    shared = pipeline_seconds(times, degree, gradient, shared_link=True)
    assert shared >= max(busy[0] + busy[1], busy[2]) * (1 - 1e-9)


@given(chunk_times, chunk_times, chunk_times, chunk_times, st.just(0.0) | _seconds)
def test_the_best_degree_is_the_best_of_all(
    a2a: ChunkTime, ag: ChunkTime, experts: ChunkTime, rs: ChunkTime, gradient: float
) -> None:
    times = _layer(a2a, ag, experts, rs)
    choice = best_degree(times, gradient, (8, 1, 2, 4))
    assert [degree for degree, _ in choice.candidates] == [1, 2, 4, 8]
    assert all(seconds == pipeline_seconds(times, degree, gradient) for degree, seconds in choice.candidates)
    assert choice.seconds == min(seconds for _, seconds in choice.candidates)
    assert all(seconds > choice.seconds for degree, seconds in choice.candidates if degree < choice.degree)


def test_free_start_up_asks_for_many_chunks_and_dear_start_up_for_one() -> None:
    for alpha, degree in ((0.0, 16), (5.0, 1)):
        times = _layer(*[ChunkTime(alpha, 1.0)] * 4)
        assert best_degree(times).degree == degree


def test_backward_sends_back_what_forward_combined() -> None:
    forward = LayerTimes(ChunkTime(0, 1), ChunkTime(0, 2), ChunkTime(0, 3))
    assert forward.backward(3.0) == LayerTimes(ChunkTime(0, 3), ChunkTime(0, 6), ChunkTime(0, 1))


def test_the_papers_streams_do_their_work_in_the_papers_order() -> None:
    plan = pipeline_plan(_flat(1, 1, 1, 1), 2, 0.5)
    order = {stream: [task.name for task in plan.tasks if task.stream == stream] for stream in plan.streams}
    assert order == {
        INTER: ["dispatch 0", "dispatch 1", "gradients", "combine 0", "combine 1"],
        INTRA: ["all_gather 0", "all_gather 1", "reduce_scatter 0", "reduce_scatter 1"],
        COMPUTE: ["experts 0", "experts 1"],
    }
    assert plan.in_order() == plan.tasks


def test_whole_experts_need_no_wire_inside() -> None:
    plan = pipeline_plan(LayerTimes(ChunkTime(0, 1), ChunkTime(0, 2), ChunkTime(0, 1)), 2)
    assert plan.streams == (INTER, COMPUTE)
    assert "gradients" not in plan
    assert simulate(plan).makespan_seconds == 0.5 + 2 + 0.5


def test_what_is_no_layer_or_degree_is_refused() -> None:
    uneven = LayerTimes(ChunkTime(0, 1), ChunkTime(0, 2), ChunkTime(0, 2))
    with pytest.raises(ScheduleError, match="must both be given"):
        LayerTimes(ChunkTime(0, 1), ChunkTime(0, 2), ChunkTime(0, 2), all_gather=ChunkTime(0, 1))
    with pytest.raises(ScheduleError, match="degree is 0"):
        pipeline_plan(_flat(1, 1, 1, 1), 0)
    with pytest.raises(ScheduleError, match="degrees is empty"):
        best_degree(uneven, degrees=())


@settings(max_examples=100)
@given(chunk_times, chunk_times, chunk_times, st.integers(1, 6), st.booleans())
def test_what_comes_home_is_shared_chunk_by_chunk(
    a2a: ChunkTime, experts: ChunkTime, share: ChunkTime, degree: int, shared_link: bool
) -> None:
    """Parm's S2: a chunk is gathered while others come home; the last one is gathered when all is quiet."""
    without = LayerTimes(a2a, experts, a2a)
    times = replace(without, share=share)
    found = simulate(pipeline_plan(times, degree, shared_link=shared_link))
    for i in range(degree):
        assert found.spans[f"share {i}"].start_seconds >= found.spans[f"combine {i}"].end_seconds
    alone = pipeline_seconds(without, degree)
    one = share.seconds(degree)
    assert alone + one <= found.makespan_seconds * (1 + 1e-9)
    assert found.makespan_seconds <= alone + degree * one + (degree * a2a.seconds(degree) if shared_link else 0) + 1e-9
