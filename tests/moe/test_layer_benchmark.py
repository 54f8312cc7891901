"""The benchmark of the layer runs and finds the same outputs; speeds are not asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_layer_benchmark_writes_its_tables(tmp_path: Path) -> None:
    report = tmp_path / "moe.md"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "moe-layer", "--smoke", "--out", str(report)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    text = report.read_text()
    for dtype in ("fp32", "bf16"):
        assert f"## Layer, {dtype}, milliseconds" in text
        assert f"## One grouped product forward and backward, {dtype}, milliseconds" in text
    assert "Qwen3-MoE, 16 tokens, 32 x 16, top 4 of 8, Zipf" in text
