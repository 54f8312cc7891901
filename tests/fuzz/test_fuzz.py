"""A few seconds of fuzzing in every run; `python -m tests.fuzz.run --seconds 3600` goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.documents import DOCUMENTS
from tests.fuzz.run import fuzz, main
from tests.fuzz.targets import TARGETS, Target
from tests.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_bear_any_bytes(name: str) -> None:
    # Plans refuse most changes, so that few get deep
    max_inputs = 60 if name == "plan" else 150 if name in DOCUMENTS and name != "stream_plan" else 600
    _bears(name, seed=1, max_inputs=max_inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_parsers_bear_any_text(name: str) -> None:
    _bears(name, seed=2, max_inputs=150 if name == "plan" else 1000)


def _bears(name: str, seed: int, max_inputs: int) -> None:
    run = fuzz(name, seed, seconds=200, max_inputs=max_inputs)
    assert run.finding is None
    assert run.num_inputs == max_inputs
    # The fuzzer gets behind the checksums, or it would try nothing but them.
    assert run.num_deep >= max(1, max_inputs // 60)


def test_a_finding_is_kept_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fragile(data: bytes) -> bool:
        return data[3] / (data[2] - 255) < 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TARGETS, "fragile", Target(fragile, lambda: [bytes(8)]))
    assert main(["fragile", "--seconds", "60"]) == 1
    (found,) = tmp_path.glob("fragile_*.bin")
    printed = capsys.readouterr()
    assert found.name in printed.out
    assert "Error" in printed.err
    with pytest.raises((ZeroDivisionError, IndexError)):
        main(["fragile", "--input", str(found)])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
@pytest.mark.parametrize("name", TARGETS)
def test_parsers_bear_what_atheris_finds(name: str) -> None:
    runs = 300 if name in DOCUMENTS else 3000
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.atheris_run", name, f"-runs={runs}", "-max_len=20000"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(250),
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"Done {runs} runs" in result.stderr
