"""Part 8: compute-sanitizer over one call of each kernel, and ncu's counters of the five slowest.

compute-sanitizer --tool memcheck python -m benchmarks.gpu_day.sanitizer       # what it is run over
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu_day.setting import Setting, kernel_of
from benchmarks.registry import Table
from laconic.ops.declarations import OPS
from laconic.ops.self_check import examples

_TOOL_SECONDS = 45
_SLOWEST = 5
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active %",
    "launch__registers_per_thread": "registers",
}
_DEFAULT_SLOWEST = (
    "adamw8bit_multi_",
    "gated_backward_blockwise",
    "sum_blockwise",
    "quantize_blockwise",
    "lossless_encode",
)
"""Where the part `kernels` has measured nothing."""


def run(setting: Setting) -> None:
    """Each tool alone; one that is not there leaves its reason in the table."""
    rows: list[list[str]] = []
    with setting.report.section("one call of each kernel"):
        rows.append(
            ["none", str(call_each(setting.sized(tuple(OPS), tuple(OPS)[:2]), setting.device)), "every call came back"]
        )
        setting.table(_table(rows))
    for check in ("memcheck", "racecheck"):
        with setting.report.section(check):
            rows.append(_sanitized(check, setting.rehearses))
            setting.table(_table(rows))
            if "ERROR" in rows[-1][-1] or "killed" in rows[-1][-1]:
                raise RuntimeError(rows[-1][-1])
    with setting.report.section("ncu"):
        setting.table(_counters_table(setting))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    return Table("One call of each kernel under compute-sanitizer", ["tool", "calls", "what it found"], list(rows))


def call_each(ops: Sequence[str], device: str, only: str = "") -> int:
    """Call the kernels of ops on the first example of each; returns the number of calls."""
    number = 0
    for op in ops:
        if not only or op in only.split(","):
            chosen, _ = next(iter(examples(op)))
            arguments = [
                [x.to(device) for x in one] if isinstance(one, list) else one.to(device) if _is_tensor(one) else one
                for one in OPS[op].example(*chosen)
            ]
            with torch.no_grad():
                kernel_of(op)(*arguments)
            number += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return number


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _sanitized(check: str, rehearses: bool) -> list[str]:
    """The row of one of compute-sanitizer's tools."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [check, "", "not run: compute-sanitizer is not on the PATH"]
    command = [tool, "--tool", check, "--error-exitcode", "9", "--print-limit", "20"]
    said = _finished([tool, "--help"])
    if said is not None and "--kernel-name-exclude" in said.stdout:
        command += ["--kernel-name-exclude", "kernel_substring=at::native"]  # torch's own
    command += [sys.executable, "-m", "benchmarks.gpu_day.sanitizer", *(["--cpu"] if rehearses else [])]
    done = _finished(command)
    if done is None:
        return [check, "", f"killed after {_TOOL_SECONDS} s"]
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout) or ["no summary"]
    if done.returncode:
        tail = " ".join((done.stdout + done.stderr).split()[-60:])
        return [check, "", f"ERROR, exit code {done.returncode}: {summary[0]}; {tail}"]
    return [check, str(len(OPS)), summary[0].replace("ERROR SUMMARY: ", "")]


def _finished(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """None if it took too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None


def _counters_table(setting: Setting) -> Table:
    header = ["kernel", *_METRICS.values()]
    title = f"ncu: the {_SLOWEST} ops that take longest"
    tool = shutil.which("ncu")
    if tool is None:
        return Table(title, header, [["not run: ncu is not on the PATH", *[""] * len(_METRICS)]])
    ops = slowest(Path(os.environ.get("LACONIC_GPU_DAY_JOURNAL", "")))
    command = [tool, "--csv", "--clock-control", "none", "--metrics", ",".join(_METRICS)]
    command += ["--kernel-name-base", "function", "--kernel-name", "regex:_kernel$"]
    command += [sys.executable, "-m", "benchmarks.gpu_day.sanitizer", "--only", ",".join(ops)]
    done = _finished(command + (["--cpu"] if setting.rehearses else []))
    if done is None:
        raise RuntimeError(f"ncu was killed after {_TOOL_SECONDS} s")
    rows = counters(done.stdout)
    if done.returncode or not rows:
        raise RuntimeError(f"ncu, exit code {done.returncode}: {' '.join((done.stdout + done.stderr).split()[-60:])}")
    return Table(title, header, rows, f"Ops: {', '.join(ops)}.")


def slowest(journal: Path) -> list[str]:
    """Ops that the part `kernels` found to take longest, from the journal of the day."""
    seconds: dict[str, float] = defaultdict(float)
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []:
        try:
            found = json.loads(line).get("record", {})
            op = found["figure"].removeprefix("kernel: ").partition(",")[0]
            seconds[op] = max(seconds[op], float(found["value"]))
        except (ValueError, KeyError, AttributeError):
            continue
    known = [op for op in sorted(seconds, key=lambda op: -seconds[op]) if op in OPS]
    return known[:_SLOWEST] or list(_DEFAULT_SLOWEST)


def counters(text: str) -> list[list[str]]:
    """A row for each kernel of ncu's CSV, whose lines have one metric each."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = found.setdefault((row["ID"], row["Kernel Name"]), {})
        kernel[row["Metric Name"]] = row["Metric Value"]
    return [[name, *(values.get(metric, "") for metric in _METRICS)] for (_, name), values in found.items()]


if __name__ == "__main__":
    call_each(
        tuple(OPS),
        "cpu" if "--cpu" in sys.argv else "cuda",
        sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else "",
    )
