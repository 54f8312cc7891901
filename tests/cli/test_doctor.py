"""`laconic doctor`: what it reports, and that it notices what is broken."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import laconic
from laconic.cli import diagnosis
from laconic.cli.main import main
from laconic.ops import reference


def test_machine_that_works_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for title in ("versions", "machine", "kernels", "devices", "backends", "self test"):
        assert f"{title}\n  " in shown
    assert torch.__version__ in shown
    assert shown.endswith("Everything laconic needs works here.\n")


def test_json_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["laconic"] == laconic.__version__
    assert report["kernels"]["cpu"]["implementation"] in ("c++", "reference")
    assert report["self_test"]["reference"] == report["self_test"]["gloo"] == "ok"
    assert set(report["self_test"].values()) == {"ok"}
    assert report["problems"] == []


def quantize(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
    return reference.quantize_blockwise(x, code, 64, torch.bfloat16, None)


def dequantize(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
    return reference.dequantize_blockwise(codes, scales, code, 64, length, torch.float32)


def test_self_test_notices_wrong_bits_wrong_values_and_crashes() -> None:
    def other_bits(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(x, code)
        codes[3, 7] ^= 1
        return codes, scales

    def far_values(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
        values = dequantize(codes, scales, code, length)
        values[5, 999] += 1.0
        return values

    def crash(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
        raise RuntimeError("illegal instruction")

    assert diagnosis._test_one(quantize, dequantize, quantize, "cpu") == "ok"
    assert diagnosis._test_one(other_bits, dequantize, quantize, "cpu") == "nf4 gives other bits than the reference"
    assert "too far from what went in" in diagnosis._test_one(quantize, far_values, quantize, "cpu")
    assert diagnosis._test_one(crash, dequantize, quantize, "cpu") == "nf4 fails: RuntimeError: illegal instruction"


def test_self_test_of_messages_notices_other_bytes_and_lost_values() -> None:
    def encode(x: Tensor) -> Tensor:
        return reference.lossless_encode(x, "tiered", None)

    def other_bytes(x: Tensor) -> Tensor:
        return reference.lossless_encode(x, "window", None)

    def lose_one(out: Tensor, message: Tensor) -> Tensor:
        status = reference.lossless_decode_(out, message)
        out[5000] = 1
        return status

    decode, expected = reference.lossless_decode_, reference.lossless_encode
    assert diagnosis._test_messages(encode, decode, expected, "cpu") == "ok"
    assert "bfloat16 gives other bytes" in diagnosis._test_messages(other_bytes, decode, expected, "cpu")
    assert "bfloat16 does not give the values back" in diagnosis._test_messages(encode, lose_one, expected, "cpu")
    assert "bfloat16 fails: TypeError" in diagnosis._test_messages(encode, lambda out: out, expected, "cpu")


def test_failed_self_test_is_a_problem_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "_test_kernels", lambda: {"c++ avx2": "nf4 gives other bits than the reference"})
    assert main(["doctor"]) == 1
    assert "PROBLEM: c++ avx2: nf4 gives other bits" in capsys.readouterr().out


def test_missing_extra_is_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diagnosis, "_version", lambda package: None if package == "transformers" else "1.0")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "hint: laconic train needs transformers: pip install 'laconic[train]'" in shown
    assert any(line.split() == ["transformers", "not", "installed"] for line in shown.splitlines())


def test_kernels_asked_for_and_absent_are_a_problem() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "laconic", "doctor"],
        env={**os.environ, "LACONIC_ISA": "avx9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "PROBLEM: LACONIC_ISA is 'avx9'" in done.stdout
    assert "Traceback" not in done.stderr
