"""The benchmark of the gradient store runs; speeds are not asserted, the order of the errors is."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import tables


@pytest.mark.slow
def test_gradients_benchmark_writes_its_tables() -> None:
    found = tables("gradients", "--smoke")
    rows = {line.split(" | ")[0].strip("|* "): line.split(" | ") for line in found.splitlines()}
    assert {"accumulate-q8", "accumulate-q12", "torch add_ to fp32", "square sum of 8 bits"} <= rows.keys()

    def error_at_64(name: str) -> float:
        return float(rows[name][-1].strip("| "))

    e4m3 = error_at_64("E4M3, blocks of 128, added in bf16 (AGoQ's words)")
    int8, int12 = error_at_64("int8, blocks of 128** (bits=8)"), error_at_64("int8 + int4 residual** (bits=12)")
    assert int12 < error_at_64("bf16") < int8 < e4m3
