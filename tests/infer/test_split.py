"""Who holds what, and how rows are cut."""

from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.infer.split import EngineSplit
from laconic.schedule.slices import largest_slice, slice_ranges


def test_slices_cover_everything_once_and_evenly() -> None:
    for length in range(20):
        for count in range(1, 9):
            ranges = slice_ranges(length, count)
            assert [i for part in ranges for i in part] == list(range(length))
            assert len(ranges) == count
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
            assert max(map(len, ranges)) == largest_slice(length, count)


def test_every_expert_has_one_worker_and_every_rank_one_role() -> None:
    for attention in range(1, 4):
        for experts in range(5):
            split = EngineSplit(attention, experts)
            roles = [split.role(rank) for rank in range(split.num_workers)]
            assert roles == [("attention", i) for i in range(attention)] + [("expert", i) for i in range(experts)]
            for num_experts in range(max(1, experts), 10):
                held = [e for worker in range(experts) for e in split.expert_range(worker, num_experts)]
                assert held == (list(range(num_experts)) if experts else [])


@pytest.mark.parametrize(("attention", "experts", "field"), [(0, 1, "attention"), (1, -1, "experts")])
def test_too_few_workers_are_refused(attention: int, experts: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is"):
        EngineSplit(attention, experts)


def test_more_expert_workers_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="start at most 4 expert workers"):
        EngineSplit(1, 5).expert_range(0, 4)
