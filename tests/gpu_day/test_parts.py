"""What parts do with what they find: wrong bits, tests that fail, tools that are not there or speak."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_day import bits, sanitizer
from benchmarks.gpu_day.parts import PARTS
from benchmarks.gpu_day.record import MARK, Report
from benchmarks.gpu_day.setting import Setting, kernel_of, relative_error
from benchmarks.gpu_day.tests import Outcome
from laconic.ops import reference
from laconic.ops.declarations import OPS
from laconic.ops.self_check import difference
from tests.gpu_day.faults import ROOT


def setting() -> tuple[Setting, list[dict[str, Any]]]:
    """A rehearsal whose records are kept."""
    records: list[dict[str, Any]] = []
    return Setting(True, Report(lambda line: records.append(json.loads(line.removeprefix(MARK))))), records


def test_a_kernel_that_gives_wrong_bits_is_named() -> None:
    def wrong(op: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            codes, scales = reference.quantize_blockwise(*arguments)
            if arguments[1] == "int8":
                codes = codes.clone()
                codes[-1, -1] ^= 1
            return codes, scales

        return kernel if op == "quantize_blockwise" else getattr(reference, op)

    there, records = setting()
    bf16 = torch.bfloat16
    choices = {
        "quantize_blockwise": [(bf16, "nf4", 64, bf16, False), (bf16, "int8", 64, bf16, False)],
        "sum_rows": [(bf16, False)],
    }
    bits.compare(there, choices, wrong)
    (problem,) = (record for record in records if "problem" in record)
    assert problem["problem"] == "bits of quantize_blockwise"
    assert problem["reason"] == "(torch.bfloat16, int8, 64, torch.bfloat16, False): result 0"
    table = records[-1]["table"]
    assert "| quantize_blockwise | 2 | **1 differ** |" in table
    assert "| sum_rows | 1 | equal |" in table


def test_a_kernel_that_raises_is_named_and_the_next_ops_are_compared() -> None:
    def broken(op: str) -> Callable[..., Any]:
        def kernel(*arguments: Any) -> Any:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")

        return kernel if op == "pack_bits" else getattr(reference, op)

    there, records = setting()
    bits.compare(there, {"pack_bits": [(torch.float32,)], "sum_rows": [(torch.float32, True)]}, broken)
    assert there.report.problems == ["bits of pack_bits"]
    assert "invalid argument" in records[0]["reason"]
    assert "| sum_rows | 1 | equal |" in records[-1]["table"]


def test_every_op_is_compared_in_every_dtype_and_format() -> None:
    """Of a device; each combination makes arguments that the reference takes."""
    for op in OPS:
        choices = list(bits._choices(op, False))
        assert choices, op
        if op == "quantize_blockwise":
            assert {choice[:2] for choice in choices} >= {(dtype, code) for dtype in bits.DTYPES for code in bits.BITS}
        if not op.startswith("lossless"):
            for chosen in choices if op.startswith("gated") else choices[::5]:
                assert not difference(op, getattr(reference, op), OPS[op].example(*chosen), "cpu")


def test_every_op_has_a_kernel() -> None:
    pytest.importorskip("triton")
    for op in OPS:
        assert kernel_of(op).__module__.startswith("laconic.ops.triton.")
    with pytest.raises(KeyError):
        kernel_of("no_such_op")


def test_without_tools_the_sanitizer_leaves_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "call_each", lambda *_: 2)
    monkeypatch.setenv("PATH", "/nowhere")
    there, records = setting()
    sanitizer.run(there)
    assert there.report.problems == []
    tables = {record["key"]: record["table"] for record in records}
    assert len(tables) == 2
    first, second = tables.values()
    assert first.count("not run: compute-sanitizer is not on the PATH") == 2
    assert "not run: ncu is not on the PATH" in second


def tool(folder: Path, name: str, said: str, code: int = 0) -> None:
    """A program that prints what a tool would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


