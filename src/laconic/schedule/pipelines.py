"""The pipeline schedules that laconic trains with, built action by action."""

from __future__ import annotations

from collections.abc import Callable

from laconic.errors import ScheduleError
from laconic.schedule.actions import Action
from laconic.schedule.pipeline import PipelineSchedule


def _check(num_ranks: int, num_micro_batches: int) -> None:
    for name, value in (("num_ranks", num_ranks), ("num_micro_batches", num_micro_batches)):
        if value < 1:
            raise ScheduleError(f"{name} is {value!r}, but it must be at least 1")


def gpipe(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (arXiv 1811.06965). Every rank holds all micro-batches at once."""
    _check(num_ranks, num_micro_batches)
    lines = [
        tuple(Action(rank, kind, index) for kind in ("F", "B") for index in range(num_micro_batches))
        for rank in range(num_ranks)
    ]
    return PipelineSchedule("gpipe", tuple(lines))


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B (arXiv 2006.09503): each rank starts its backwards as early as it can and then alternates."""
    _check(num_ranks, num_micro_batches)
    lines = [
        _alternate(
            warmup=num_ranks - 1 - rank,
            forwards=[Action(rank, "F", index) for index in range(num_micro_batches)],
            backwards=[Action(rank, "B", index) for index in range(num_micro_batches)],
        )
        for rank in range(num_ranks)
    ]
    return PipelineSchedule("1f1b", tuple(lines))


def interleaved_1f1b(
    num_ranks: int, num_micro_batches: int, stages_per_rank: int, group_size: int | None = None
) -> PipelineSchedule:
    """Interleaved 1F1B (arXiv 2104.04473): rank r holds the stages r, r + num_ranks, r + 2 num_ranks, ...

    Args:
        num_ranks: ranks of the pipeline.
        num_micro_batches: per optimizer step; a multiple of the group size.
        stages_per_rank: stages that each rank holds.
        group_size: micro-batches that pass one stage before the next stage of the rank has its turn. None takes torch's
            choice: num_ranks where the micro-batches divide into such groups, else the smallest larger number.

    Raises:
        ScheduleError: the micro-batches do not divide into groups, or a group is smaller than the pipeline.
    """
    _check(num_ranks, num_micro_batches)
    if stages_per_rank < 1:
        raise ScheduleError(f"stages_per_rank is {stages_per_rank!r}, but it must be at least 1")
    if group_size is None:
        num_rounds = max(1, num_micro_batches // num_ranks)
        if num_micro_batches % num_rounds:
            raise ScheduleError(
                f"num_micro_batches is {num_micro_batches}, but interleaved 1F1B over {num_ranks} ranks needs a "
                f"multiple of its {num_rounds} rounds; {num_ranks * num_rounds} is the nearest below"
            )
        group_size = num_micro_batches // num_rounds
    elif group_size < 1 or num_micro_batches % group_size:
        raise ScheduleError(f"group_size is {group_size}, but it must divide num_micro_batches ({num_micro_batches})")
    lines = []
    for rank in range(num_ranks):
        order = [
            (chunk, first + index)
            for first in range(0, num_micro_batches, group_size)
            for chunk in range(stages_per_rank)
            for index in range(group_size)
        ]
        stage_of = [chunk * num_ranks + rank for chunk in range(stages_per_rank)]
        lines.append(
            _alternate(
                warmup=(stages_per_rank - 1) * group_size + 2 * (num_ranks - 1 - rank),
                forwards=[Action(stage_of[chunk], "F", index) for chunk, index in order],
                backwards=[Action(stage_of[stages_per_rank - 1 - chunk], "B", index) for chunk, index in order],
            )
        )
    return PipelineSchedule("interleaved-1f1b", tuple(lines))


def _alternate(warmup: int, forwards: list[Action], backwards: list[Action]) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    line = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        line += [forward, backward]
    return (*line, *backwards[len(forwards) - warmup :])


SCHEDULES: dict[str, Callable[[int, int, int], PipelineSchedule]] = {
    "gpipe": lambda ranks, micro_batches, stages: gpipe(ranks, micro_batches),
    "1f1b": lambda ranks, micro_batches, stages: one_f_one_b(ranks, micro_batches),
    "interleaved-1f1b": interleaved_1f1b,
}
"""Builder by name: (num_ranks, num_micro_batches, stages_per_rank) -> schedule."""


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Make a schedule by name: "gpipe", "1f1b" or "interleaved-1f1b".

    Args:
        name: of the schedule.
        num_ranks: ranks of the pipeline; 1 is training without a pipeline.
        num_micro_batches: micro-batches of one optimizer step and pipeline.
        stages_per_rank: stages that each rank holds; above 1 only for "interleaved-1f1b".

    Raises:
        ScheduleError: the name is not known, or the numbers do not fit the schedule.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule is {name!r}, but it must be one of {', '.join(SCHEDULES)}")
    if stages_per_rank != 1 and name != "interleaved-1f1b":
        raise ScheduleError(
            f"stages_per_rank is {stages_per_rank}, but {name} holds one stage per rank; "
            f"'interleaved-1f1b' holds several"
        )
    return SCHEDULES[name](num_ranks, num_micro_batches, stages_per_rank)
