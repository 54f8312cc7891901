"""When the tasks of one step ran: the passes of a pipeline on every rank, or the streams of a chunked layer of experts.

A run records one early step, its third, when measuring and warming up are over. Processes of one machine share a
clock. Those of several count from the end of the step's small all-reduce, which is everywhere nearly the same moment.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laconic.schedule.streams import Timeline

TIMELINE_FILE = "timeline.json"
TIMELINE_VERSION = 1
_RECORDED = 3


class TaskTime(NamedTuple):
    """A task and when it ran, in seconds."""

    name: str
    start_seconds: float
    end_seconds: float


def recorded_step(first_step: int, steps: int) -> int:
    """The step that is recorded of a run that goes from `first_step` steps done to `steps`: the third, or the last."""
    return min(first_step + _RECORDED, steps)


def machine() -> str:
    """Identity of the machine, or of its clock: the same for all of its processes and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def timeline_of_pipeline(
    step: int, schedule: str, ranks: Sequence[tuple[str, str, float, Iterable[Sequence[Any]]]]
) -> dict[str, Any]:
    """The contents of timeline.json for a pipeline.

    Args:
        ranks: name, machine, end of the all-reduce by the rank's clock, and passes of each rank (as TaskTime, named as
            `str(Action)` does).
    """
    share_a_clock = len({machine for _, machine, _, _ in ranks}) == 1
    moved = [
        (name, [_moved(TaskTime(*task), 0.0 if share_a_clock else -common) for task in tasks])
        for name, _, common, tasks in ranks
    ]
    first = min((task.start_seconds for _, tasks in moved for task in tasks), default=0.0)
    lanes = [_lane(name, (_moved(task, -first) for task in tasks)) for name, tasks in moved]
    return _timeline(step, schedule, {"forward and backward": lanes})


def timeline_of_layer(step: int, schedule: str, executed: Mapping[str, Timeline]) -> dict[str, Any]:
    """The contents of timeline.json for a layer in chunks: timelines by title, each from its own start."""
    groups = {}
    for title, timeline in executed.items():
        lanes: dict[str, list[TaskTime]] = {stream: [] for stream in timeline.plan.streams}
        for name, span in timeline.spans.items():
            lanes[span.stream].append(TaskTime(name, span.start_seconds, span.end_seconds))
        groups[title] = [_lane(stream, sorted(tasks, key=lambda task: task[1])) for stream, tasks in lanes.items()]
    return _timeline(step, schedule, groups)


def _timeline(step: int, schedule: str, groups: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "version": TIMELINE_VERSION,
        "step": step,
        "schedule": schedule,
        "groups": [{"title": title, "lanes": lanes} for title, lanes in groups.items()],
    }


def _lane(name: str, tasks: Iterable[TaskTime]) -> dict[str, Any]:
    shown = [[task.name, round(task.start_seconds, 7), round(task.end_seconds, 7)] for task in tasks]
    return {"name": name, "tasks": shown}


def _moved(task: TaskTime, seconds: float) -> TaskTime:
    return TaskTime(task.name, task.start_seconds + seconds, task.end_seconds + seconds)
