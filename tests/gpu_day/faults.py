"""A small day with planted faults: tiny programs as parts, through the real driver."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.gpu_day.parts import DayPart
from benchmarks.gpu_day.preflight import Findings
from tests.scripts import load_script

__all__ = ["BROKEN", "GOOD", "ROOT", "Ended", "load_tool", "part", "run_day"]

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = f"""
import sys, os, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu_day.record import Report
from benchmarks.kit.isolated_parts import end_with_parent
end_with_parent()
report = Report()
table = lambda name: report.table(f"## {{name}}\\n\\n| a |\\n| --- |\\n| 1 |\\n")
"""
GOOD = "table('good')"
BROKEN = {
    "wrong bits": (
        "table('bits'); report.problem('bits of quantize_blockwise', '(nf4, 64): result 0'); sys.exit(1)",
        "failed in bits of quantize_blockwise",
    ),
    "never ends": ("table('begun'); time.sleep(600)", "killed after 1 s"),
    "never ends and does not listen": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
        "killed after 1 s",
    ),
    "leaves a process that never ends": (
        "import subprocess; subprocess.Popen(['sleep', '600']); table('made'); sys.exit(3)",
        "exit code 3",
    ),
    "segfault": ("table('before'); os.kill(os.getpid(), 11)", "signal 11"),
    "killed for memory": ("os.kill(os.getpid(), 9)", "signal 9"),
    "exception": ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", "exit code 1"),
    "half a table": (
        "table('whole'); sys.stdout.write('@gpu-day {\\x22table\\x22: \\x22## ha'); sys.stdout.flush()",
        "cut off",
    ),
    "not a program": ("", "not started"),
    "prints no table": ("print('hello')", "done"),
}
"""Program of a part, and what the page says of it."""


def load_tool() -> ModuleType:
    """tools/gpu_day.py, as a module."""
    return load_script(ROOT / "tools" / "gpu_day.py")


def part(name: str, program: str, call: int = 1, seconds: float = 20) -> DayPart:
    """A part that runs a program in a bare interpreter."""
    command = [sys.executable, "-S", "-c", PRELUDE + program] if program else ["no-such-program"]
    return DayPart(name, name.capitalize(), seconds, call, lambda _name, _rehearses: command)


@dataclass(frozen=True)
class Ended:
    """What a day left."""

    code: int
    page: str


def run_day(
    tool: ModuleType,
    folder: Path,
    parts: Sequence[DayPart],
    arguments: Sequence[str] = (),
    findings: Findings | None = None,
) -> Ended:
    """Run it on a machine where nothing is missing, or with other findings."""
    report = folder / "report"
    found = findings or Findings(facts={"device": "NVIDIA H200"})
    code = tool.main(["--report", str(report), *arguments], parts, lambda *_: found)
    page = report / "gpu_day.md"
    return Ended(code, page.read_text(encoding="utf-8") if page.is_file() else "")
