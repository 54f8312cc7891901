"""`laconic compare`: runs side by side, as a table in the terminal and a page for the browser.

The page is the template, style and scripts beside this file, filled with one JSON object.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import laconic
from laconic.errors import DataError
from laconic.train.report.charts import experts_chart, left_out, sites_chart, timeline_chart
from laconic.train.report.run_reader import Run, last_common_step, load_runs
from laconic.train.report.side_by_side import Row, as_data, config_differences, summary_rows, text_table

_MAX_POINTS = 1000
_SMOOTHING = 25  # curves are means over this share of their points
_SCRIPTS = ("page.js", "page_charts.js", "page_maps.js")

Points = list[tuple[int, float]]


def compare(
    run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = "report.html", *, as_json: bool = False
) -> str:
    """Compare runs with the first of `run_dirs`: returns a text table, or JSON, and writes the HTML report `out`.

    The report is one file without references to anything outside it. Files missing inside a run show as "-" and are
    named under the table.
    """
    runs = load_runs(run_dirs)
    rows = summary_rows(runs)
    differences = config_differences(runs)
    page = _page(runs, rows, differences)
    try:
        Path(out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the report {os.fspath(out)}: {error.strerror}") from None
    if as_json:
        return json.dumps({**as_data(runs, rows, differences), "report": os.fspath(out)}, indent=1, allow_nan=False)
    return text_table(runs, rows, differences)


def _page(runs: Sequence[Run], rows: Sequence[Row], differences: Sequence[Row]) -> str:
    data = {
        "version": laconic.__version__,
        "verdicts": [_verdict(run, runs[0]) for run in runs[1:]],
        "runs": [_run_data(run, runs[0]) for run in runs],
        "rows": [dataclasses.asdict(row) for row in rows],
        "differences": [dataclasses.asdict(row) for row in differences],
        "units": f"{runs[0].unit if len({run.unit for run in runs}) == 1 else 'token'}s".capitalize(),
        "left_out": left_out(runs),
    }
    parts = {
        "TITLE": escape(f"Run {runs[0].name}" if len(runs) == 1 else "Runs compared"),
        "STYLE": _file("page.css"),
        "TEXT": escape(text_table(runs, rows, differences)),
        # "<" never appears in the data, so no name of a run can close the script element that holds it.
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": "".join(map(_file, _SCRIPTS)),
    }
    # In one pass, so that a run named like a placeholder stays what it is.
    return re.sub("__REPORT_([A-Z]+)__", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return resources.files("laconic.train.report").joinpath(name).read_text("utf-8")


def smooth(points: Points, window: int) -> Points:
    """Mean over about `window` neighbours centred on each (step, value) point, so that nothing lags; fewer at the ends.

    Non-finite values are left out.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    reach = window // 2
    totals = [0.0, *itertools.accumulate(value for _, value in finite)]
    smoothed = []
    for index, (step, _) in enumerate(finite):
        start, stop = max(0, index - reach), min(len(finite), index + reach + 1)
        smoothed.append((step, (totals[stop] - totals[start]) / (stop - start)))
    return smoothed


def downsample(points: Points, limit: int = _MAX_POINTS) -> Points:
    """At most `limit` points: means of equal runs of neighbours, each at the step of its last point."""
    stride = math.ceil(len(points) / limit)
    if stride <= 1:
        return points
    groups = [points[start : start + stride] for start in range(0, len(points), stride)]
    return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def _verdict(run: Run, first: Run) -> str:
    """One sentence on what `run` costs and brings against `first`; of the measures, those that both have."""
    parts = []
    if run.kept_nbytes_per_token is not None and first.kept_nbytes_per_token:
        parts.append(
            f"keeps {run.kept_nbytes_per_token / first.kept_nbytes_per_token * 100:.0f} % of the bytes for backward"
        )
    step = None if run.steps == first.steps else last_common_step([run, first], "validation_loss")
    mine, theirs = (one.validation_loss if step is None else one.until(step).validation_loss for one in (run, first))
    if mine is not None and theirs is not None and (step is not None or run.steps == first.steps):
        change = mine - theirs
        begins = "ends with" if step is None else f"has, after {step} steps,"
        parts.append(f"{begins} a validation loss {abs(change):.4f} {'higher' if change > 0 else 'lower'}")
    if run.tokens_per_second and first.tokens_per_second:
        parts.append(f"trains at {run.tokens_per_second / first.tokens_per_second * 100:.0f} % of the speed")
    if not parts:
        return f"{run.name} and {first.name} have no measure in common."
    return (
        f"Against {first.name}, {run.name} " + ", ".join(parts[:-1]) + (" and " if parts[1:] else "") + parts[-1] + "."
    )


def _run_data(run: Run, first: Run) -> dict[str, Any]:
    losses = run.series("loss")
    smoothed = _smoothed(losses)
    validation = [point for point in run.series("validation_loss") if math.isfinite(point[1])]
    speeds = run.series(f"{run.unit}s_per_second")
    return {
        "name": run.name,
        "path": str(run.path),
        "setting": run.activation_setting,
        "notes": run.notes,
        "loss": downsample(smoothed),
        "raw_loss": downsample([point for point in losses if math.isfinite(point[1])]),
        "validation_loss": validation,
        "loss_gap": [] if run is first else downsample(_gap(smoothed, _smoothed(first.series("loss")))),
        "validation_gap": [] if run is first else _gap(validation, first.series("validation_loss")),
        # The first step pays for warming up and would set the scale of all others.
        "speed": downsample(_smoothed(speeds[1:])),
        "memory": downsample(run.series("memory_nbytes")),
        "peak_memory": downsample(run.series("peak_memory_nbytes")),
        "wire": _sent(run, "wire_nbytes"),
        "wire_raw": [] if run.median("wire_raw_nbytes") == run.median("wire_nbytes") else _sent(run, "wire_raw_nbytes"),
        "sites": sites_chart(run),
        "experts": experts_chart(run),
        "timeline": timeline_chart(run),
        "kept": _kinds(run.activations.get("by_kind_after")),
        "exact": _kinds(run.activations.get("by_kind_before")),
        "exact_dtype": str(run.activations.get("reference_dtype", "exact")),
    }


def _sent(run: Run, field: str) -> Points:
    points = run.series(field)
    return downsample(points) if any(value for _, value in points) else []


def _smoothed(points: Points) -> Points:
    return smooth(points, max(1, len(points) // _SMOOTHING))


def _gap(points: Points, reference: Points) -> Points:
    values = {step: value for step, value in reference if math.isfinite(value)}
    return [(step, value - values[step]) for step, value in points if step in values]


def _kinds(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    kinds = {
        str(kind): float(nbytes) for kind, nbytes in value.items() if isinstance(nbytes, int | float) and nbytes > 0
    }
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
