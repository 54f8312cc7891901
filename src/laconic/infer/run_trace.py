"""A recorded run of an engine as tasks on streams: what ran when, and what its plan would have made of the same tasks.

The tasks are those of `laconic.schedule.inference.inference_plan` for a micro-batch that makes step after step: layer l
of step k has the number k * (T + 1) + l, where T counts layers with experts, and the last number of a step is what
follows them, a dense layer in the plan's terms. Dense layers in between are part of the next attention. Only messages
that were sent have tasks: a slice that no row needs has none.

    attention L.M, shared L.M      stream "attention": from the turn to compute to the first row sent; shared experts
    dispatch L.M.S                 stream "a2e": rows on the link, from when it is free until they are there
    experts L.M.S                  stream "experts"
    combine L.M.S                  stream "e2a": sums on the link, until they are back

With several workers, names and streams end with their numbers: "attention 3.1 @0", "dispatch 3.1.0 @0-2", stream "a2e
0-2" from attention worker 0 to expert worker 2.

Clocks: all processes of one machine read one monotonic clock, so their times compare as they are. Between machines each
clock's offset is taken from the fastest round trip of a recorded message, half of which is each direction (as in NTP);
times of two machines are then uncertain by half of that round trip.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from laconic.infer.recorder import AnswerLog, LayerLog, MessageLog, PassLog, WorkerLog
from laconic.infer.split import EngineSplit
from laconic.schedule.inference import ATTENTION, COMBINE, DISPATCH, EXPERTS, InferencePlan
from laconic.schedule.streams import Span, StreamPlan, Task, Timeline, simulate
from laconic.schedule.trace import save_trace

_SECONDS = 1e-9
_Interval = tuple[float, float]


@dataclass(frozen=True)
class WorkerUse:
    """How one worker spent a recorded run.

    Attributes:
        role: "attention" or "expert".
        number: among the workers of this role.
        busy_seconds: in which it computed or sent.
        bubble_share: of the run, from its first task to its last, in which it did not; from 0 to 1.
        num_rows: tokens that an attention worker passed; rows that an expert worker got, one for each message that a
            token is in.
    """

    role: str
    number: int
    busy_seconds: float
    bubble_share: float
    num_rows: int


@dataclass(frozen=True)
class TraceSummary:
    """A recorded run in numbers.

    A step is one pass of one micro-batch, from the begin of its first task to the end of its last.

    Attributes:
        num_steps: that were recorded whole.
        num_dropped: that were not, because a log was full or one end of a link had not begun to record.
        makespan_seconds: from the first task to the last.
        step_seconds: median step.
        simulated_step_seconds: the same of the simulated timeline: the run's tasks with their measured seconds, in the
            order in which they ran, each as early as its stream and its prerequisites allow.
        planned_step_seconds: what the planner predicted for a step of decoding; None if it did not choose the plan.
        exposed_seconds: for each layer with experts, mean over steps: time in which rows or sums of the step were on a
            link while neither its attention worker nor any expert worker computed.
        workers: attention workers, then expert workers.
    """

    num_steps: int
    num_dropped: int
    makespan_seconds: float
    step_seconds: float
    simulated_step_seconds: float
    planned_step_seconds: float | None
    exposed_seconds: tuple[float, ...]
    workers: tuple[WorkerUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.num_steps:
            return "trace: no step was recorded whole"
        planned = "" if self.planned_step_seconds is None else f", planned {1e3 * self.planned_step_seconds:.3f}"
        exposed = ", ".join(f"{1e3 * seconds:.3f}" for seconds in self.exposed_seconds)
        lines = [
            f"trace: {self.num_steps} steps in {self.makespan_seconds:.3f} s"
            + (f"; {self.num_dropped} more were not recorded whole" if self.num_dropped else ""),
            f"ms of a step (median): measured {1e3 * self.step_seconds:.3f}, simulated from its own tasks"
            f" {1e3 * self.simulated_step_seconds:.3f}{planned}",
            f"ms of exposed communication in a step, by layer: {exposed}; in all {1e3 * sum(self.exposed_seconds):.3f}",
        ]
        for use in self.workers:
            lines.append(
                f"{use.role} worker {use.number}: busy {use.busy_seconds:.3f} s, bubble {use.bubble_share:.1%},"
                f" {use.num_rows:,} rows"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class RunTrace:
    """A recorded run.

    Attributes:
        measured: when each task ran. Its plan has the tasks in the order in which they began, with measured seconds.
        simulated: the same tasks, each as early as possible.
        summary: both in numbers.
    """

    measured: Timeline
    simulated: Timeline
    summary: TraceSummary

    def save(self, path: str | Path) -> None:
        """Write both timelines as one trace for Perfetto or chrome://tracing, as processes "measured" and "simulated".

        Raises:
            ScheduleError: the file cannot be written.
        """
        save_trace({"measured": self.measured, "simulated": self.simulated}, path)

    @classmethod
    def of(
        cls,
        logs: Sequence[WorkerLog],
        split: EngineSplit,
        plan: InferencePlan,
        planned_step_seconds: float | None = None,
    ) -> RunTrace:
        """Put the logs of all workers, by rank, together."""
        return _Assembly(logs, split, plan).trace(planned_step_seconds)


@dataclass(frozen=True)
class _Way:
    """Rows of a slice to one expert worker and home, in seconds; `number` counts the messages of their link."""

    where: str
    link: tuple[int, int]
    number: int
    after: str
    posted: float
    there: float
    start: float
    end: float
    back: float

    @property
    def combine(self) -> str:
        return f"combine {self.where}"


@dataclass(frozen=True)
class _Step:
    """Names of the tasks of a recorded step, and of those on links by layer."""

    worker: int
    first: str
    last: str
    on_links: tuple[tuple[str, ...], ...]


class _Assembly:
    def __init__(self, logs: Sequence[WorkerLog], split: EngineSplit, plan: InferencePlan) -> None:
        self._split, self._plan = split, plan
        self._offsets = clock_offsets(logs, split)
        self._answers = _answers(logs, split)
        self._passes: list[tuple[int, PassLog]] = []
        self._num_dropped = sum(log.num_dropped for log in logs)
        for worker, log in enumerate(logs[: split.attention]):
            for passed in log.passes:
                messages = [message for layer in passed.layers for message in layer.messages]
                if all((worker, message.worker, message.number) in self._answers for message in messages):
                    self._passes.append((worker, passed))
                else:
                    self._num_dropped += 1
        self._num_layers = max((len(passed.layers) for _, passed in self._passes), default=0)
        self._zero_ns = min((_start_ns(passed) - self._offsets[worker] for worker, passed in self._passes), default=0)
        self._timed: list[tuple[Task, Span]] = []
        self._ways: list[_Way] = []
        self._steps: list[_Step] = []
        self._last: dict[tuple[int, int], tuple[str, ...]] = {}

    def trace(self, planned_step_seconds: float | None) -> RunTrace:
        counts: Counter[tuple[int, int]] = Counter()
        for worker, passed in sorted(self._passes, key=lambda one: _start_ns(one[1])):
            self._add_pass(worker, passed, counts[worker, passed.micro_batch])
            counts[worker, passed.micro_batch] += 1
        self._add_ways()
        self._timed.sort(key=lambda one: (one[1].start_seconds, one[1].end_seconds))
        plan = StreamPlan(tuple(task for task, _ in self._timed))
        measured = Timeline(plan, {task.name: span for task, span in self._timed})
        simulated = simulate(plan)
        return RunTrace(measured, simulated, self._summary(measured, simulated, planned_step_seconds))

    def _add_pass(self, worker: int, passed: PassLog, step: int) -> None:
        first_layer = step * (self._num_layers + 1)
        before = self._last.get((worker, passed.micro_batch), ())
        on_links: list[tuple[str, ...]] = []

        def place(layer: int) -> str:
            return f"{first_layer + layer}.{passed.micro_batch}"

        for number, layer in enumerate(passed.layers):
            here = place(number)
            attention, shared = self._add_compute(worker, here, layer, before)
            leaves_after = shared if self._plan.shared_first else attention
            ways = [self._way(worker, here, message, leaves_after) for message in layer.messages]
            self._ways += ways
            before = (shared, *(way.combine for way in ways))
            on_links.append(tuple(name for way in ways for name in (f"dispatch {way.where}", way.combine)))
        rest = LayerLog(passed.turn_ns, passed.end_ns, passed.end_ns, passed.end_ns, passed.end_ns)
        _, last = self._add_compute(worker, place(self._num_layers), rest, before)
        first = f"attention {place(0 if passed.layers else self._num_layers)}{self._of(worker)}"
        self._last[worker, passed.micro_batch] = (last,)
        self._steps.append(_Step(worker, first, last, tuple(on_links)))

    def _add_compute(self, worker: int, here: str, layer: LayerLog, before: tuple[str, ...]) -> tuple[str, str]:
        """Add the tasks of a layer on the attention stream; returns their names."""
        stream, end = ATTENTION + self._of(worker).replace("@", ""), self._of(worker)
        attention, shared = f"attention {here}{end}", f"shared {here}{end}"
        at = [
            self._seconds(worker, moment)
            for moment in (layer.turn_ns, layer.attention_end_ns, layer.shared_start_ns, layer.shared_end_ns)
        ]
        for name, start, until, after in ((attention, at[0], at[1], before), (shared, at[2], at[3], (attention,))):
            self._timed.append((Task(name, stream, until - start, after), Span(stream, start, until)))
        return attention, shared

    def _way(self, worker: int, here: str, message: MessageLog, after: str) -> _Way:
        answer, rank = self._answers[worker, message.worker, message.number], self._split.attention + message.worker
        return _Way(
            f"{here}.{message.slice}{self._of(worker, message.worker)}",
            (worker, message.worker),
            message.number,
            after,
            self._seconds(worker, message.posted_ns),
            self._seconds(rank, answer.arrived_ns),
            self._seconds(rank, answer.start_ns),
            self._seconds(rank, answer.end_ns),
            self._seconds(worker, message.arrived_ns),
        )

    def _add_ways(self) -> None:
        """Add the tasks of links and expert workers. A link carries one message at a time, in the order of sending."""
        free: dict[str, float] = {}

        def carry(name: str, stream: str, posted: float, there: float, after: str) -> None:
            start = max(posted, free.get(stream, posted))
            free[stream] = end = max(start, there)
            self._timed.append((Task(name, stream, end - start, (after,)), Span(stream, start, end)))

        for way in sorted(self._ways, key=lambda way: (way.link, way.number)):
            link, worker = self._of(*way.link), self._of(None, way.link[1])
            dispatch, experts = f"dispatch {way.where}", f"experts {way.where}"
            carry(dispatch, DISPATCH + link.replace("@", ""), way.posted, way.there, way.after)
            task = Task(experts, EXPERTS + worker.replace("@", ""), way.end - way.start, (dispatch,))
            self._timed.append((task, Span(task.stream, way.start, way.end)))
            carry(way.combine, COMBINE + link.replace("@", ""), way.end, way.back, experts)

    def _summary(self, measured: Timeline, simulated: Timeline, planned_step_seconds: float | None) -> TraceSummary:
        exposed = [0.0] * self._num_layers
        for worker in range(self._split.attention):
            computing = _union(
                (span.start_seconds, span.end_seconds)
                for span in measured.spans.values()
                if span.stream.startswith(EXPERTS) or span.stream == ATTENTION + self._of(worker).replace("@", "")
            )
            for step in self._steps:
                if step.worker == worker:
                    for layer, names in enumerate(step.on_links):
                        spans = [measured.spans[name] for name in names]
                        travelling = _union((span.start_seconds, span.end_seconds) for span in spans)
                        exposed[layer] += _outside(travelling, computing)
        makespan = measured.makespan_seconds
        return TraceSummary(
            len(self._steps),
            self._num_dropped,
            makespan,
            self._step_seconds(measured),
            self._step_seconds(simulated),
            planned_step_seconds,
            tuple(seconds / len(self._steps) for seconds in exposed),
            tuple(self._use(rank, makespan) for rank in range(self._split.num_workers)) if self._steps else (),
        )

    def _step_seconds(self, timeline: Timeline) -> float:
        lengths = [
            timeline.spans[step.last].end_seconds - timeline.spans[step.first].start_seconds for step in self._steps
        ]
        return median(lengths) if lengths else 0.0

    def _use(self, rank: int, makespan: float) -> WorkerUse:
        role, number = self._split.role(rank)
        if role == "attention":
            own = [passed for worker, passed in self._passes if worker == number]
            busy_ns = sum(passed.end_ns - passed.turn_ns for passed in own)
            for layer in (layer for passed in own for layer in passed.layers):
                # With shared_first the shared experts lie between the turn and the end of sending.
                busy_ns += layer.sent_ns - layer.turn_ns
                busy_ns += 0 if self._plan.shared_first else layer.shared_end_ns - layer.shared_start_ns
            busy, rows = busy_ns * _SECONDS, sum(passed.num_rows for passed in own)
        else:
            busy = sum(way.end - way.start for way in self._ways if way.link[1] == number)
            rows = sum(
                message.num_rows
                for _, passed in self._passes
                for layer in passed.layers
                for message in layer.messages
                if message.worker == number
            )
        return WorkerUse(role, number, busy, max(0.0, 1 - busy / makespan), rows)

    def _seconds(self, rank: int, moment_ns: int) -> float:
        return (moment_ns - self._offsets[rank] - self._zero_ns) * _SECONDS

    def _of(self, attention: int | None, experts: int | None = None) -> str:
        """End of a name that says which workers it belongs to; empty with one of each role."""
        numbers = [str(number) for number in (attention, experts) if number is not None]
        return "" if self._split.num_workers == 2 else f" @{'-'.join(numbers)}"


def _answers(logs: Sequence[WorkerLog], split: EngineSplit) -> dict[tuple[int, int, int], AnswerLog]:
    """Answers by attention worker, expert worker and number of the message."""
    return {
        (answer.peer, number, answer.number): answer
        for number, log in enumerate(logs[split.attention :])
        for answer in log.answers
    }


def clock_offsets(logs: Sequence[WorkerLog], split: EngineSplit) -> list[int]:
    """Return by rank how far each clock is ahead of the first attention worker's, in nanoseconds.

    Workers on one machine share their clock; a machine that no recorded message connects keeps its own.
    """
    answers = _answers(logs, split)
    fastest: dict[tuple[str, str], tuple[int, int]] = {}
    for worker, log in enumerate(logs[: split.attention]):
        for message in (message for passed in log.passes for layer in passed.layers for message in layer.messages):
            answer = answers.get((worker, message.worker, message.number))
            other = logs[split.attention + message.worker].clock
            if answer is None or other == log.clock:
                continue
            there, back = answer.arrived_ns - message.posted_ns, message.arrived_ns - answer.end_ns
            found = (there + back, (there - back) // 2)
            for pair, offset in (((log.clock, other), found[1]), ((other, log.clock), -found[1])):
                fastest[pair] = min(fastest.get(pair, (found[0], offset)), (found[0], offset))
    known = {logs[0].clock: 0}
    reached = deque(known)
    while reached:
        here = reached.popleft()
        for (one, other), (_, offset) in fastest.items():
            if one == here and other not in known:
                known[other] = known[here] + offset
                reached.append(other)
    return [known.get(log.clock, 0) for log in logs]


def _start_ns(passed: PassLog) -> int:
    return passed.layers[0].turn_ns if passed.layers else passed.turn_ns


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Merge intervals; the result is sorted, and its parts do not touch."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _outside(intervals: Sequence[_Interval], others: Sequence[_Interval]) -> float:
    """Length of the parts of `intervals` that lie in none of `others`, which are sorted and do not overlap."""
    total = 0.0
    for start, end in intervals:
        total += end - start
        at = max(0, bisect_left(others, (start,)) - 1)
        while at < len(others) and others[at][0] < end:
            total -= max(0.0, min(end, others[at][1]) - max(start, others[at][0]))
            at += 1
    return total
