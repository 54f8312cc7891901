"""Timelines as pictures: one row per stream, one bar per task, the critical path outlined.

HTML is one file that loads nothing else; a PNG needs matplotlib (`pip install 'laconic[plots]'`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path

from laconic.errors import ScheduleError
from laconic.schedule.streams import Span, Task, Timeline
from laconic.schedule.trace import named

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6", "#bab0ac")
_WIDTH, _LEFT, _ROW, _TOP = 1000, 150, 30, 60  # pixels
_LETTER = 7  # approximate width of a letter in pixels


@dataclass(frozen=True)
class _Bar:
    """A task in a row of the picture; rows count from the top."""

    row: int
    task: Task
    span: Span
    kind: str
    critical: bool


def save_gantt(timelines: Timeline | Mapping[str, Timeline], path: str | Path, title: str = "") -> None:
    """Write a chart: HTML if the name ends so, otherwise PNG or whatever else matplotlib makes of the ending.

    Several timelines, by name, are drawn below each other on one time axis. ScheduleError: matplotlib is missing or
    does not know the ending, or the file cannot be written.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in (".html", ".htm"):
            path.write_text(gantt_html(timelines, title), encoding="utf-8")
        else:
            _save_figure(timelines, path, title)
    except (ValueError, OSError) as error:
        raise ScheduleError(f"chart is {str(path)!r}, but it cannot be written: {error}") from error


def gantt_html(timelines: Timeline | Mapping[str, Timeline], title: str = "") -> str:
    """Draw the chart as an HTML page; the tooltip of a bar has the task's name, its times and its prerequisites."""
    rows, bars, whole = _layout(timelines)
    unit, scale = _unit(whole)
    pixels = (_WIDTH - _LEFT - 20) / whole if whole else 0.0
    bottom = _TOP + _ROW * len(rows)
    colors = _colors(bars)
    parts = [f'<text x="{_LEFT}" y="20" class="title">{escape(title)}</text>']
    at = float(_LEFT)
    for kind, color in colors.items():
        parts.append(f'<rect x="{at:g}" y="32" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{at + 16:g}" y="42">{escape(kind)}</text>')
        at += 30 + _LETTER * len(kind)
    for tick in range(6):
        x = _LEFT + whole * pixels * tick / 5
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{whole * scale * tick / 5:.3g}</text>')
    parts.append(f'<text x="{_WIDTH - 20}" y="{bottom + 32}" text-anchor="end">{unit}</text>')
    for row, name in enumerate(rows):
        parts.append(f'<text x="{_LEFT - 8}" y="{_TOP + _ROW * row + 19}" text-anchor="end">{escape(name)}</text>')
    for bar in bars:
        x, width = _LEFT + bar.span.start_seconds * pixels, bar.span.seconds * pixels
        y = _TOP + _ROW * bar.row + 4
        edge = ' stroke="#000" stroke-width="1.5"' if bar.critical else ""
        lines = [
            bar.task.name,
            f"{bar.span.start_seconds * scale:.4g} to {bar.span.end_seconds * scale:.4g} {unit}",
            f"after {', '.join(bar.task.after)}" if bar.task.after else "",
            "on the critical path" if bar.critical else "",
        ]
        parts.append(
            f'<g><title>{escape(chr(10).join(filter(None, lines)))}</title><rect x="{x:.2f}" y="{y}" '
            f'width="{max(width, 0.5):.2f}" height="{_ROW - 8}" fill="{colors[bar.kind]}"{edge}/>'
        )
        label = next((one for one in (bar.task.name, _number(bar.task.name)) if one and _fits(one, width)), "")
        if label:
            parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{escape(label)}</text>')
        parts.append("</g>")
    style = "svg{font:12px sans-serif;background:#fff}.title{font-size:15px;font-weight:bold}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title or "timeline")}</title>'
        f"<style>{style}</style></head><body>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 40}" width="{_WIDTH}">\n'
        + "\n".join(parts)
        + "\n</svg>\n</body></html>\n"
    )


def _save_figure(timelines: Timeline | Mapping[str, Timeline], path: Path, title: str) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError(f"a PNG chart needs matplotlib ({error}): pip install 'laconic[plots]'") from error
    rows, bars, whole = _layout(timelines)
    unit, scale = _unit(whole)
    colors = _colors(bars)
    figure = Figure(figsize=(12, 1.8 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    inches = 9.0  # approximate width that the bars have
    for bar in bars:
        start, width = bar.span.start_seconds * scale, bar.span.seconds * scale
        axes.barh(
            bar.row,
            width,
            left=start,
            height=0.7,
            color=colors[bar.kind],
            edgecolor="black" if bar.critical else "white",
            linewidth=1.2 if bar.critical else 0.4,
        )
        room = bar.span.seconds / whole * inches * 72 if whole else 0.0  # in points
        label = next((one for one in (bar.task.name, _number(bar.task.name)) if one and _fits(one, room)), "")
        if label:
            axes.text(start + width / 2, bar.row, label, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), labels=rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, whole * scale or 1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    patches = [Patch(color=color, label=kind) for kind, color in colors.items()]
    if patches:
        axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=6, frameon=False)
    figure.savefig(path, dpi=150)


def _layout(timelines: Timeline | Mapping[str, Timeline]) -> tuple[list[str], list[_Bar], float]:
    """Names of the rows, the bars, and the seconds that the axis shows."""
    rows: list[str] = []
    bars: list[_Bar] = []
    by_name = named(timelines)
    for title, timeline in by_name.items():
        first = len(rows)
        place = {stream: first + number for number, stream in enumerate(timeline.plan.streams)}
        rows += [f"{title}: {stream}" if title else stream for stream in place]
        critical = set(timeline.critical_path())
        for task in timeline.plan.tasks:
            span = timeline.spans[task.name]
            bars.append(_Bar(place[task.stream], task, span, _kind(task.name), task.name in critical))
    return rows, bars, max((timeline.makespan_seconds for timeline in by_name.values()), default=0.0)


def _kind(name: str) -> str:
    """The task's name without its numbers: `dispatch 0` and `dispatch 0.1.2` are a `dispatch`, `1F7` an `F`."""
    return " ".join(re.sub(r"[\d.]*\d", " ", name).split()) or name


def _number(name: str) -> str:
    found: list[str] = re.findall(r"\d+", name)
    return found[-1] if found else ""


def _fits(label: str, width: float) -> bool:
    return _LETTER * len(label) <= width


def _colors(bars: list[_Bar]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(bar.kind for bar in bars), cycle(_COLORS), strict=False))


def _unit(seconds: float) -> tuple[str, float]:
    """Choose the unit of time for an axis of `seconds`, and how many of it a second has."""
    for unit, scale in (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6)):
        if seconds * scale >= 1:
            return unit, scale
    return ("microseconds", 1e6) if seconds else ("seconds", 1.0)
