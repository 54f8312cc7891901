"""Plans of tasks on streams: refused when they cannot run, simulated exactly, explained by path and slack."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import ScheduleError
from laconic.schedule import streams
from laconic.schedule.streams import StreamPlan, Task, simulate


@st.composite
def plans(draw: st.DrawFn, max_tasks: int = 12) -> StreamPlan:
    """Plans with whole seconds, in which tasks wait for earlier and (where that works) for later issued tasks."""
    count = draw(st.integers(1, max_tasks))
    rank = draw(st.permutations(range(count)))  # a hidden order that every dependency respects
    tasks = []
    for number in range(count):
        after = draw(st.lists(st.sampled_from(range(count)), max_size=3))
        names = tuple(dict.fromkeys(f"t{one}" for one in after if rank[one] < rank[number]))
        tasks.append(Task(f"t{number}", draw(st.sampled_from("abc")), draw(st.integers(0, 4)), names))
    by_stream = [one for _, one in sorted(zip(rank, tasks, strict=True), key=lambda pair: pair[0])]
    places: dict[str, list[Task]] = {}
    for task in by_stream:
        places.setdefault(task.stream, []).append(task)
    mixed = []
    while places:  # issue order: streams in any interleaving
        stream = draw(st.sampled_from(sorted(places)))
        mixed.append(places[stream].pop(0))
        if not places[stream]:
            del places[stream]
    return StreamPlan(tuple(mixed))


def _second_by_second(plan: StreamPlan) -> dict[str, tuple[int, int]]:
    """The same by a clock that ticks: slow, and without any graph."""
    queues = {stream: [task for task in plan.tasks if task.stream == stream] for stream in plan.streams}
    spans: dict[str, tuple[int, int]] = {}
    for now in range(200):
        moved = True
        while moved:
            moved = False
            for stream, queue in queues.items():
                running = [name for name, (_, end) in spans.items() if plan[name].stream == stream and end > now]
                if queue and not running and all(name in spans and spans[name][1] <= now for name in queue[0].after):
                    task = queue.pop(0)
                    spans[task.name] = now, now + int(task.seconds)
                    moved = True
    return spans


@given(plans())
def test_the_simulation_is_that_of_a_ticking_clock(plan: StreamPlan) -> None:
    found = {name: (span.start_seconds, span.end_seconds) for name, span in simulate(plan).spans.items()}
    assert found == _second_by_second(plan)


@given(plans())
def test_the_critical_path_is_as_long_as_the_makespan(plan: StreamPlan) -> None:
    timeline = simulate(plan)
    path = timeline.critical_path()
    assert sum(plan[name].seconds for name in path) == timeline.makespan_seconds
    for before, after in pairwise(path):
        assert before in plan[after].after or plan[before].stream == plan[after].stream
        assert timeline.spans[before].end_seconds == timeline.spans[after].start_seconds


@given(plans(), st.integers(0, 30), st.integers(0, 100))
def test_slack_is_what_a_task_can_take_longer(plan: StreamPlan, longer: int, which: int) -> None:
    timeline = simulate(plan)
    task = plan.tasks[which % len(plan)]
    slack = timeline.slack_seconds(task.name)
    later = simulate(plan.timed({task.name: task.seconds + longer})).makespan_seconds
    assert later == timeline.makespan_seconds + max(0, longer - slack)


@given(plans())
def test_busy_and_order_and_json_hold_for_every_plan(plan: StreamPlan) -> None:
    timeline = simulate(plan)
    assert sum(map(timeline.busy_seconds, plan.streams)) == sum(task.seconds for task in plan.tasks)
    seen: set[str] = set()
    for task in plan.in_order():
        assert seen.issuperset(task.after)
        seen.add(task.name)
    assert StreamPlan.from_json(plan.to_json()) == plan
    assert seen == {task.name for task in plan.tasks}


def test_an_order_that_works_is_kept() -> None:
    plan = StreamPlan(tuple(Task(str(n), random.Random(n).choice("ab"), 1.0) for n in range(20)))
    assert plan.in_order() == plan.tasks


def test_a_task_may_wait_for_one_that_is_issued_later() -> None:
    plan = StreamPlan((Task("first", "a", 1.0, ("second",)), Task("second", "b", 2.0)))
    assert simulate(plan).spans["first"].start_seconds == 2.0
    assert [task.name for task in plan.in_order()] == ["second", "first"]


def test_an_empty_plan_takes_no_time() -> None:
    timeline = simulate(StreamPlan(()))
    assert (timeline.makespan_seconds, timeline.critical_path(), timeline.busy_seconds("a")) == (0.0, (), 0)


_A = Task("x", "a", 1.0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((_A, _A), r"task 'x' is in the plan twice"),
        ((replace(_A, after=("y",)),), r"task 'x' waits for 'y', which is no task"),
        ((replace(_A, seconds=-1.0),), r"seconds of task 'x' are -1.0, but must be finite and >= 0"),
        ((replace(_A, seconds=float("nan")),), r"seconds of task 'x' are nan"),
        ((replace(_A, after=("x",)),), r"cannot go on: a at x"),
        ((Task("1", "a", 1, ("2",)), Task("2", "a", 1)), r"cannot go on: a at 1 wait"),
        (
            (Task("1", "a", 1, ("4",)), Task("2", "a", 1), Task("3", "b", 1, ("2",)), Task("4", "b", 1)),
            "a at 1, b at 3",
        ),
    ],
)
def test_what_cannot_run_is_refused(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        StreamPlan(tasks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-5], r"is no JSON"),
        (
            lambda text: text.replace('"version": 1', '"version": 1, "loops": 2'),
            "has 'loops', but it may have",
        ),
        (lambda text: text.replace('"version": 1', '"version": 2'), r"no laconic stream plan of version 1"),
        (lambda text: text.replace('"stream": "a"', '"stream": 3'), r"is no task: it must have name, stream"),
        (lambda text: text.replace('"seconds": 1.0', '"seconds": true'), r"is no task"),
        (lambda text: text.replace('"seconds": 1.0', '"seconds": NaN'), r"must be finite"),
        (lambda text: text.replace('"after": []', '"after": "b"'), r"is no task"),
        (lambda text: text.replace('"after": []', '"before": []'), r"is no task"),
    ],
)
def test_a_damaged_file_is_refused(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        StreamPlan.from_json(change(StreamPlan((_A,)).to_json()))


def test_seconds_for_no_task_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"given for 'y', which is no task"):
        StreamPlan((_A,)).timed({"y": 1.0})


def test_the_example_of_the_module_holds() -> None:
    import doctest

    assert doctest.testmod(streams).failed == 0
    assert doctest.testmod(streams).attempted >= 3
