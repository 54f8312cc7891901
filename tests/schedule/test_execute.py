"""Running plans: in order on every stream, after what a task waits for, side by side elsewhere; errors come back."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings

from laconic.errors import ScheduleError
from laconic.schedule.execute import InlineStream, Stream, ThreadStream, execute
from laconic.schedule.streams import StreamPlan, Task
from tests.patience import patient
from tests.schedule.test_streams import plans


@pytest.fixture(scope="module")
def threads() -> Iterator[dict[str, Stream]]:
    with ThreadStream("a") as a, ThreadStream("b") as b, ThreadStream("c") as c:
        yield {"a": a, "b": b, "c": c}


def _check(plan: StreamPlan, streams: dict[str, Stream]) -> None:
    lock, log = threading.Lock(), []

    def action(name: str) -> str:
        with lock:
            log.append(("start", name))
        time.sleep(0)
        with lock:
            log.append(("end", name))
        return name.upper()

    def actions(name: str):  # type: ignore[no-untyped-def]
        return lambda: action(name)

    execution = execute(plan, {task.name: actions(task.name) for task in plan.tasks}, streams)
    assert execution.results == {task.name: task.name.upper() for task in plan.tasks}
    for stream in plan.streams:
        own = [task.name for task in plan.tasks if task.stream == stream]
        assert [name for kind, name in log if kind == "start" and name in own] == own
    for task in plan.tasks:
        for name in task.after:
            assert log.index(("end", name)) < log.index(("start", task.name))
    spans = execution.timeline.spans
    for stream in plan.streams:
        ordered = [spans[task.name] for task in plan.tasks if task.stream == stream]
        assert all(0 <= one.start_seconds <= one.end_seconds for one in ordered)
        assert all(one.end_seconds <= other.start_seconds for one, other in pairwise(ordered))


@settings(max_examples=60)
@given(plans())
def test_every_plan_runs_in_its_order_on_threads(threads: dict[str, Stream], plan: StreamPlan) -> None:
    _check(plan, threads)


@settings(max_examples=30)
@given(plans())
def test_every_plan_runs_in_one_thread_and_on_mixed_streams(threads: dict[str, Stream], plan: StreamPlan) -> None:
    inline = InlineStream()
    _check(plan, {"a": inline, "b": inline, "c": inline})
    _check(plan, {"a": inline, "b": threads["b"], "c": threads["b"]})


def test_streams_work_side_by_side(threads: dict[str, Stream]) -> None:
    """Two tasks that can only end while both run."""
    barrier = threading.Barrier(2, timeout=patient(10))
    plan = StreamPlan((Task("x", "a", 1.0), Task("y", "b", 1.0)))
    assert execute(plan, {"x": barrier.wait, "y": barrier.wait}, threads).timeline.makespan_seconds < 10


def _raise(error: Exception) -> object:
    raise error


@pytest.mark.parametrize("kind", ["threads", "inline"])
def test_an_error_stops_what_has_not_started_and_comes_back(threads: dict[str, Stream], kind: str) -> None:
    streams = threads if kind == "threads" else {name: InlineStream() for name in "abc"}
    ran = []
    plan = StreamPlan(
        (
            Task("ok", "a", 1.0),
            Task("bad", "b", 1.0, ("ok",)),
            Task("later", "c", 1.0, ("bad",)),
            Task("next", "b", 1.0),
        )
    )
    actions = {
        "ok": lambda: ran.append("ok"),
        "bad": lambda: _raise(OSError("wire cut")),
        "later": lambda: ran.append("later"),
        "next": lambda: ran.append("next"),
    }
    with pytest.raises(OSError, match="wire cut"):
        execute(plan, actions, streams)
    assert ran == ["ok"]
    ok = execute(StreamPlan((Task("again", "b", 1.0),)), {"again": lambda: 7}, streams)
    assert ok.results == {"again": 7}  # the streams live on


def test_of_two_errors_the_first_in_the_plan_comes_back(threads: dict[str, Stream]) -> None:
    barrier = threading.Barrier(2, timeout=patient(10))

    def fail(error: Exception) -> object:
        barrier.wait()
        raise error

    plan = StreamPlan((Task("x", "a", 1.0), Task("y", "b", 1.0)))
    actions = {"x": lambda: fail(OSError("first")), "y": lambda: fail(OSError("second"))}
    with pytest.raises(OSError, match="first"):
        execute(plan, actions, threads)


def test_what_belongs_to_a_thread_goes_along() -> None:
    local = threading.local()

    @contextlib.contextmanager
    def carried(value: int) -> Iterator[None]:
        local.value = value
        yield
        del local.value

    local.value = 41
    with ThreadStream(around=lambda: carried(local.value + 1)) as stream:
        plan = StreamPlan((Task("x", "a", 1.0),))
        assert execute(plan, {"x": lambda: local.value}, {"a": stream}).results == {"x": 42}
    assert local.value == 41


def test_a_stream_keeps_nothing_of_its_tasks_and_ends_with_its_owner() -> None:
    class Big:
        pass

    stream, big = ThreadStream("laconic-test"), Big()
    held = weakref.ref(big)
    execute(StreamPlan((Task("x", "a", 1.0),)), {"x": lambda big=big: None}, {"a": stream})
    del big
    for _ in range(100):
        gc.collect()
        if held() is None:
            break
        time.sleep(0.01)
    assert held() is None
    del stream
    gc.collect()
    assert "laconic-test" not in {thread.name for thread in threading.enumerate()}


def test_plans_without_actions_or_streams_are_refused() -> None:
    plan = StreamPlan((Task("x", "a", 1.0),))
    inline = InlineStream()
    with pytest.raises(ScheduleError, match=r"task 'x' of the plan was not given"):
        execute(plan, {}, {"a": inline})
    with pytest.raises(ScheduleError, match=r"stream 'a' of the plan was not given"):
        execute(plan, {"x": int}, {"b": inline})
    with pytest.raises(ScheduleError, match=r"action is given for 'y', which is no task"):
        execute(plan, {"x": int, "y": int}, {"a": inline})
    stream = ThreadStream()
    stream.close()
    with pytest.raises(ScheduleError, match="the stream is closed"):
        execute(plan, {"x": int}, {"a": stream})
