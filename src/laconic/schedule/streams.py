"""Tasks on streams: the representation of all schedules, and their simulator.

A stream runs one task at a time, in the order of issue: a processor, a link or one direction of it, a pipeline rank. A
task takes its stream for some seconds, after the tasks that it names and after all earlier tasks of its stream. Nothing
else is assumed, so a pipeline of layers, the chunks of a mixture-of-experts layer and a serving cluster are all the
same kind of plan, and the plan that was simulated is the plan that runs (`laconic.schedule.execute`).

    >>> plan = StreamPlan((
    ...     Task("send 0", "wire", 2.0),
    ...     Task("send 1", "wire", 2.0),
    ...     Task("work 0", "core", 3.0, after=("send 0",)),
    ...     Task("work 1", "core", 3.0, after=("send 1",)),
    ... ))
    >>> timeline = simulate(plan)
    >>> timeline.makespan_seconds, timeline.critical_path(), timeline.slack_seconds("send 1")
    (8.0, ('send 0', 'work 0', 'work 1'), 1.0)
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from laconic.errors import ScheduleError
from laconic.json_text import parse_json

_FORMAT, _VERSION = "laconic stream plan", 1


@dataclass(frozen=True)
class Task:
    """One unit of work on one stream.

    Attributes:
        name: unique in its plan.
        stream: name of the stream that runs it.
        seconds: expected duration.
        after: names of tasks, on any streams, that must have ended before it starts.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class StreamPlan:
    """Tasks in the order in which they are issued; every stream runs its own in that order, first in, first out.

    A task may wait for one that is issued later, on another stream, as long as there is no cycle.

    Raises:
        ScheduleError: two tasks have the same name, a task waits for an unknown one, seconds are negative or not
            finite, or streams wait for each other.
    """

    tasks: tuple[Task, ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False)
    _before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {task.name: number for number, task in enumerate(self.tasks)}
        if len(index) < len(self.tasks):
            name = next(task.name for number, task in enumerate(self.tasks) if index[task.name] != number)
            raise ScheduleError(f"task {name!r} is in the plan twice; names of tasks must be unique")
        before: list[tuple[int, ...]] = []
        last: dict[str, int] = {}
        for number, task in enumerate(self.tasks):
            if not (math.isfinite(task.seconds) and task.seconds >= 0):
                raise ScheduleError(f"seconds of task {task.name!r} are {task.seconds!r}, but must be finite and >= 0")
            found = [last[task.stream]] if task.stream in last else []
            for name in task.after:
                if name not in index:
                    raise ScheduleError(f"task {task.name!r} waits for {name!r}, which is no task of the plan")
                found.append(index[name])
            before.append(tuple(found))
            last[task.stream] = number
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_before", tuple(before))
        object.__setattr__(self, "_order", self._sorted())

    def _sorted(self) -> tuple[int, ...]:
        """Sort the indices of the tasks topologically; keep the order of issue where it is topological."""
        if all(number > one for number, found in enumerate(self._before) for one in found):
            return tuple(range(len(self.tasks)))
        missing = [len(found) for found in self._before]
        after: list[list[int]] = [[] for _ in self.tasks]
        for number, found in enumerate(self._before):
            for one in found:
                after[one].append(number)
        ready = [number for number, count in enumerate(missing) if not count]
        order = []
        while ready:
            number = heapq.heappop(ready)
            order.append(number)
            for one in after[number]:
                missing[one] -= 1
                if not missing[one]:
                    heapq.heappush(ready, one)
        if len(order) < len(self.tasks):
            done = set(order)
            stuck: dict[str, str] = {}
            for number, task in enumerate(self.tasks):
                if number not in done:
                    stuck.setdefault(task.stream, task.name)
            waiting = ", ".join(f"{stream} at {name}" for stream, name in stuck.items())
            raise ScheduleError(f"plan cannot go on: {waiting} wait for tasks that never end")
        return tuple(order)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of their first task."""
        return tuple(dict.fromkeys(task.stream for task in self.tasks))

    def in_order(self) -> tuple[Task, ...]:
        """The tasks in topological order: one thread can issue them in this order."""
        return tuple(self.tasks[number] for number in self._order)

    def __getitem__(self, name: str) -> Task:
        return self.tasks[self._index[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __len__(self) -> int:
        return len(self.tasks)

    def timed(self, seconds: Mapping[str, float]) -> StreamPlan:
        """Return the plan with new seconds for some tasks, for example measured ones.

        Raises:
            ScheduleError: a name is no task.
        """
        if unknown := sorted(set(seconds) - set(self._index)):
            raise ScheduleError(f"seconds are given for {unknown[0]!r}, which is no task of the plan")
        return StreamPlan(tuple(replace(task, seconds=seconds.get(task.name, task.seconds)) for task in self.tasks))

    def to_json(self) -> str:
        """Return the plan as JSON, which `from_json` reads."""
        tasks = [asdict(task) for task in self.tasks]
        return json.dumps({"format": _FORMAT, "version": _VERSION, "tasks": tasks}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StreamPlan:
        """Read what `to_json` wrote.

        Raises:
            ScheduleError: the text is no such plan, of another version, or a plan that cannot run.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ScheduleError(f"the plan is no JSON: {error}") from error
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ScheduleError(f"the file is no {_FORMAT} of version {_VERSION}; write it with StreamPlan.to_json")
        if unknown := sorted(data.keys() - {"format", "version", "tasks"}):
            raise ScheduleError(f"the plan has {unknown[0]!r}, but it may have format, version and tasks alone")
        tasks = data.get("tasks")
        return cls(tuple(map(_task, tasks if isinstance(tasks, list) else [tasks])))


