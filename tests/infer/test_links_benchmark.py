"""The benchmark of the two links runs; speeds are not asserted, it asserts itself that tokens are the same."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import tables


@pytest.mark.slow
def test_links_benchmark_writes_its_table() -> None:
    (row,) = (line for line in tables("infer-links", "--smoke").splitlines() if line.startswith("| decode"))
    assert all(float(cell.split()[0]) > 0 for cell in row.strip("| ").split(" | ")[1:])