NCU = '''==PROF== Connected to process 1
"ID","Process ID","Process Name","Host Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","python","h","_adamw_kernel","gpu__time_duration.sum","ns","54000"
"0","1","python","h","_adamw_kernel","launch__registers_per_thread","register/thread","56"
"1","1","python","h","_write_kernel","gpu__time_duration.sum","ns","9000"'''


def test_what_the_tools_find_is_in_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "call_each", lambda *_: 2)
    tool(tmp_path, "compute-sanitizer", "========= ERROR SUMMARY: 0 errors")
    tool(tmp_path, "ncu", NCU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    there, records = setting()
    sanitizer.run(there)
    assert there.report.problems == []
    assert f"| memcheck | {len(OPS)} | 0 errors |" in records[-2]["table"]
    assert "| _adamw_kernel | 54000 |  |  |  | 56 |" in records[-1]["table"]
    assert "| _write_kernel | 9000 |" in records[-1]["table"]


def test_what_the_sanitizer_finds_fails_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "call_each", lambda *_: 2)
    tool(tmp_path, "compute-sanitizer", "Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 3 errors", 9)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    there, records = setting()
    sanitizer.run(there)
    assert there.report.problems == ["memcheck", "racecheck"]
    table = next(record["table"] for record in reversed(records) if "racecheck" in record.get("table", ""))
    assert "ERROR, exit code 9: ERROR SUMMARY: 3 errors" in table
    assert "Invalid __global__ read" in table


def test_the_slowest_ops_are_those_that_were_measured(tmp_path: Path) -> None:
    journal = tmp_path / "gpu_day.jsonl"
    figures = {
        "kernel: adamw8bit_multi_, bf16": 50.0,
        "kernel: adamw8bit_multi_, fp32": 70.0,
        "kernel: sum_rows, a": 60.0,
    }
    lines = [json.dumps({"part": "kernels", "record": {"figure": name, "value": v}}) for name, v in figures.items()]
    journal.write_text("\n".join([*lines, '{"cut']))
    assert sanitizer.slowest(journal) == ["adamw8bit_multi_", "sum_rows"]
    assert len(sanitizer.slowest(tmp_path / "none")) == 5


@pytest.mark.parametrize(
    ("reason", "is_made_for_cpu"),
    [
        ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices", True),
        ("RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'", True),
        ("AssertionError: assert False", False),
        ("KernelError: the kernel of quantize_blockwise on cuda:0 gives other bits than the reference", False),
    ],
)
def test_tests_that_are_made_for_the_cpu_are_told_from_failures(reason: str, is_made_for_cpu: bool) -> None:
    assert Outcome("test", "failed", reason).is_made_for_cpu == is_made_for_cpu
    assert not Outcome("test", "passed", reason).is_made_for_cpu


def test_limits_of_a_call_are_within_its_minutes() -> None:
    for call in (1, 2):
        assert sum(part.seconds for part in PARTS if part.call == call) <= 9 * 60
    assert len(PARTS) == 8


def test_a_backward_is_timed_without_the_forward_before_it() -> None:
    there, _ = setting()
    calls: list[str] = []
    for clock in (there.device_seconds, there.host_seconds):
        slow = lambda: (calls.append("before"), time.sleep(0.05))  # noqa: E731
        assert clock(lambda: calls.append("timed"), before=slow) < 0.05
    assert calls == ["before", "timed"] * 2


def test_an_error_is_relative_to_what_was_expected() -> None:
    assert relative_error(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])) == pytest.approx(0.02)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_started(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_day.py"), "--report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.startswith("Nothing was started, because something is missing:\n- torch (built for CUDA: ")
    assert not (tmp_path / "gpu_day.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bits", "sanitizer", "layer"])
def test_a_part_is_rehearsed(name: str, tmp_path: Path) -> None:
    """As `--rehearse` runs it, in the interpreter."""
    pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "tools" / "gpu_day.py"), "--rehearse", "--report", str(tmp_path)]
    done = subprocess.run([*command, "--parts", name], capture_output=True, text=True, check=False)
    page = (tmp_path / "gpu_day.md").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {name} | " in page
    assert page.count("Rehearsal on the CPU: no device measured this.") >= 2
    assert "differ**" not in page
