"""`laconic doctor`: what it reports, and that it notices what is broken."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.cli import diagnosis
from laconic.cli.main import main
from laconic.ops import reference
from laconic.ops.declarations import OPS
from tests.patience import patient


def test_machine_that_works_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for title in ("versions", "machine", "kernels", "devices", "backends", "self test"):
        assert f"{title}\n  " in shown
    assert torch.__version__ in shown
    assert shown.endswith("Everything laconic needs works here.\n")


def quantize(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
    return reference.quantize_blockwise(x, code, 64, torch.bfloat16, None)


def dequantize(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
    return reference.dequantize_blockwise(codes, scales, code, 64, length, torch.float32)


def test_self_test_of_the_reference_notices_wrong_values_and_crashes() -> None:
    def far_values(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
        values = dequantize(codes, scales, code, length)
        values[5, 999] += 1.0
        return values

    def crash(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
        raise RuntimeError("illegal instruction")

    assert diagnosis._test_values(quantize, dequantize) == "ok"
    assert "too far from what went in" in diagnosis._test_values(quantize, far_values)
    assert diagnosis._test_values(crash, dequantize) == "uint2 fails: RuntimeError: illegal instruction"


@pytest.mark.parametrize("op", OPS)
def test_self_test_notices_one_wrong_byte_of_any_op(op: str) -> None:
    def implementation_of(name: str) -> Callable[..., Any] | None:
        return wrong if name == op else None  # the others, which doctor runs above

    def wrong(*arguments: Any) -> Any:
        results = getattr(reference, op)(*arguments)
        written = arguments[0] if results is None else results
        while isinstance(written, list | tuple):
            written = written[0]
        written.view(-1).view(torch.uint8)[-1 if op != "lossless_encode" else 70] ^= 1
        return results

    assert f"{op} (" in (found := diagnosis._test_bits(implementation_of, "cpu"))
    assert "gives other bits than the reference" in found


def test_self_test_reports_a_kernel_that_raises() -> None:
    def implementation_of(name: str) -> Callable[..., Any]:
        return lambda *arguments: 1 / 0

    assert "fails: ZeroDivisionError" in diagnosis._test_bits(implementation_of, "cpu")


def test_driver_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert diagnosis._driver_version(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\nGCC version: 12.3.0\n"
    )
    assert diagnosis._driver_version(file) == "560.35.03"


def test_failed_self_test_is_a_problem_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "_test_kernels", lambda: {"c++ avx2": "nf4 gives other bits than the reference"})
    assert main(["doctor"]) == 1
    assert "PROBLEM: c++ avx2: nf4 gives other bits" in capsys.readouterr().out


def test_missing_extra_is_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diagnosis, "_version", lambda package: None if package == "transformers" else "1.0")
    monkeypatch.setattr(diagnosis, "_test_kernels", lambda: {"reference": "ok"})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "hint: laconic train needs transformers: pip install 'laconic[train]'" in shown
    assert any(line.split() == ["transformers", "not", "installed"] for line in shown.splitlines())


@pytest.mark.ci
def test_kernels_asked_for_and_absent_are_a_problem() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "laconic", "doctor"],
        env={**os.environ, "LACONIC_ISA": "avx9"},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 1
    assert "PROBLEM: LACONIC_ISA is 'avx9'" in done.stdout
    assert "Traceback" not in done.stderr
