"""Gradients in idle windows: never worse than any other split, than the paper's greedy and than its evolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import ScheduleError
from laconic.schedule.moe_gradients import BackwardPart, GradientPlan, backward_plan, fill_slots
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes, best_degree, pipeline_seconds
from laconic.schedule.streams import simulate

_DEGREES = (1, 2, 4)


@dataclass(frozen=True)
class _Line:
    alpha_seconds: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_seconds + self.seconds_per_byte * nbytes if nbytes > 0 else 0.0


_times = st.builds(ChunkTime, st.floats(0.01, 0.5), st.floats(0.1, 4))


@st.composite
def backwards(draw: st.DrawFn, max_parts: int = 6) -> list[BackwardPart]:
    """Mixture layers and dense parts in turn, with whole numbers of bytes."""
    parts = []
    for number in range(draw(st.integers(1, max_parts))):
        nbytes = float(draw(st.integers(0, 4)))
        if number % 2:
            parts.append(BackwardPart(f"dense {number}", nbytes, dense_seconds=draw(st.floats(0, 3))))
        else:
            a2a, ag = draw(_times), draw(_times)
            parts.append(BackwardPart(f"moe {number}", nbytes, LayerTimes(a2a, draw(_times), a2a, ag, draw(_times))))
    return parts


_lines = st.builds(_Line, st.floats(0, 1), st.floats(0.05, 1))


def _part_seconds(part: BackwardPart, reduction_seconds: float) -> float:
    if part.times is None:
        return max(part.dense_seconds, reduction_seconds)
    return min(pipeline_seconds(part.times, degree, reduction_seconds) for degree in _DEGREES)


def _total_seconds(parts: Sequence[BackwardPart], sent: Sequence[float], line: _Line) -> float:
    """The objective, straight from its definition."""
    taken = math.fsum(_part_seconds(part, line.seconds(nbytes)) for part, nbytes in zip(parts, sent, strict=True))
    rest = sum(part.gradient_nbytes for part in parts) - math.fsum(sent)
    return taken + line.seconds(rest if rest > 1e-9 else 0.0)  # what rounding leaves is not sent


def _check(parts: Sequence[BackwardPart], line: _Line, plan: GradientPlan) -> None:
    """A plan is what it says it is, and can be done."""
    waiting = 0.0
    for part, slot in zip(parts, plan.slots, strict=True):
        assert -1e-9 <= slot.nbytes <= waiting + 1e-9
        waiting += part.gradient_nbytes - slot.nbytes
        assert slot.reduction_seconds == pytest.approx(line.seconds(slot.nbytes))
        if part.times is not None:
            assert slot.degree is not None
            assert slot.seconds == pytest.approx(pipeline_seconds(part.times, slot.degree, slot.reduction_seconds))
    assert plan.tail_nbytes == pytest.approx(waiting, abs=1e-9)
    order = [part.name for part in parts]
    for one in plan.slices:
        assert one.slot is None or order.index(one.source) < order.index(one.slot)
    for part, slot in zip(parts, plan.slots, strict=True):
        assert sum(one.nbytes for one in plan.slices if one.source == part.name) == pytest.approx(part.gradient_nbytes)
        assert sum(one.nbytes for one in plan.slices if one.slot == part.name) == pytest.approx(slot.nbytes)


@settings(max_examples=100)
@given(backwards(), _lines)
def test_a_plan_is_what_it_says_and_takes_what_the_simulation_takes(parts: list[BackwardPart], line: _Line) -> None:
    plan = fill_slots(parts, line, _DEGREES)
    _check(parts, line, plan)
    whole = _total_seconds(parts, [slot.nbytes for slot in plan.slots], line)
    assert plan.seconds == pytest.approx(whole)  # and so no other degree would have been better
    assert simulate(backward_plan(parts, plan)).makespan_seconds == pytest.approx(plan.seconds)


@settings(max_examples=40)
@given(backwards(max_parts=4), _lines)
def test_no_split_into_halves_of_bytes_is_better(parts: list[BackwardPart], line: _Line) -> None:
    """All splits on a grid: none beats the plan, and one comes as near as the grid is fine."""
    total = sum(part.gradient_nbytes for part in parts)
    seconds = [
        {half / 2: _part_seconds(part, line.seconds(half / 2)) for half in range(int(2 * total) + 1)} for part in parts
    ]
    best = math.inf
    for sent in itertools.product(*seconds):
        exists, gone, possible = 0.0, 0.0, True
        for part, nbytes in zip(parts, sent, strict=True):
            gone += nbytes
            possible &= gone <= exists
            exists += part.gradient_nbytes
        if possible:
            taken = sum(table[nbytes] for table, nbytes in zip(seconds, sent, strict=True))
            best = min(best, taken + line.seconds(total - gone))
    found = fill_slots(parts, line, _DEGREES).seconds
    assert found <= best + 1e-9
    assert best <= found + len(parts) * (line.alpha_seconds + line.seconds_per_byte / 2) + 1e-9


@given(backwards(), _lines)
def test_without_gradients_every_layer_has_its_own_best_degree(parts: list[BackwardPart], line: _Line) -> None:
    quiet = [replace(part, gradient_nbytes=0.0) for part in parts]
    plan = fill_slots(quiet, line, _DEGREES)
    for part, slot in zip(quiet, plan.slots, strict=True):
        assert slot.nbytes == 0
        if part.times is not None:
            assert slot.seconds == best_degree(part.times, 0.0, _DEGREES).seconds
    assert (plan.tail_nbytes, plan.slices) == (0.0, ())


def test_a_degree_that_is_slower_alone_is_taken_for_its_window() -> None:
    """What the paper's greedy cannot: two chunks are best alone, but one leaves the wire free while experts run."""
    times = LayerTimes(ChunkTime(0.5, 1.0), ChunkTime(0.0, 2.0), ChunkTime(0.5, 1.0))
    assert [pipeline_seconds(times, degree) for degree in (1, 2)] == [5.0, 4.0]
    plan = fill_slots([BackwardPart("dense", 2.0), BackwardPart("moe", 0.0, times)], _Line(0.0, 1.0), _DEGREES)
    assert plan.slots[1].degree == 1
    assert plan.slots[1].nbytes == 2.0
    assert plan.seconds == 5.0


