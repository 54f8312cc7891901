"""Charts and traces show every task where and when it ran."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from laconic.errors import ScheduleError
from laconic.schedule import make_schedule
from laconic.schedule.execute import InlineStream, execute
from laconic.schedule.gantt import gantt_html, save_gantt
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes, pipeline_plan
from laconic.schedule.streams import StreamPlan, Task, Timeline, simulate
from laconic.schedule.trace import chrome_trace, save_trace

_MS = ChunkTime(1e-4, 2e-3)
_PLAN = pipeline_plan(LayerTimes(_MS, _MS * 3, _MS, _MS, _MS), 3, 5e-4)


def _timelines() -> dict[str, Timeline]:
    inline = InlineStream()
    ran = execute(_PLAN, {task.name: int for task in _PLAN.tasks}, dict.fromkeys(_PLAN.streams, inline))
    return {"predicted": simulate(_PLAN), "measured": ran.timeline}


def test_a_trace_has_every_task_in_microseconds(tmp_path: Path) -> None:
    timelines = _timelines()
    save_trace(timelines, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(timelines)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for pid, timeline in enumerate(timelines.values()):
        events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]
        assert {event["name"] for event in events} == {task.name for task in _PLAN.tasks}
        for event in events:
            span = timeline.spans[event["name"]]
            assert named[pid, event["tid"]] == span.stream
            assert event["ts"] == pytest.approx(span.start_seconds * 1e6)
            assert event["dur"] == pytest.approx(span.seconds * 1e6)
        assert {event["name"] for event in events if event["args"]["critical"]} == set(timeline.critical_path())


def test_arrows_of_a_trace_lead_forward_to_other_streams() -> None:
    events = chrome_trace(simulate(_PLAN))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    waits = [(name, task.name) for task in _PLAN.tasks for name in task.after]
    assert starts.keys() == ends.keys()
    assert len(starts) == len(waits)  # every step of the layer is on another stream than the one before
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] * (1 + 1e-12)
        assert start["tid"] != ends[number]["tid"]


def test_a_page_has_a_bar_for_every_task_at_its_place() -> None:
    timelines = _timelines()
    page = gantt_html(timelines, "a <layer> & its wires")
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    space = "{http://www.w3.org/2000/svg}"
    bars: dict[str, list[ElementTree.Element]] = {}
    for group in svg.iter(f"{space}g"):
        title, rect = group.find(f"{space}title"), group.find(f"{space}rect")
        assert title is not None
        assert title.text is not None
        assert rect is not None
        bars.setdefault(title.text.splitlines()[0], []).append(rect)
    assert bars.keys() == {task.name for task in _PLAN.tasks}
    predicted = timelines["predicted"]
    pixels = 830 / max(timeline.makespan_seconds for timeline in timelines.values())
    for name, (rect, _) in bars.items():
        assert float(rect.attrib["x"]) == pytest.approx(150 + predicted.spans[name].start_seconds * pixels, abs=0.01)
        assert float(rect.attrib["width"]) == pytest.approx(predicted.spans[name].seconds * pixels, abs=0.01)
        assert ("stroke" in rect.attrib) == (name in predicted.critical_path())
    assert "a &lt;layer&gt; &amp; its wires" in page
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)  # nothing else to load


def test_files_are_written_by_their_ending(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = make_schedule("interleaved-1f1b", 2, 4, 2).simulate(1.0, 2.0, 0.1)
    save_gantt(timeline, tmp_path / "x.html", "1F1B")
    save_gantt({"one": timeline, "two": simulate(_PLAN)}, tmp_path / "x.png", "both")
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_plans_without_time_or_tasks_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, tasks in enumerate([(), (Task("x", "a", 0.0),)]):
        for ending in ("html", "png"):
            save_gantt(simulate(StreamPlan(tasks)), tmp_path / f"{number}.{ending}")
            assert (tmp_path / f"{number}.{ending}").stat().st_size > 0


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = simulate(_PLAN)
    for save in (save_gantt, save_trace):
        with pytest.raises(ScheduleError, match="it cannot be written"):
            save(timeline, tmp_path / "nowhere" / "x.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ScheduleError, match=r"needs matplotlib .*laconic\[plots\]"):
        save_gantt(timeline, tmp_path / "x.png")


def test_tasks_of_all_layers_and_slices_share_a_colour() -> None:
    plan = StreamPlan(
        (
            Task("dispatch 0.1.2", "link", 1.0),
            Task("dispatch 10.0.1", "link", 1.0),
            Task("1F7", "device", 1.0),
        )
    )
    html = gantt_html(simulate(plan))
    assert "dispatch<" in html.replace("</", "<")
    assert "dispatch ." not in html
