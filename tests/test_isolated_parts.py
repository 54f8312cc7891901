"""A benchmark in parts loses only the part that fails, and its report is written as it comes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.kit.isolated_parts import run_parts


@pytest.mark.ci
def test_parts_that_fail_crash_or_hang_cost_their_own_table_only() -> None:
    python = [sys.executable, "-S", "-c"]
    commands = {
        "good": [*python, "print('table 1')"],
        "wrong": [*python, "import sys; print('half'); sys.exit('bits differ')"],
        "crash": [*python, "import os; os.kill(os.getpid(), 11)"],
        "hang": [*python, "import time; print('begun', flush=True); time.sleep(600)"],
        "last": [*python, "print('table 2')"],
    }
    started = time.monotonic()
    parts = {part.name: part for part in run_parts(commands, most_seconds=2, all_seconds=60)}
    assert time.monotonic() - started < 40
    assert list(parts) == list(commands)
    assert (parts["good"].text, parts["good"].failure) == ("table 1\n", "")
    assert parts["last"].render() == "table 2\n"
    assert parts["wrong"].failure == "exit code 1\nbits differ"
    assert parts["wrong"].render() == "half\n## wrong: failed\n\n```\nexit code 1\nbits differ\n```\n"
    assert parts["crash"].failure == "signal 11"
    assert parts["hang"].failure == "killed after 2 s"
    assert parts["hang"].text == "begun\n"


def test_parts_beyond_the_limit_for_all_are_named() -> None:
    commands = {"one": [sys.executable, "-S", "-c", "import time; time.sleep(600)"], "two": ["never-started"]}
    one, two = run_parts(commands, most_seconds=60, all_seconds=0.5)
    assert one.failure.startswith("killed after")
    assert two.failure.startswith("not started")


BENCHMARK = """
import sys
from benchmarks import run
from benchmarks.registry import Table, benchmark

@benchmark("kernels")
def kernels(options):
    if {refuses}:
        raise SystemExit("needs a GPU")
    yield Table("one", ["a"], [["1"]])
    raise SystemExit("two failed")

run.modules = lambda: dict(kernels="json")
sys.exit(run.main(["kernels", "--part", "--threads", "1"]))
"""


@pytest.mark.parametrize("refuses", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_report_keeps_what_came_before_a_failure(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    report.write_text("old\n")
    real = subprocess.Popen

    def part(command: list[str], **options: object) -> subprocess.Popen[str]:
        return real([sys.executable, "-c", BENCHMARK.format(refuses=refuses)], **options)

    monkeypatch.setattr(run.subprocess, "Popen", part)
    assert run.main(["kernels", "--out", str(report)]) == 1
    shown = capfd.readouterr()
    if refuses:
        assert report.read_text() == "old\n"
        assert "needs a GPU" in shown.err
    else:
        assert report.read_text() == shown.out
        assert shown.out.startswith("# Benchmark: kernels\n")
        assert shown.out.endswith("| 1 |\n")
        assert "two failed" in shown.err
