"""All ranks of a hierarchical all-to-all at once, without processes: who holds which rows for which experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.moe.dispatch.send_plan import HeldRows, SendPlan, plan_recv, plan_send
from laconic.topology import Levels

LEVELS = [Levels(1), Levels(3), Levels(4, (1, 2)), Levels(4, (1, 2, 4)), Levels(8, (1, 2, 4)), Levels(12, (1, 2, 6))]


def random_masks(num_ranks: int, num_tokens: int, num_experts: int, rate: float, seed: int) -> Tensor:
    """bool [G, n, E]; tokens without any expert among them."""
    return torch.rand(num_ranks, num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) < rate


def held_by(mask: Tensor) -> HeldRows:
    rows, experts = mask.nonzero().unbind(1)
    return HeldRows(len(mask), rows, experts)


def travel(
    masks: Tensor, levels: Levels, depth: int
) -> tuple[list[list[SendPlan]], list[HeldRows], list[list[tuple[int, int]]]]:
    """The legs [stage][rank], what ranks hold in the end, and where each row there comes from: (rank, token)."""
    experts_per_rank = masks.shape[2] // levels.num_ranks
    held = [held_by(mask) for mask in masks]
    origins = [[(rank, token) for token in range(len(mask))] for rank, mask in enumerate(masks)]
    legs = []
    for stage in levels.stages(depth):
        left = [plan_send(one, stage, experts_per_rank) for one in held]
        held, origins_before, origins = [], origins, []
        for rank in range(levels.num_ranks):
            place, ids, here = stage.place(rank), [], []
            for peer in stage.peers(rank):
                leg = left[peer]
                ids.append(leg.ids.split(leg.entry_splits)[place])
                here += [origins_before[peer][row] for row in leg.rows.split(leg.row_splits)[place].tolist()]
            held.append(plan_recv(torch.cat(ids), len(here)))
            origins.append(here)
        legs.append(left)
    return legs, held, origins


def or_masks(masks: Tensor, num_groups: int) -> Tensor:
    """bool [G, n, num_groups]: whether a token has an expert in the group."""
    return masks.view(*masks.shape[:2], num_groups, -1).any(-1)


@given(
    levels=st.sampled_from(LEVELS),
    num_tokens=st.integers(0, 6),
    experts_per_rank=st.integers(1, 3),
    rate=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_every_assignment_arrives_once_with_its_row_at_every_depth(
    levels: Levels, num_tokens: int, experts_per_rank: int, rate: float, seed: int
) -> None:
    masks = random_masks(levels.num_ranks, num_tokens, levels.num_ranks * experts_per_rank, rate, seed)
    for depth in range(1, levels.max_depth + 1):
        _, held, origins = travel(masks, levels, depth)
        found = []
        for rank, (one, here) in enumerate(zip(held, origins, strict=True)):
            assert len(here) == one.num_rows
            assert len(set(here)) == len(here), "a row came twice"
            assert (one.experts // experts_per_rank == rank).all()
            found += [(*here[row], expert) for row, expert in zip(one.rows.tolist(), one.experts.tolist(), strict=True)]
        assert sorted(found) == [tuple(index) for index in masks.nonzero().tolist()]


@given(levels=st.sampled_from(LEVELS), rate=st.sampled_from([0.0, 0.2, 0.5, 1.0]), seed=st.integers(0, 99))
def test_rows_of_a_stage_are_the_sum_of_the_or_masks(levels: Levels, rate: float, seed: int) -> None:
    masks = random_masks(levels.num_ranks, 5, 2 * levels.num_ranks, rate, seed)
    for depth in range(1, levels.max_depth + 1):
        legs, _, _ = travel(masks, levels, depth)
        chain = (*levels.num_groups[1:depth], levels.num_ranks)
        for left, num_groups in zip(legs, chain, strict=True):
            # Whatever way a row takes, it reaches each group with one of its experts once.
            assert sum(sum(leg.row_splits) for leg in left) == int(or_masks(masks, num_groups).sum())
            assert sum(sum(leg.entry_splits) for leg in left) == int(masks.sum())
        first = or_masks(masks, chain[0]).sum(1)
        assert [leg.row_splits for leg in legs[0]] == first.tolist()


def test_the_papers_example_crosses_nodes_once() -> None:
    # Two nodes of two ranks with two experts each; both tokens of rank 0 want all four experts of the other node.
    masks = torch.zeros(4, 2, 8, dtype=torch.bool)
    masks[0, :, 4:] = True
    flat, _, _ = travel(masks, Levels(4, (1, 2)), 1)
    nested, _, _ = travel(masks, Levels(4, (1, 2)), 2)
    assert flat[0][0].row_splits == [0, 0, 2, 2]
    assert nested[0][0].row_splits == [0, 2]
    assert nested[1][2].row_splits == [2, 2]


def test_an_assignment_keeps_the_order_of_its_row() -> None:
    leg = plan_send(
        HeldRows(2, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 0, 2, 1, 3])), Levels(2).stages(1)[0], 2
    )
    assert leg.entries.tolist() == [1, 3, 0, 2, 4]
    assert leg.rows.tolist() == [0, 1, 0, 1]
    assert leg.ids.tolist() == [1, 3, 7, 4, 7]
    assert plan_recv(leg.ids[2:], 2).rows.tolist() == [0, 0, 1]


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_ids_of_another_number_of_rows_are_refused(num_rows: int) -> None:
    with pytest.raises(FormatError, match=f"{num_rows} rows came with the experts of 2"):
        plan_recv(torch.tensor([1, 2, 5]), num_rows)
