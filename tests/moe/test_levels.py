from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.moe.dispatch.topology import Levels, Stage

LEVELS = [
    Levels(1),
    Levels(2),
    Levels(6),
    Levels(4, (1, 2)),
    Levels(8, (1, 2, 4)),
    Levels(4, (1, 2, 4)),
    Levels(12, (1, 2, 6)),
    Levels(32, (1, 4, 8, 16)),
]


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_stages_lead_from_every_rank_to_every_rank_in_exactly_one_way(levels: Levels) -> None:
    for depth in range(1, levels.max_depth + 1):
        stages = levels.stages(depth)
        assert len(stages) == depth
        for source in range(levels.num_ranks):
            reached = [source]
            for stage in stages:
                reached = [peer for rank in reached for peer in stage.peers(rank)]
            assert sorted(reached) == list(range(levels.num_ranks))


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_peers_agree_on_who_they_are_and_where(levels: Levels) -> None:
    for depth in range(1, levels.max_depth + 1):
        for stage in levels.stages(depth):
            for rank in range(levels.num_ranks):
                peers = stage.peers(rank)
                assert peers[stage.place(rank)] == rank
                assert all(stage.peers(peer) == peers for peer in peers)


def test_the_papers_levels_are_its_groups() -> None:
    levels = Levels(32, (1, 4, 8, 16))
    assert levels.stages(1) == (Stage(32, 1),)
    assert levels.stages(2) == (Stage(4, 8), Stage(8, 1))
    assert levels.stages(4) == (Stage(4, 8), Stage(2, 4), Stage(2, 2), Stage(2, 1))


def test_nodes_become_a_level_where_there_are_several_of_several_ranks() -> None:
    assert Levels.of_nodes(8, 4).num_groups == (1, 2)
    assert Levels.of_nodes(4, 4).num_groups == (1,)
    assert Levels.of_nodes(4, 1).num_groups == (1,)
    with pytest.raises(ConfigError, match="ranks_per_node is 3, but it must divide the 8 ranks"):
        Levels.of_nodes(8, 3)


@pytest.mark.parametrize("num_groups", [(), (2,), (1, 3), (1, 2, 2), (1, 4, 2), (1, 16), (1, 0)])
def test_groups_that_are_not_nested_are_refused(num_groups: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must begin with 1, each number"):
        Levels(8, num_groups)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_depth_that_does_not_exist_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth is {depth}, but it must be from 1 to 2"):
        Levels(8, (1, 2)).stages(depth)
