"""Which ranks belong together: a partition for every layout, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.moe.parallel.grid import Grid, GridLayout

NAMES = ("dp", "mp", "edp", "ep", "esp", "joint")


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


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_a_partition_of_the_world(name: str) -> None:
    for layout in LAYOUTS:
        groups = layout.ranks(name)
        assert sorted(itertools.chain(*groups)) == list(range(layout.num_ranks))
        assert {len(group) for group in groups} == {getattr(layout, name)}
        assert all(group == sorted(group) for group in groups)


def test_a_rank_is_what_the_two_formulas_say() -> None:
    for layout in LAYOUTS:
        place = {name: {rank: group.index(rank) for group in layout.ranks(name) for rank in group} for name in NAMES}
        for rank in range(layout.num_ranks):
            at = {name: place[name][rank] for name in NAMES}
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
        ({"mp": 3}, "mp is 3"),
        ({"ep": 3}, "ep is 3"),
        ({"ep": 4, "esp": 4}, "esp is 4"),
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
    with pytest.raises(ConfigError, match="tp"):
        GridLayout(2).ranks("tp")


def test_a_grid_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        Grid()
