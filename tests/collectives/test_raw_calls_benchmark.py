"""The benchmark of raw calls: a row for each collective, whose figures are differences of the same run."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import tables

pytestmark = pytest.mark.slow


def test_every_collective_is_timed_by_turns() -> None:
    rows = [line.strip("| ").split(" | ") for line in tables("raw-calls", "--smoke").splitlines() if " to " in line]
    named = {name: cells for name, *cells in rows if len(cells) == 3}
    assert {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "gather",
        "scatter",
    } <= named.keys()
    for cells in named.values():
        low, high = map(float, cells[0].split(" to "))
        assert 0 < low <= high
