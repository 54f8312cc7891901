"""The benchmark of Parm's routes runs on a part of the paper's layers."""

from __future__ import annotations

from benchmarks.moe_parm import moe_parm
from benchmarks.registry import SMOKE_ELEMENTS, Options


def test_the_faster_route_is_never_slower_than_either() -> None:
    speedups, selector = moe_parm(Options(threads=1, elements=SMOKE_ELEMENTS, rounds=1))
    *_, (name, number, *columns) = speedups.rows
    assert (name, number) == ("all", "16")
    s1, s2, faster = ([float(value) for value in column.split(", ")] for column in columns)
    assert all(best >= max(one, two) for one, two, best in zip(s1, s2, faster, strict=True))
    chosen = [int(count) for row in selector.rows for count in row[1].split(" / ")]
    assert sum(chosen) == 16
