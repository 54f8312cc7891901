"""What ranks of an expert-parallel group decide together: the depth of the all-to-all, which experts change places.

Every rank counts its own tokens, all counts go to all ranks, and the first rank's answer counts for all of them, so
that rounding on different machines cannot part them.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from laconic.collectives import native
from laconic.cost.moe.hierarchy import DepthChoice, Hierarchy, RowCounts, best_depth, count_vector, level_costs
from laconic.cost.moe.rates import Coding, MoERates
from laconic.errors import ConfigError
from laconic.moe.hierarchy import HierarchicalDispatcher
from laconic.moe.routing import Routing
from laconic.moe.swap_plan import SwapPlan, plan_swaps, swap_tables

__all__ = ["agree_on_depth", "agree_on_swaps", "first_answer", "gather_counts", "hierarchy_of"]

T = TypeVar("T")


def hierarchy_of(dispatcher: HierarchicalDispatcher) -> Hierarchy:
    """The dispatcher's levels for the cost model; a node is a part of level 1."""
    return Hierarchy(dispatcher.levels.num_ranks, dispatcher.levels.num_groups[1:])


def gather_counts(
    dispatcher: HierarchicalDispatcher, routing: Routing, hierarchy: Hierarchy | None = None
) -> RowCounts:
    """Rows of every rank by group at every level, without duplicates; the same on all ranks.

    routing: of this rank's tokens, its experts numbered by slot. All ranks of the group call this together.
    hierarchy: the dispatcher's levels and who shares a machine; None: see `hierarchy_of`.
    """
    hierarchy, group = hierarchy or hierarchy_of(dispatcher), dispatcher.group
    tokens, experts = (x.detach().cpu().numpy() for x in (routing.tokens, routing.experts))
    vector = torch.from_numpy(count_vector(tokens, experts, routing.num_experts, hierarchy)).to(routing.experts.device)
    told = vector.new_empty(group.size(), len(vector))
    native.all_gather(told, vector, group).wait()
    return RowCounts.of_vectors(told.cpu().numpy(), hierarchy)


def agree_on_depth(
    dispatcher: HierarchicalDispatcher,
    routing: Routing,
    row_nbytes: float,
    rates: MoERates,
    coding: Coding | None = None,
) -> DepthChoice:
    """Let the dispatcher take the depth that is predicted to be fastest for this routing, the same on all ranks.

    Arguments:
        routing: of this rank's tokens, its experts numbered by slot.
        row_nbytes: of a row with what travels along, ids and weights.
        coding: if rows are coded on the wire.

    All ranks of the group call this together. Returns all candidates and what they were predicted to take.
    """
    choice = best_depth(gather_counts(dispatcher, routing), row_nbytes, rates, coding)
    choice = first_answer(choice, dispatcher.group)
    dispatcher.set_depth(choice.depth)
    return choice


def agree_on_swaps(
    dispatcher: HierarchicalDispatcher,
    routing: Routing,
    row_nbytes: float,
    rates: MoERates,
    *,
    num_pairs: int = 1,
    coding: Coding | None = None,
) -> SwapPlan:
    """The pairs of slots whose exchange shortens the all-to-all of this routing most, at the current depth.

    Arguments as in `agree_on_depth`; at most `num_pairs` pairs, rows being counted anew after each, since pairs share
    tokens. The same on all ranks, which call this together. Nothing moves yet; `ExpertMover` does that.

    Raises ConfigError for less than one pair.
    """
    if num_pairs < 1:
        raise ConfigError(f"num_pairs is {num_pairs}, but a plan looks for at least one pair")
    costs = level_costs(gather_counts(dispatcher, routing), dispatcher.depth, row_nbytes, rates, coding)
    num_groups = [cost.num_groups for cost in costs]
    slots, plan = routing.experts, None
    for _ in range(num_pairs):
        tables = swap_tables(routing.tokens, slots, routing.num_tokens, routing.num_experts, num_groups)
        native.all_reduce(tables.flat, dispatcher.group).wait()
        pair = first_answer(plan_swaps(tables, costs), dispatcher.group)
        plan = pair if plan is None else plan.then(pair)
        if not pair.pairs:
            break
        slots = torch.tensor(pair.new_slots(routing.num_experts), device=slots.device)[slots]
    assert plan is not None
    return plan


def first_answer(mine: T, group: dist.ProcessGroup) -> T:
    """What the group's first rank has; all ranks of the group call this together."""
    told = [mine]
    dist.broadcast_object_list(told, src=dist.get_process_group_ranks(group)[0], group=group)
    return told[0]
