"""The benchmark of sums runs; speeds are not asserted, that the error does not grow with the world is."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import tables


@pytest.mark.slow
def test_reduce_benchmark_writes_its_tables() -> None:
    found = tables("reduce", "--smoke")
    rows = {}
    for line in found.splitlines():
        name, *cells = line.strip("| ").split(" | ")
        if cells and "e-0" in cells[0]:
            rows[name] = [float(cell) for cell in cells]
    ours, ring = rows["**all_reduce_q8**"], rows["ring, int8 blocks of 128 at every hop"]
    assert ours[-1] < 1.3 * ours[0]
    assert ring[-1] > 1.5 * ring[0]
