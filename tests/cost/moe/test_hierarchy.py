"""HierMoE's row counts against rows that are really moved, its rates of duplicates, its depths."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kit.moe_papers import HIERMOE_CLUSTER as CLUSTER
from benchmarks.kit.moe_papers import HIERMOE_FITS as FITS
from benchmarks.kit.moe_papers import hiermoe_rates as paper_rates
from laconic.cost.comm.rates import CodecRates, Line
from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe import Coding
from laconic.cost.moe.hierarchy import (
    RowCounts,
    best_depth,
    count_vector,
    counted_groups,
    depth_seconds,
    duplicate_rate,
    flat_seconds,
    hit_share,
    level_costs,
    level_nbytes,
    level_rows,
    stage_shape,
    wire_rows,
)
from laconic.errors import ConfigError
from laconic.topology import ExchangeStage, Levels

PUBLISHED_RATES = {32: (2, 4, 7, 9), 16: (3, 9, 14, 18), 8: (6, 17, 27, 34), 4: (12, 32, 46, 55)}
"""Per cent of rows that are duplicates, by number of groups, of top-2, 4, 6 and 8 (table II)."""

Routes = list[list[set[int]]]  # by source rank, then token: its experts


def route(rng: np.random.Generator, ranks: int, num_experts: int, top_k: int, skewed: bool) -> Routes:
    weights = 1 / np.arange(1, num_experts + 1) ** (1.2 if skewed else 0)
    share = weights / weights.sum()
    sizes = rng.integers(0, 12, ranks)  # some ranks may have none
    return [[set(rng.choice(num_experts, top_k, replace=False, p=share)) for _ in range(n)] for n in sizes]


def counts_of(routes: Routes, num_experts: int, levels: Levels) -> RowCounts:
    vectors = []
    for tokens in routes:
        pairs = [(token, expert) for token, experts in enumerate(tokens) for expert in experts]
        vectors.append(count_vector([t for t, _ in pairs], [e for _, e in pairs], num_experts, levels))
    return RowCounts.of_vectors(vectors, levels)


def moved(routes: Routes, num_experts: int, levels: tuple[ExchangeStage, ...]) -> list[Counter[tuple[int, int]]]:
    """Rows from rank to rank at each level, by moving every row."""
    held: dict[int, list[set[int]]] = defaultdict(list, {rank: list(tokens) for rank, tokens in enumerate(routes)})
    found = []
    for level in levels:
        arrived: dict[int, list[set[int]]] = defaultdict(list)
        rows: Counter[tuple[int, int]] = Counter()
        size = num_experts // level.num_groups
        for rank, experts_of_rows in held.items():
            position = rank % level.num_positions % level.stride
            for experts in experts_of_rows:
                for group in {expert // size for expert in experts}:
                    to = group * level.stride + position
                    rows[rank, to] += 1
                    arrived[to].append({expert for expert in experts if expert // size == group})
        held = arrived
        found.append(rows)
    for rank, sets in held.items():  # every row is where its experts are
        assert all(expert // (num_experts // levels[0].num_ranks) == rank for experts in sets for expert in experts)
    assert sum(len(s) for sets in held.values() for s in sets) == sum(len(e) for tokens in routes for e in tokens)
    return found


@given(
    st.sampled_from([(), (2,), (4,), (2, 4), (2, 4, 8)]),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_counts_equal_the_rows_that_are_moved(num_groups: tuple[int, ...], top_k: int, skewed: bool, seed: int) -> None:
    levels, num_experts = Levels(16, (1, *num_groups)), 32
    routes = route(np.random.default_rng(seed), 16, num_experts, top_k, skewed)
    counts = counts_of(routes, num_experts, levels)
    for depth in levels.depths:
        stages = levels.stages(depth)
        for level, rows in zip(stages, moved(routes, num_experts, stages), strict=True):
            table = level_rows(counts, level)
            for (sender, receiver), number in rows.items():
                parent, position = divmod(sender, level.num_positions)
                peer = receiver // level.stride % level.fanout
                assert table[parent, position, peer] == number
            assert table.sum() == sum(rows.values())
            out, into = Counter[int](), Counter[int]()
            for (sender, receiver), number in rows.items():
                if sender != receiver:
                    out[sender] += number
                    into[receiver] += number
            found = wire_rows(counts, level)
            assert found.total == sum(out.values())
            assert found.busiest == max([0, *out.values(), *into.values()])
            assert level_nbytes(counts, depth, 10.0)[level.name] == 10 * found.total


def test_uniform_routing_has_the_expected_counts() -> None:
    levels, rng = Levels(8, (1, 2, 4)), np.random.default_rng(0)
    routes = [[set(rng.choice(16, 4, replace=False)) for _ in range(400)] for _ in range(8)]
    counts, expected = counts_of(routes, 16, levels), RowCounts.uniform(400, 16, 4, levels)
    for g in counted_groups(levels):
        assert counts.rows[g].mean() == pytest.approx(expected.rows[g].mean(), rel=0.03)
        assert counts.duplicate_rate(g) == pytest.approx(duplicate_rate(16, 4, g), abs=0.02)
        assert expected.duplicate_rate(g) == pytest.approx(duplicate_rate(16, 4, g))
    assert counts.assignments.sum() == expected.assignments.sum() == 8 * 400 * 4


def test_hit_share_equals_counting_every_choice() -> None:
    from itertools import combinations

    choices = list(combinations(range(8), 3))
    for groups in (1, 2, 4, 8):
        hit = sum(1 for choice in choices if min(choice) < 8 // groups)
        assert hit_share(8, 3, groups) == pytest.approx(hit / len(choices))


@pytest.mark.parametrize(("num_groups", "published"), PUBLISHED_RATES.items())
def test_duplicate_rates_are_those_of_the_paper(num_groups: int, published: tuple[int, ...]) -> None:
    """HierMoE, Table II, in per cent; rounded; it does not say of how many experts, 256 fit best."""
    for top_k, per_cent in zip((2, 4, 6, 8), published, strict=True):
        assert 100 * duplicate_rate(256, top_k, num_groups) == pytest.approx(per_cent, abs=1.05)


# --- depths ---


def test_levels_of_the_paper() -> None:
    assert [level.name for level in CLUSTER.stages(4)] == ["inter1", "inter2", "inter3", "intra3"]
    peers = {level.name: level.fanout for depth in CLUSTER.depths for level in CLUSTER.stages(depth)}
    assert peers == {name: peers for name, (_, _, peers) in FITS.items()}
    assert stage_shape(CLUSTER, CLUSTER.stages(2)[0]) == GroupShape(4, 1)
    assert stage_shape(CLUSTER, CLUSTER.stages(2)[1]) == GroupShape(8, 8)
    assert stage_shape(CLUSTER, CLUSTER.stages(1)[0]) == GroupShape(32, 8)


@pytest.mark.parametrize(("top_k", "speedup", "two_levels"), [(6, 1.36, 1.32), (8, 1.60, 1.52), (10, 1.85, 1.72)])
def test_the_paper_s_constants_choose_depth_three(top_k: int, speedup: float, two_levels: float) -> None:
    counts = RowCounts.uniform(1024, 128, top_k, CLUSTER)
    found = best_depth(counts, 2048 * 2, paper_rates())
    assert found.depth == 3
    assert round(found.flat_seconds / found.seconds, 2) == pytest.approx(speedup, abs=0.011)
    second = sum(found.candidates[2].values())
    assert found.flat_seconds / second == pytest.approx(two_levels, abs=0.006)


def test_depth_seconds_are_the_paper_s_sum() -> None:
    counts = RowCounts.uniform(100, 64, 4, CLUSTER)
    seconds = depth_seconds(counts, 3, 512, paper_rates())
    groups = CLUSTER.num_groups
    for name, (alpha, beta, peers) in FITS.items():
        if name in seconds:
            level = next(level for level in CLUSTER.stages(3) if level.name == name)
            index = int(name[5:])
            before = groups[index - 1] if name.startswith("inter") else groups[index]
            largest = 100 * before * hit_share(64, 4, level.num_groups)  # rows of a rank for a destination
            assert seconds[name] == pytest.approx(1e-3 * (alpha + peers * largest * 512 * beta))
    assert flat_seconds(counts, 512, paper_rates()) == pytest.approx(1e-3 * (0.722 + 100 * 4 * 512 * 5.7e-7))


def test_without_levels_or_peers_there_is_one_depth() -> None:
    counts = RowCounts.uniform(10, 8, 2, Levels(4))
    assert best_depth(counts, 64, paper_rates()).depth == 1
    alone = RowCounts.uniform(10, 8, 2, Levels(1))
    assert best_depth(alone, 64, paper_rates()).seconds == 0.0


def test_copies_within_ranks_make_depth_dearer() -> None:
    counts = RowCounts.uniform(1024, 128, 8, CLUSTER)
    free, dear = paper_rates(), replace(paper_rates(), copy=Line(0.0, 1e-9))
    for depth in CLUSTER.depths:
        more = sum(depth_seconds(counts, depth, 4096, dear).values())
        more -= sum(depth_seconds(counts, depth, 4096, free).values())
        rows = [wire_rows(counts, level).handled for level in CLUSTER.stages(depth)]
        assert more == pytest.approx(1e-9 * 4096 * sum(rows))
    assert wire_rows(counts, CLUSTER.stages(1)[0]).handled == pytest.approx(32 * 1024 * hit_share(128, 8, 32))


def test_level_costs_are_the_seconds_of_balanced_counts() -> None:
    counts = RowCounts.uniform(1024, 128, 8, CLUSTER)
    for depth in CLUSTER.depths:
        expected = depth_seconds(counts, depth, 4096, paper_rates())
        for cost, seconds in zip(level_costs(counts, depth, 4096, paper_rates()), expected.values(), strict=True):
            fullest = counts.rows[cost.num_groups].sum(axis=0).max()
            assert cost.alpha_seconds + cost.seconds_per_row * fullest == pytest.approx(seconds)


def test_a_code_makes_slow_levels_cheaper() -> None:
    blocks = CodecRates(*[Line(0.0, 1e-12)] * 3, 1.94)
    rates = replace(paper_rates(), codecs={"bfloat16": {"blockwise8": blocks}})
    counts = RowCounts.uniform(1024, 128, 8, CLUSTER)
    raw, coded = (depth_seconds(counts, 2, 4096, rates, coding) for coding in (None, Coding("blockwise8")))
    assert raw["inter1"] / 1.94 < coded["inter1"] < raw["inter1"]
    assert best_depth(counts, 4096, rates, Coding("auto")).seconds < best_depth(counts, 4096, rates).seconds


# --- refusals ---


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="depth is 5, but it must be from 1 to 4"):
        CLUSTER.stages(5)
    with pytest.raises(ConfigError, match="num_groups is 3, but it must divide num_experts = 8"):
        hit_share(8, 2, 3)
    with pytest.raises(ConfigError, match="top_k is 9, but it must be from 1 to num_experts = 8"):
        hit_share(8, 9, 2)
    with pytest.raises(ConfigError, match="num_experts is 33, but it must be a multiple of 32 ranks"):
        count_vector([0], [0], 33, CLUSTER)
    with pytest.raises(ConfigError, match="experts go from 0 to 64, but must be from 0 to 63"):
        count_vector([0, 0], [0, 64], 64, CLUSTER)
    with pytest.raises(ConfigError, match=r"counts have shape \(1, 12\), but \(4, 10\) is needed"):
        RowCounts.of_vectors([[0] * 12], Levels(4, (1, 2)))