def _task(data: Any) -> Task:
    names = isinstance(data, dict) and [data.get("name"), data.get("stream"), *_listed(data.get("after"))]
    if (
        not names
        or set(data) != {"name", "stream", "seconds", "after"}
        or not all(isinstance(name, str) for name in names)
        or isinstance(data["seconds"], bool)
        or not isinstance(data["seconds"], (int, float))
    ):
        raise ScheduleError(f"{data!r} is no task: it must have name, stream and after (names) and seconds (a number)")
    return Task(data["name"], data["stream"], float(data["seconds"]), tuple(data["after"]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


@dataclass(frozen=True)
class Span:
    """When a task ran, in seconds since the plan's start."""

    stream: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """When each task of a plan ran: predicted by `simulate`, or measured by `laconic.schedule.execute`."""

    plan: StreamPlan
    spans: Mapping[str, Span]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", MappingProxyType(dict(self.spans)))

    @property
    def makespan_seconds(self) -> float:
        """End of the last task."""
        return max((span.end_seconds for span in self.spans.values()), default=0.0)

    def busy_seconds(self, stream: str) -> float:
        """Return the time in which a stream works; it is idle for the rest of the makespan."""
        return math.fsum(span.seconds for span in self.spans.values() if span.stream == stream)

    def critical_path(self) -> tuple[str, ...]:
        """Find the tasks that decide the makespan: names in order, each the last that its successor waited for.

        In a simulated timeline their seconds add up to the makespan.
        """
        tasks, before = self.plan.tasks, self.plan._before
        ends = [self.spans[task.name].end_seconds for task in tasks]
        path: list[int] = []
        found: Sequence[int] = range(len(tasks))
        while found:
            path.append(max(found, key=lambda number: (ends[number], number)))
            found = before[path[-1]]
        return tuple(tasks[number].name for number in reversed(path))

    def slack_seconds(self, name: str) -> float:
        """Return how much longer a task could take without changing the makespan, if all others take what they took."""
        plan = self.plan
        until = [self.makespan_seconds] * len(plan)
        wanted = plan._index[name]
        for number in reversed(plan._order):
            if number == wanted:
                break
            start = until[number] - self.spans[plan.tasks[number].name].seconds
            for one in plan._before[number]:
                until[one] = min(until[one], start)
        return until[wanted] - self.spans[name].end_seconds


def simulate(plan: StreamPlan) -> Timeline:
    """Simulate a plan: every task starts as soon as its stream is free and its prerequisites have ended."""
    ends = [0.0] * len(plan)
    spans = {}
    for number in plan._order:
        task = plan.tasks[number]
        start = max([ends[one] for one in plan._before[number]], default=0.0)
        ends[number] = end = start + task.seconds
        spans[task.name] = Span(task.stream, start, end)
    return Timeline(plan, spans)
