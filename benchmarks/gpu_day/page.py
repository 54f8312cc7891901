"""The result of the day as one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_day.journal import Attempt, Journal
from benchmarks.gpu_day.parts import DayPart
from benchmarks.gpu_day.predictions import Comparison, compare

REHEARSED = "Rehearsal on the CPU: no device measured this."
"""Stands under every table of a rehearsal."""


def comparisons(journal: Journal) -> list[Comparison]:
    """Predictions beside what parts measured; a rehearsal measures nothing."""
    measured: dict[str, tuple[float, str]] = {}
    device = ""
    for attempt in journal.attempts.values():
        if not attempt.call.get("rehearses"):
            device = device or attempt.call.get("facts", {}).get("device", "")
            measured |= attempt.figures
    return compare(measured, device)


def failures(journal: Journal, parts: Sequence[DayPart]) -> list[str]:
    """All that keeps the day from having ended well, one line each; parts that no call has run yet are not among it."""
    found = []
    for part in parts:
        attempt = journal.attempts.get(part.name)
        if attempt is not None and (result := _result(attempt)) != "done":
            found.append(f"{part.name}: {result}")
    found += [
        f"predicted {one.predicted:g} {one.unit}, measured {one.measured:.4g}, not explained: {one.name}"
        for one in comparisons(journal)
        if one.lacks_explanation
    ]
    if journal.lost:
        found.append(f"the journal could not be written: {journal.lost}")
    return found


def render(journal: Journal, parts: Sequence[DayPart]) -> str:
    """The page: how each part ended, predictions beside figures, then the tables of each part."""
    is_rehearsal = any(call.get("rehearses") for call in journal.calls)
    title = "Rehearsal of the first hour on a GPU" if is_rehearsal else "The first hour on a GPU"
    lines = [f"# {title}", ""]
    if is_rehearsal:
        lines += ["**No device measured anything on this page.** Times are those of tiny sizes on the CPU.", ""]
    for number, call in enumerate(journal.calls, 1):
        facts = ", ".join(f"{name} {value}" for name, value in call.get("facts", {}).items() if value)
        lines += [f"{number}. `{call.get('command', '')}`, {call.get('date', '')}: {facts}"]
        lines += [f"    - {note}" for note in call.get("notes", ())]
    if journal.is_cut:
        lines += ["", "A line of the journal was cut off in writing; what it held is missing here."]
    if journal.lost:
        lines += ["", f"The journal could not be written ({journal.lost}): a later call does not know these tables."]
    lines += ["", *_overview(journal, parts), "", *_compared(comparisons(journal), is_rehearsal)]
    for number, part in enumerate(parts, 1):
        lines += ["", f"## {number}. {part.title}", ""]
        lines += _of_part(journal.attempts.get(part.name))
    return "\n".join(lines).rstrip() + "\n"


def _overview(journal: Journal, parts: Sequence[DayPart]) -> list[str]:
    rows = []
    for part in parts:
        attempt = journal.attempts.get(part.name)
        result = "not run" if attempt is None else _result(attempt)
        took = "" if attempt is None or attempt.seconds is None else f"{attempt.seconds:.0f} s"
        rows.append(f"| {part.name} | {took} | {len(attempt.tables) if attempt else 0} | {result} |")
    return ["| part | took | tables | result |", "|---|---|---|---|", *rows]


def _result(attempt: Attempt) -> str:
    if not attempt.has_ended:
        return "cut off: the call ended while it ran"
    if attempt.problems:
        sections = ", ".join(dict.fromkeys(section for section, _ in attempt.problems))
        how = f" ({attempt.failure.splitlines()[0]})" if attempt.failure else ""
        return f"failed in {sections}{how}"
    return attempt.failure.splitlines()[0] if attempt.failure else "done"


def _compared(found: Sequence[Comparison], is_rehearsal: bool) -> list[str]:
    lines = ["## Predicted beside measured", ""]
    if not found:
        return [*lines, "No prediction is for this device."]
    lines += ["| | predicted | measured | ratio | explanation |", "|---|---|---|---|---|"]
    for one in found:
        measured = "not measured" if one.measured is None else f"{one.measured:.4g} {one.unit}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        said = "**not explained**" if one.lacks_explanation else one.explanation if one.is_off else ""
        lines.append(f"| {one.name} | {one.predicted:.4g} {one.unit} | {measured} | {ratio} | {said} |")
    sources = ", ".join(sorted({one.source for one in found}))
    lines += ["", f"Predictions: benchmarks/results/{sources}."]
    return [*lines, "", REHEARSED] if is_rehearsal else lines


def _of_part(attempt: Attempt | None) -> list[str]:
    if attempt is None:
        return ["Not run."]
    lines: list[str] = []
    for markdown in attempt.tables.values():
        lines += [markdown.rstrip().replace("## ", "### ", 1), ""]
        if attempt.call.get("rehearses"):
            lines += [REHEARSED, ""]
    for section, reason in attempt.problems:
        lines += [f"### {section}: failed", "", "```", reason, "```", ""]
    if not attempt.has_ended:
        lines += ["Cut off: the call ended while this part ran.", ""]
    elif attempt.failure and not attempt.problems:
        lines += ["### Failed", "", "```", attempt.failure, "```", ""]
    elif not lines:
        lines += ["No table.", ""]
    return lines
