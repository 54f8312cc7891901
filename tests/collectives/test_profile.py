"""Profiles of several nodes: every kind of group, the same numbers on every rank, and two levels that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.cost.comm.rates import GROUP_KINDS, OPERATIONS, WireRates
from laconic.cost.comm.seconds import GroupShape, candidates
from tests.distributed.processes import finish, free_port, rank_environment, start


@pytest.mark.slow
def test_two_nodes_are_measured_inside_and_across(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["-m", "tests.collectives.profiling", str(tmp_path)]
    endings = [finish(p) for p in [start(arguments, rank_environment(rank, 4, port)) for rank in range(4)]]
    assert [ending.code for ending in endings] == [0] * 4, endings[0].err
    first, *others = (WireRates.load(tmp_path / f"{rank}.json") for rank in range(4))
    assert others == [first] * 3
    assert {kind: link.world for kind, link in first.links.items()} == {"all": 4, "node": 2, "across": 2}
    assert set(first.links) == set(GROUP_KINDS)
    assert all(set(link.operations) == set(OPERATIONS) for link in first.links.values())
    assert (first.layout, first.hosts) == ((2, 2), ("host0", "host1"))
    found = candidates("all_reduce", 1 << 22, "bfloat16", GroupShape(4, 2), first, levels=(1, 2))
    assert {(c.codec, c.levels) for c in found} >= {("raw", 1), ("raw", 2), ("tiered", 1), ("tiered", 2)}