@pytest.mark.ci
def test_many_layers_are_planned() -> None:
    times = LayerTimes(*[ChunkTime(0.1, seconds) for seconds in (1.0, 2.0, 1.0, 0.5, 0.5)])
    parts = []
    for layer in range(60):
        mine = replace(times, experts=ChunkTime(0.1, 1.0 + layer / 20))
        parts += [BackwardPart(f"moe {layer}", 1.0, mine), BackwardPart(f"dense {layer}", 5.0, dense_seconds=1.0)]
    line = _Line(0.05, 0.4)
    plan = fill_slots(parts, line)
    assert plan.seconds < fill_slots(parts, line, (1,)).seconds
    total = sum(part.gradient_nbytes for part in parts)
    assert sum(one.nbytes for one in plan.slices) == pytest.approx(total)


def test_what_is_no_backward_is_refused() -> None:
    times = LayerTimes(ChunkTime(0, 1), ChunkTime(0, 1), ChunkTime(0, 1))
    with pytest.raises(ScheduleError, match="make two parts of it"):
        BackwardPart("x", times=times, dense_seconds=1.0)
    with pytest.raises(ScheduleError, match=r"gradient_nbytes of part 'x' is -1"):
        BackwardPart("x", -1)
    one = BackwardPart("x", 1.0)
    with pytest.raises(ScheduleError, match=r"part 'x' is there twice"):
        fill_slots([one, one], _Line(0, 1))
    with pytest.raises(ScheduleError, match="degrees is empty"):
        fill_slots([one], _Line(0, 1), ())
    with pytest.raises(ScheduleError, match="slots of other parts"):
        backward_plan([one], fill_slots([], _Line(0, 1)))
