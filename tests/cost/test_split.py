"""Layers are cut into chunks as evenly as they can be."""

from __future__ import annotations

from itertools import combinations

import pytest

from laconic.cost.memory.split import balanced_split
from laconic.errors import PlanError


def every_split(count: int, num_chunks: int) -> list[tuple[int, ...]]:
    borders = combinations(range(1, count), num_chunks - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, count), strict=True)) for cut in borders]


@pytest.mark.parametrize("last", [0, 1, 7, 40])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5])
def test_the_split_is_the_best_of_all(num_chunks: int, last: int) -> None:
    sizes = [3, 3, 4, 3, 6, 3, 3]

    def loads(counts: tuple[int, ...]) -> list[int]:
        ends = [sum(counts[: i + 1]) for i in range(num_chunks)]
        found = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        found[-1] += last
        return found

    def cost(counts: tuple[int, ...]) -> tuple[int, int]:
        return max(loads(counts)), sum(load * load for load in loads(counts))

    best = min(cost(counts) for counts in every_split(len(sizes), num_chunks))
    assert cost(balanced_split(sizes, num_chunks, last)) == best


def test_a_heavy_head_leaves_its_chunk_few_layers() -> None:
    counts = balanced_split([10] * 8, 4, last=20)
    assert sorted(counts[:-1]) == [2, 2, 3]
    assert counts[-1] == 1


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="2 layers, but 3 chunks need at least one each; use fewer stages"):
        balanced_split([1, 1], 3)
