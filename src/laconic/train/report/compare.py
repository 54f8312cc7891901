"""`laconic compare`: runs side by side, as a table in the terminal and a page for the browser."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from laconic.errors import DataError
from laconic.train.report.html import render_page
from laconic.train.report.run_reader import load_runs
from laconic.train.report.side_by_side import as_data, config_differences, summary_rows, text_table

__all__ = ["compare"]


def compare(
    run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = "report.html", *, as_json: bool = False
) -> str:
    """Compare runs with the first of `run_dirs`: returns a text table, or JSON, and writes the HTML report `out`.

    The report is one file without references to anything outside it. Files missing inside a run show as "-" and are
    named under the table.

    Raises:
        DataError: a directory is no run, or `out` cannot be written.
    """
    runs = load_runs(run_dirs)
    rows = summary_rows(runs)
    differences = config_differences(runs)
    page = render_page(runs, rows, differences)
    try:
        Path(out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the report {os.fspath(out)}: {error.strerror}") from None
    if as_json:
        return json.dumps({**as_data(runs, rows, differences), "report": os.fspath(out)}, indent=1, allow_nan=False)
    return text_table(runs, rows, differences)
