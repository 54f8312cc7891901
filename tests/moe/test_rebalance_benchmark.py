"""Packing experts on ranks by load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expert_packing import rebalance
from laconic.errors import ConfigError


def imbalance(loads: Sequence[float], slots: Sequence[int], num_ranks: int) -> float:
    """Load of the fullest rank over the mean."""
    sums = [0.0] * num_ranks
    for load, slot in zip(loads, slots, strict=True):
        sums[slot // (len(loads) // num_ranks)] += load
    return max(sums) * num_ranks / sum(sums) if sum(sums) else 1.0


LOADS = st.lists(st.integers(0, 100), min_size=16, max_size=16)


@given(LOADS, st.sampled_from([1, 2, 4, 8, 16]), st.permutations(range(16)))
def test_every_expert_has_a_slot_of_its_own(loads: list[int], num_ranks: int, current: list[int]) -> None:
    slots = rebalance(loads, num_ranks)
    kept = rebalance(loads, num_ranks, current=current)
    assert sorted(slots) == sorted(kept) == list(range(16))
    assert imbalance(loads, kept, num_ranks) == pytest.approx(imbalance(loads, slots, num_ranks))
    assert 1 <= imbalance(loads, slots, num_ranks) <= num_ranks + 1e-9


def test_hot_neighbours_are_parted() -> None:
    loads = [100, 90, 80, 70, 1, 1, 1, 1]
    slots = rebalance(loads, 4)
    assert len({slots[expert] // 2 for expert in range(4)}) == 4
    assert imbalance(loads, list(range(8)), 4) > 2 > imbalance(loads, slots, 4)


@given(LOADS)
def test_a_second_time_nothing_moves(loads: list[int]) -> None:
    slots = rebalance(loads, 4)
    assert rebalance(loads, 4, current=slots) == slots


def test_few_experts_move() -> None:
    loads = [8.0, 7, 6, 5, 4, 3, 2, 1]
    before = rebalance(loads, 4)
    loads[7] = 1.5  # changes nothing about who goes where
    assert rebalance(loads, 4, current=before) == before


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="current is no permutation"):
        rebalance([1.0] * 8, 4, current=[0] * 8)
    with pytest.raises(ConfigError, match="num_ranks is 3, but it must divide the 8 experts"):
        rebalance([1.0] * 8, 3)
