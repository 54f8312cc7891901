"""Which ranks belong together: a partition for every layout, stages that reach every rank once, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.topology import GROUPS, ExchangeStage, GridLayout, Levels


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


LAYOUTS = [
    GridLayout(num_ranks, mp, ep, esp)
    for num_ranks in (1, 2, 3, 4, 6, 8, 12)
    for mp in divisors(num_ranks)
    for joint in divisors(num_ranks)
    for ep in divisors(joint)
    for esp in [joint // ep]
]


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_a_partition_of_the_world(name: str) -> None:
    for layout in LAYOUTS:
        groups = layout.ranks(name)
        assert sorted(itertools.chain(*groups)) == list(range(layout.num_ranks))
        assert {len(group) for group in groups} == {getattr(layout, name)}
        assert all(group == sorted(group) for group in groups)


def test_a_rank_is_what_the_two_formulas_say() -> None:
    for layout in LAYOUTS:
        place = {name: {rank: group.index(rank) for group in layout.ranks(name) for rank in group} for name in GROUPS}
        for rank in range(layout.num_ranks):
            at = {name: place[name][rank] for name in GROUPS}
            assert rank == at["dp"] * layout.mp + at["mp"]
            assert rank == (at["edp"] * layout.ep + at["ep"]) * layout.esp + at["esp"]
            assert at["joint"] == at["ep"] * layout.esp + at["esp"]


def test_groups_are_those_of_a_worked_example() -> None:
    layout = GridLayout(8, mp=2, ep=2, esp=2)
    assert layout.ranks("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.ranks("mp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.ranks("edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.ranks("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.ranks("esp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.ranks("joint") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_levels_nest() -> None:
    """32 ranks in 4 nodes of 2 x 2 x 2, the example of HierMoE's section III."""
    layout = GridLayout(32, ep=32, levels=(4, 8, 16))
    assert layout.within(0) == [list(range(32))]
    assert layout.within(1)[1] == list(range(8, 16))
    assert layout.within(3)[:2] == [[0, 1], [2, 3]]
    assert layout.across(1) == [[place, place + 8, place + 16, place + 24] for place in range(8)]
    assert layout.across(2)[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.across(3)[:3] == [[0, 2], [1, 3], [4, 6]]
    for level in (1, 2, 3):
        coarse = [set(group) for group in layout.within(level - 1)]
        for group in layout.within(level) + layout.across(level):
            assert sum(set(group) <= other for other in coarse) == 1


def test_levels_are_of_one_expert_shard() -> None:
    layout = GridLayout(16, ep=4, esp=2, levels=(2,))
    assert layout.ranks("ep")[0] == [0, 2, 4, 6]
    assert layout.within(1) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert layout.across(1)[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"mp": 3}, "mp is 3, but it must divide num_ranks = 8"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3, but it must divide num_ranks = 8"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0, but it must be a whole number"),
        ({"ep": 3}, "ep is 3"),
        ({"ep": 4, "esp": 4}, "ep is 4 and esp is 4, but their product must divide num_ranks = 8"),
        ({"esp": 0}, "esp is 0"),
        ({"ep": "2"}, "ep is '2', but it must be a whole number of ranks"),
        ({"mp": 2.0}, r"mp is 2\.0"),
        ({"ep": 4, "levels": (3,)}, "levels are"),
        ({"ep": 4, "levels": (2, 2)}, "levels are"),
        ({"ep": 8, "levels": (4, 2)}, "levels are"),
        ({"ep": 8, "levels": (1, 2)}, "levels are"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GridLayout(8, **sizes)


def test_a_group_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="group is 'tp', but it must be one of mp, dp"):
        GridLayout(2).ranks("tp")


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
    assert levels.stages(1) == (ExchangeStage("intra0", 1, 32, 32),)
    assert levels.stages(2) == (ExchangeStage("inter1", 1, 4, 32), ExchangeStage("intra1", 4, 32, 32))
    assert [(stage.fanout, stage.stride) for stage in levels.stages(4)] == [(4, 8), (2, 4), (2, 2), (2, 1)]
    assert [stage.name for stage in levels.stages(4)] == ["inter1", "inter2", "inter3", "intra3"]


def test_nodes_become_a_level_where_there_are_several_of_several_ranks() -> None:
    assert Levels.of_nodes(8, 4).num_groups == (1, 2)
    assert Levels.of_nodes(4, 4).num_groups == (1,)
    assert Levels.of_nodes(4, 1).num_groups == (1,)
    assert Levels.of_nodes(8, 4).node_size == Levels(8, (1, 2)).node_size == 4
    assert Levels(8).node_size == 8
    with pytest.raises(ConfigError, match="ranks_per_node is 3, but it must divide the 8 ranks"):
        Levels.of_nodes(8, 3)


def test_levels_of_all_ranks_and_of_single_ones_are_left_out() -> None:
    assert Levels.of_groups(8, (1, 2, 8)) == Levels(8, (1, 2))
    assert Levels.of_groups(1, (2,)) == Levels(1)


@pytest.mark.parametrize("num_groups", [(), (2,), (1, 3), (1, 2, 2), (1, 4, 2), (1, 16), (1, 0), (1, 2.0)])
def test_groups_that_are_not_nested_are_refused(num_groups: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="must begin with 1, each number"):
        Levels(8, num_groups)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_depth_that_does_not_exist_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth is {depth}, but it must be from 1 to 2"):
        Levels(8, (1, 2)).stages(depth)


def test_nodes_have_to_be_whole() -> None:
    with pytest.raises(ConfigError, match="ranks_per_node is 3, but it must divide the 8 ranks"):
        Levels(8, (1, 2), 3)


def test_a_world_needs_ranks() -> None:
    with pytest.raises(ConfigError, match="num_ranks is 0, but it must be a whole number"):
        GridLayout(0)
    with pytest.raises(ConfigError, match="num_ranks is 0, but it must be a whole number"):
        Levels(0)
