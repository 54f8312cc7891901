"""Timelines as a trace that chrome://tracing and Perfetto open: one process per timeline, one thread per stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.errors import ScheduleError
from laconic.schedule.streams import Timeline

_MICROSECONDS = 1e6


def chrome_trace(timelines: Timeline | Mapping[str, Timeline]) -> dict[str, Any]:
    """Return the trace of one or several timelines, by name, as data for JSON, in the Trace Event Format.

    Every task is a complete event ("X") with its prerequisites; arrows ("s", "f") lead from tasks to those of other
    streams that wait for them. Times are in microseconds.
    """
    events: list[dict[str, Any]] = []
    arrow = 0
    for pid, (title, timeline) in enumerate(named(timelines).items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": title}})
        threads = {stream: number for number, stream in enumerate(timeline.plan.streams)}
        for stream, tid in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        critical = set(timeline.critical_path())
        for task in timeline.plan.tasks:
            span = timeline.spans[task.name]
            here = {"pid": pid, "tid": threads[task.stream], "ts": span.start_seconds * _MICROSECONDS}
            arguments = {"after": list(task.after), "planned_seconds": task.seconds, "critical": task.name in critical}
            events.append(
                {"ph": "X", "name": task.name, "dur": span.seconds * _MICROSECONDS, "args": arguments, **here}
            )
            for name in task.after:
                before = timeline.spans[name]
                if before.stream == task.stream:
                    continue
                arrow += 1
                end = {"pid": pid, "tid": threads[before.stream], "ts": before.end_seconds * _MICROSECONDS}
                line = {"name": "after", "cat": "after", "id": arrow}
                events += [{"ph": "s", **line, **end}, {"ph": "f", "bp": "e", **line, **here}]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(timelines: Timeline | Mapping[str, Timeline], path: str | Path) -> None:
    """Write `chrome_trace` as a JSON file; ScheduleError if it cannot be written."""
    try:
        Path(path).write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"trace is {str(path)!r}, but it cannot be written: {error}") from error


def named(timelines: Timeline | Mapping[str, Timeline]) -> Mapping[str, Timeline]:
    """Timelines by name; a single one has the empty name."""
    return {"": timelines} if isinstance(timelines, Timeline) else timelines
