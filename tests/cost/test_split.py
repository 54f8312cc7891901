"""Layers are cut into chunks as evenly as they can be."""

from __future__ import annotations

from itertools import accumulate, combinations, product

import pytest

from laconic.cost.memory.split import balanced_split
from laconic.errors import PlanError


def every_split(count: int, num_chunks: int) -> list[tuple[int, ...]]:
    borders = combinations(range(1, count), num_chunks - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, count), strict=True)) for cut in borders]


def test_the_split_is_the_best_of_all() -> None:
    sizes = [3, 3, 4, 3, 6, 3, 3]

    def cost(counts: tuple[int, ...], last: int) -> tuple[int, int]:
        ends = accumulate(counts)
        loads = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        loads[-1] += last
        return max(loads), sum(load * load for load in loads)

    for num_chunks, last in product((1, 2, 3, 5), (0, 1, 7, 40)):
        best = min(cost(counts, last) for counts in every_split(len(sizes), num_chunks))
        assert cost(balanced_split(sizes, num_chunks, last), last) == best, (num_chunks, last)


def test_a_heavy_head_leaves_its_chunk_few_layers() -> None:
    counts = balanced_split([10] * 8, 4, last=20)
    assert sorted(counts[:-1]) == [2, 2, 3]
    assert counts[-1] == 1


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="2 layers, but 3 chunks need at least one each; use fewer stages"):
        balanced_split([1, 1], 3)
