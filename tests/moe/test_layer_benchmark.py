"""The benchmark of the layer runs and finds the same outputs; speeds are not asserted."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import tables


@pytest.mark.slow
def test_layer_benchmark_writes_its_tables() -> None:
    found = tables("moe-layer", "--smoke")
    text = found
    for dtype in ("fp32", "bf16"):
        assert f"## Layer, {dtype}, milliseconds" in text
        assert f"## One grouped product forward and backward, {dtype}, milliseconds" in text
    assert "Qwen3-MoE, 16 tokens, 32 x 16, top 4 of 8, Zipf" in text
