"""Every notebook of examples/ runs, top to bottom, and stores small outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedPython
from tests.distributed.processes import ROOT, environment
from tests.patience import patient

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_notebooks_are_small_and_show_what_they_print() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert path.stat().st_size < 60_000, path
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]), path
        assert "/" + "home" not in path.read_text()


@pytest.mark.slow
def test_notebooks_run(tmp_path: Path) -> None:
    before = [path.read_text() for path in NOTEBOOKS]
    process = ForkedPython(
        [sys.executable, "-m", "tools.notebooks"],
        cwd=tmp_path,
        env=environment(PYTHONWARNINGS="ignore"),
        stdout=-1,
        stderr=-1,
    )
    _, error = process.communicate(timeout=patient(240))
    assert process.returncode == 0, error
    assert [path.read_text() for path in NOTEBOOKS] == before
