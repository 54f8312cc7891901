"""Executes a plan on real streams: runs an action for each task that was simulated.

`execute` issues every task once, in the plan's order, and each stream runs its own in that order. A stream is a thread
(`ThreadStream`), the caller's own thread (`InlineStream`), a CUDA stream (`laconic.moe.parallel.cuda_streams`) or any
other `Stream`. Ranks that execute equal plans start the tasks of a stream in the same order, so a stream may own a
process group and issue its collectives without any further agreement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol
from weakref import finalize

from laconic.errors import ScheduleError
from laconic.schedule.streams import Span, StreamPlan, Timeline

Action = Callable[[], object]


class TaskHandle(Protocol):
    """Handle of a task that a stream has accepted."""

    def wait(self) -> None:
        """Wait for the end of the task, on a device by the current stream; never raises the task's error."""

    def result(self) -> object:
        """The action's return value, or raises its error. On a device the value may still be under way."""

    def span(self) -> tuple[float, float]:
        """Start and end in seconds by `time.perf_counter`. The host waits for the task."""


class Stream(Protocol):
    """Runs one task at a time, in the order of `submit`."""

    def start(self) -> None:
        """Order the tasks of a plan behind everything that the caller has done so far; called once per plan."""

    def submit(self, action: Action, after: Sequence[TaskHandle]) -> TaskHandle:
        """Run `action` when all of `after` and all earlier tasks of this stream have ended."""


@dataclass(frozen=True)
class Execution:
    """A plan that was executed: by task the return value of its action, and its handle.

    `started` is when execution began, by `time.perf_counter`.
    """

    plan: StreamPlan
    results: Mapping[str, object]
    works: Mapping[str, TaskHandle]
    started: float

    @property
    def timeline(self) -> Timeline:
        """When each task ran. Waits for tasks that are still under way on a device."""
        spans = {}
        for name, work in self.works.items():
            start, end = work.span()
            spans[name] = Span(self.plan[name].stream, start - self.started, end - self.started)
        return Timeline(self.plan, spans)


class _Skipped(Exception):
    """A task that was not started because another one had failed."""


def execute(plan: StreamPlan, actions: Mapping[str, Action], streams: Mapping[str, Stream]) -> Execution:
    """Run the tasks of a plan.

    Returns when all of them have ended (on a device: when the caller's current stream waits for all of them). When an
    action raises, no further task is started, those that run are waited for, and the error that comes first in the plan
    is raised.

    Args:
        plan: tasks, streams and order.
        actions: by name of the task, a callable without arguments; actions share data among themselves. Results are
            held until `execute` returns.
        streams: by name of the stream. Two names may share a stream.

    Raises:
        ScheduleError: a task has no action, its stream is missing, or an action is for no task.
    """
    for kind, wanted, given in (
        ("task", [task.name for task in plan.tasks], actions),
        ("stream", plan.streams, streams),
    ):
        if missing := [name for name in wanted if name not in given]:
            raise ScheduleError(f"{kind} {missing[0]!r} of the plan was not given; give one for each of {list(wanted)}")
    if unknown := [name for name in actions if name not in plan]:
        raise ScheduleError(f"an action is given for {unknown[0]!r}, which is no task of the plan")

    failed = threading.Event()
    works: dict[str, TaskHandle] = {}
    started = time.perf_counter()
    try:
        for stream in {id(streams[name]): streams[name] for name in plan.streams}.values():
            stream.start()
        for task in plan.in_order():
            after = [works[name] for name in task.after]
            works[task.name] = streams[task.stream].submit(_guarded(actions[task.name], failed), after)
        for work in works.values():
            work.wait()
    except BaseException:
        failed.set()  # for example Ctrl-C while waiting: tasks that have not started are skipped
        raise
    results: dict[str, object] = {}
    for task in plan.in_order():
        try:
            results[task.name] = works[task.name].result()
        except _Skipped:
            continue  # another task raises the cause
    return Execution(plan, results, works, started)


def _guarded(action: Action, failed: threading.Event) -> Action:
    def guarded() -> object:
        if failed.is_set():
            raise _Skipped
        try:
            return action()
        except BaseException:
            failed.set()
            raise

    return guarded


class _HostTask:
    """A task that a thread runs."""

    def __init__(self) -> None:
        self._future: Future[object] = Future()
        self._span = (0.0, 0.0)

    def run(self, action: Action, after: Sequence[TaskHandle]) -> None:
        for work in after:
            work.wait()
        start = time.perf_counter()
        try:
            result = action()
        except BaseException as error:
            self._span = (start, time.perf_counter())
            self._future.set_exception(error)
        else:
            self._span = (start, time.perf_counter())
            self._future.set_result(result)

    def wait(self) -> None:
        self._future.exception()

    def result(self) -> object:
        return self._future.result()

    def span(self) -> tuple[float, float]:
        self.wait()
        return self._span


class InlineStream:
    """The caller's own thread: `submit` returns when the task has ended."""

    def start(self) -> None:
        """Does nothing: tasks run in the caller's thread."""
        pass

    def submit(self, action: Action, after: Sequence[TaskHandle]) -> TaskHandle:
        """Run `action` now; `after` are waited for first."""
        work = _HostTask()
        work.run(action, after)
        return work


_Item = tuple[_HostTask, Action, Sequence[TaskHandle], AbstractContextManager[object]]


class ThreadStream:
    """A thread of its own, which lives until `close` or until the stream is garbage collected.

    `around` is called in the caller's thread for every task; the context manager that it returns is entered around the
    action in the stream's thread. It carries thread-local state, such as torch's grad mode.
    """

    def __init__(
        self, name: str = "laconic-stream", around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._around = around
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._items,), name=name, daemon=True)
        thread.start()
        self._close = finalize(self, _stop, self._items, thread)

    def start(self) -> None:
        """Does nothing: the thread takes tasks from its queue."""
        pass

    def submit(self, action: Action, after: Sequence[TaskHandle]) -> TaskHandle:
        """Queue `action`; the thread waits for `after` first. A closed stream refuses it."""
        if not self._close.alive:
            raise ScheduleError("the stream is closed; make a new ThreadStream")
        work = _HostTask()
        self._items.put((work, action, tuple(after), self._around()))
        return work

    def close(self) -> None:
        """End the thread, after the tasks in its queue."""
        self._close()

    def __enter__(self) -> ThreadStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(items: SimpleQueue[_Item | None]) -> None:
    while (item := items.get()) is not None:
        work, action, after, around = item

        def entered(action: Action = action, around: AbstractContextManager[object] = around) -> object:
            with around:
                return action()

        work.run(entered, after)
        del item, work, action, after, around, entered  # frees what the action closes over


def _stop(items: SimpleQueue[_Item | None], thread: threading.Thread) -> None:
    items.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=5)  # do not wait longer for a task that hangs
