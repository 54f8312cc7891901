"""The benchmark over slow links runs where network namespaces can be made, and leaves none behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laconic.testing.netlab import why_not


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
def test_network_benchmark_writes_its_tables(tmp_path: Path) -> None:
    report = tmp_path / "network.md"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "network", "--smoke", "--out", str(report)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    text = report.read_text()
    for row in ("32 KB", "256 KB", "fp32", "bf16", "q8"):
        assert f"\n| {row} | " in text
