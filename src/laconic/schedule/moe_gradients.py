"""Plans gradient reduction slots: when, in backward, an idle link between nodes reduces dense gradients.

FSMoE (arXiv 2501.10714, section 5) calls it adaptive gradient partitioning: fill the slots greedily, then place the
rest by differential evolution. This module needs neither. A part of backward with a reduction of t seconds takes

    f(t) = min over degrees r of  base_r + max(0, t - slot_r)

where base_r is the makespan without the reduction and slot_r the slack of an empty one. All slopes are 0 or 1, and
gradients that are not reduced yet can always wait. So for every part and degree three amounts suffice: nothing, as much
as fits into the slot, everything. A pass through the parts in order, which drops states that another one dominates,
finds the least time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.errors import ScheduleError
from laconic.schedule.moe_pipeline import COMPUTE, DEGREES, GRADIENTS, INTER, LayerTimes, pipeline_plan, pipeline_tasks
from laconic.schedule.streams import StreamPlan, Task, simulate

_MAX_STATES = 1000


class ReductionLine(Protocol):
    """seconds = alpha_seconds + seconds_per_byte * bytes, such as laconic.cost.comm.rates.Line."""

    @property
    def alpha_seconds(self) -> float:
        """Start-up of one reduction."""

    @property
    def seconds_per_byte(self) -> float:
        """Time per byte reduced."""


@dataclass(frozen=True)
class BackwardPart:
    """A stretch of backward: either dense layers, or one mixture-of-experts layer between its dispatch and combine.

    `gradient_nbytes` are of dense parameters whose gradients are complete when the part has ended and wait for their
    reduction. A dense part has `dense_seconds`, which leave the link between nodes free, and no `times`.
    """

    name: str
    gradient_nbytes: float = 0.0
    times: LayerTimes | None = None
    dense_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("gradient_nbytes", "dense_seconds"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ScheduleError(f"{field} of part {self.name!r} is {value!r}, but must be finite and >= 0")
        if self.times is not None and self.dense_seconds:
            raise ScheduleError(
                f"part {self.name!r} has times of a mixture layer and dense_seconds; make two parts of it, in the "
                f"order in which backward runs them"
            )


@dataclass(frozen=True)
class ReductionSlot:
    """One part of backward, by name and chunks of its mixture layer, with the reduction that overlaps it.

    `seconds` is the time of the part with it.
    """

    part: str
    degree: int | None
    nbytes: float
    reduction_seconds: float
    seconds: float


@dataclass(frozen=True)
class GradientSlice:
    """`nbytes` of the gradients of part `source` are reduced in part `slot`; None: after the last part."""

    source: str
    slot: str | None
    nbytes: float


@dataclass(frozen=True)
class GradientPlan:
    """When gradients are reduced: in the slots of all parts, in order, and in a tail after the last part.

    `slices` are the same by origin, oldest gradients first.
    """

    slots: tuple[ReductionSlot, ...]
    tail_nbytes: float
    tail_seconds: float
    slices: tuple[GradientSlice, ...]

    @property
    def seconds(self) -> float:
        """Time of the whole backward, tail included."""
        return math.fsum(slot.seconds for slot in self.slots) + self.tail_seconds


@dataclass(frozen=True)
class _Option:
    """One candidate for running a part."""

    degree: int | None
    base_seconds: float
    slot_seconds: float


@dataclass(frozen=True)
class _State:
    """A partial plan over the first parts: seconds so far, bytes that wait, and the last step."""

    seconds: float
    waiting_nbytes: float
    option: _Option | None = None
    sent_nbytes: float = 0.0
    before: _State | None = None


def fill_slots(
    parts: Sequence[BackwardPart],
    reduction: ReductionLine,
    degrees: Iterable[int] = DEGREES,
    *,
    shared_link: bool = False,
) -> GradientPlan:
    """Choose for every part of a backward its degree and how many bytes of earlier gradients it reduces.

    A part can only reduce gradients of parts before it. Every part that reduces anything pays the reduction's start-up.
    The result is the least time of the model, up to the number of states kept, which more than about twenty layers of
    very different kinds may reach.

    Args:
        parts: in the order in which backward runs them.
        reduction: time of a reduction between nodes, by bytes.
        degrees: candidates for every mixture layer.
        shared_link: whether traffic inside a node and between nodes shares a link.

    Raises:
        ScheduleError: two parts have the same name, or there are no degrees to try.
    """
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleError(f"part {twice!r} is there twice; names of parts must be unique")
    tried = sorted(set(degrees))
    if not tried:
        raise ScheduleError("degrees is empty, but at least one degree must be tried")

    alpha, beta = reduction.alpha_seconds, reduction.seconds_per_byte
    known: dict[LayerTimes, list[_Option]] = {}  # layers are often alike
    states = [_State(0.0, 0.0)]
    for part in parts:
        if part.times is None:
            options = [_Option(None, part.dense_seconds, part.dense_seconds)]
        else:
            if part.times not in known:
                known[part.times] = _options(part.times, tried, shared_link)
            options = known[part.times]
        states = _pruned(
            [
                _State(
                    state.seconds + _seconds(option, sent, reduction),
                    state.waiting_nbytes - sent + part.gradient_nbytes,
                    option,
                    sent,
                    state,
                )
                for state in states
                for option in options
                for sent in _amounts(option, state.waiting_nbytes, alpha, beta)
            ],
            alpha,
            beta,
        )
    best = min(states, key=lambda state: state.seconds + _reduction_seconds(state.waiting_nbytes, reduction))
    return _plan_of(best, parts, reduction)


def _options(times: LayerTimes, degrees: Sequence[int], shared_link: bool) -> list[_Option]:
    """Return the degrees that no other one beats in both time and length of the slot."""
    found = []
    for degree in degrees:
        timeline = simulate(pipeline_plan(times, degree, 0.0, shared_link=shared_link))
        found.append(_Option(degree, timeline.makespan_seconds, timeline.slack_seconds(GRADIENTS)))
    found.sort(key=lambda option: (option.base_seconds, -option.slot_seconds))
    best: list[_Option] = []
    for option in found:
        if not best or option.slot_seconds > best[-1].slot_seconds:
            best.append(option)
    return best


def _amounts(option: _Option, waiting: float, alpha: float, beta: float) -> list[float]:
    """Return the numbers of bytes to try. Filling the slot is free, so with a slot, 0 bytes need no try."""
    if waiting <= 0:
        return [0.0]
    if option.slot_seconds >= alpha + beta * waiting:
        return [waiting]
    if option.slot_seconds > alpha:
        return [(option.slot_seconds - alpha) / beta, waiting]
    return [0.0, waiting]


def _reduction_seconds(nbytes: float, reduction: ReductionLine) -> float:
    return reduction.alpha_seconds + reduction.seconds_per_byte * nbytes if nbytes > 0 else 0.0


def _seconds(option: _Option, sent: float, reduction: ReductionLine) -> float:
    return option.base_seconds + max(0.0, _reduction_seconds(sent, reduction) - option.slot_seconds)


def _pruned(states: list[_State], alpha: float, beta: float) -> list[_State]:
    """Return the states that no other dominates.

    One state dominates another if it takes no more time when it continues as the other does and sends its extra bytes
    at the very end, as one more message.
    """
    states.sort(key=lambda state: (state.seconds, state.waiting_nbytes))
    kept: list[_State] = []
    least_waiting = least_sum = math.inf
    for state in states:
        its_sum = state.seconds + beta * state.waiting_nbytes
        if state.waiting_nbytes < least_waiting and its_sum < least_sum + alpha:
            kept.append(state)
            least_waiting = state.waiting_nbytes
            least_sum = min(least_sum, its_sum)
    if len(kept) > _MAX_STATES:
        kept.sort(key=lambda state: state.seconds + beta * state.waiting_nbytes)
        del kept[_MAX_STATES:]
    return kept


def _plan_of(state: _State, parts: Sequence[BackwardPart], reduction: ReductionLine) -> GradientPlan:
    tail = state.waiting_nbytes
    slots = []
    now: _State | None = state
    for part in reversed(parts):
        assert now is not None
        assert now.option is not None
        seconds = _reduction_seconds(now.sent_nbytes, reduction)
        taken = _seconds(now.option, now.sent_nbytes, reduction)
        slots.append(ReductionSlot(part.name, now.option.degree, now.sent_nbytes, seconds, taken))
        now = now.before
    slots.reverse()

    slices: list[GradientSlice] = []
    queue: list[tuple[str, float]] = []
    for number, (name, room) in enumerate([*((one.part, one.nbytes) for one in slots), (None, math.inf)]):
        while queue and room > 0:
            source, nbytes = queue[0]
            sent = min(room, nbytes)
            slices.append(GradientSlice(source, name, sent))
            room -= sent
            if sent < nbytes:
                queue[0] = source, nbytes - sent
            else:
                queue.pop(0)
        if number < len(parts) and parts[number].gradient_nbytes > 0:
            queue.append((parts[number].name, parts[number].gradient_nbytes))
    return GradientPlan(tuple(slots), tail, _reduction_seconds(tail, reduction), tuple(slices))


def backward_plan(parts: Sequence[BackwardPart], plan: GradientPlan, *, shared_link: bool = False) -> StreamPlan:
    """Turn the whole backward into tasks: parts one after the other, each overlapped with its reduction.

    Names begin with the part's, as in `mlp 3 dispatch 0`; a dense part is one task of its name on `compute`; reductions
    are `<part> gradients`, and `gradients` at the end. The makespan is plan.seconds where dense parts and mixture
    layers alternate, and not more elsewhere.
    """
    if [part.name for part in parts] != [slot.part for slot in plan.slots]:
        raise ScheduleError("the gradient plan has slots of other parts; call fill_slots with these parts")
    tasks: list[Task] = []
    after: tuple[str, ...] = ()
    for part, slot in zip(parts, plan.slots, strict=True):
        seconds = slot.reduction_seconds if slot.nbytes > 0 else None
        if part.times is not None:
            assert slot.degree is not None
            prefix = f"{part.name} "
            tasks += pipeline_tasks(
                part.times, slot.degree, seconds, prefix=prefix, after=after, shared_link=shared_link
            )
            after = (tasks[-1].name,)
        else:
            if seconds is not None:
                tasks.append(Task(f"{part.name} {GRADIENTS}", INTER, seconds, after))
            tasks.append(Task(part.name, COMPUTE, part.dense_seconds, after))
            after = (part.name,)
    if plan.tail_nbytes > 0:
        tasks.append(Task(GRADIENTS, INTER, plan.tail_seconds, after))
    return StreamPlan(tuple(tasks))
