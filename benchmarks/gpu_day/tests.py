"""Part 2: the tests marked gpu, and those of ops and activations on the device instead of the interpreter.

The tests of activations make their tensors on torch's default device, so `on_device.py` sets that. Some of them mix in
tensors of the CPU, which no device takes: they are counted apart, as tests that are made for the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_day.setting import Setting
from benchmarks.registry import Table

_ROOT = Path(__file__).resolve().parents[2]
_HEADER = ["tests", "passed", "failed", "made for the CPU", "skipped", "s"]


@dataclass(frozen=True)
class _Group:
    """Tests that one pytest runs."""

    name: str
    arguments: Sequence[str]
    """On a device."""
    rehearsed: Sequence[str]
    seconds: float
    workers: int
    is_moved: bool = False
    """Whether the default device is set."""
    has_engine: bool = False
    """Whether it finds the transformers that was brought along for the inference engine."""


def _marked() -> list[str]:
    """Files with a test that is marked; others are not imported, as the machine lacks what they need."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in files if "@pytest.mark.gpu" in path.read_text(encoding="utf-8")]


_ACTIVATIONS = ("functions", "norms", "kept", "gated_products", "blocks", "attention", "witnesses", "replacement")
_GROUPS = (
    _Group(
        "marked gpu",
        ["-m", "gpu", *_marked()],
        ["-m", "gpu", "tests/optim/test_adamw.py", "tests/moe/test_streams.py"],
        40,
        6,
        has_engine=True,
    ),
    _Group("ops", ["-k", "triton", "tests/ops"], ["tests/ops/test_bits.py"], 80, 14),
    _Group(
        "activations, on the default device",
        [f"tests/activations/test_{name}.py" for name in _ACTIVATIONS],
        ["tests/activations/test_small_shapes.py"],
        55,
        10,
        is_moved=True,
    ),
)
"""Their limits are within the part's."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended: "passed", "failed" or "skipped", and its last words if it failed."""

    test: str
    outcome: str
    reason: str = ""

    @property
    def is_made_for_cpu(self) -> bool:
        """Whether it failed because it brings tensors or generators of the CPU to the device, or reads a device's."""
        mixes = ("Expected all tensors to be on the same device", "Expected a 'cuda' device type for generator")
        mixes += ("can't convert cuda", "but expected device", "expects a CPU tensor", "Expected a 'cpu' device")
        return self.outcome == "failed" and any(text in self.reason for text in mixes)


def run(setting: Setting) -> None:
    """One pytest for each group; a table that grows, and what failed."""
    rows: list[list[str]] = []
    for group in _GROUPS:
        with setting.report.section(f"tests {group.name}"):
            outcomes, seconds, ending = _tested(group, setting.rehearses)
            rows.append(_row(group.name, outcomes, seconds))
            setting.table(table_of(rows))
            failed = [one for one in outcomes if one.outcome == "failed" and not one.is_made_for_cpu]
            if failed or ending:
                said = [f"{one.test}: {one.reason}" for one in failed[:30]]
                raise AssertionError("\n".join([*([ending] if ending else []), f"{len(failed)} failed", *said]))


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """The table of all groups so far."""
    return Table("Tests on the device", _HEADER, list(rows), "Counted by test; a group that is killed counts so far.")


def _row(name: str, outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    counts = Counter("made for the CPU" if one.is_made_for_cpu else one.outcome for one in outcomes)
    return [name, *(str(counts[column]) for column in _HEADER[1:5]), f"{seconds:.0f}"]


def _tested(group: _Group, rehearses: bool) -> tuple[list[Outcome], float, str]:
    """Outcomes, seconds, and how pytest ended if not as it should."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_day.on_device"]
        command += ["--timeout", "60", "-W", "default", *(group.rehearsed if rehearses else group.arguments)]
        if not rehearses:
            command += ["-n", str(group.workers), "--dist", "loadfile"]
        environment = os.environ | {"LACONIC_GPU_DAY_OUTCOMES": str(path)}
        if group.has_engine:
            first = [os.environ.get("LACONIC_GPU_DAY_INFERENCE", ""), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, first))
        if group.is_moved:
            environment["LACONIC_GPU_DAY_DEVICE"] = "cpu" if rehearses else "cuda"
            environment.pop("TRITON_INTERPRET", None)
        seconds = group.seconds * (10 if rehearses else 1)
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
            # 1: some failed; 5: none were collected.
            ending = "" if done.returncode in (0, 1) else f"pytest, exit code {done.returncode}: {done.stdout[-800:]}"
        except subprocess.TimeoutExpired:
            ending = f"killed after {seconds:.0f} s"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        outcomes = [Outcome(**json.loads(line)) for line in lines]
    return outcomes, time.monotonic() - started, ending
