"""Decisions that the ranks of an expert-parallel group make together: the depth of the all-to-all.

Every rank counts its own tokens, all counts go to all ranks, and the first rank's answer counts for all of them, so
that different rounding on different machines cannot lead to different decisions.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.cost.moe.hierarchy import DepthChoice, RowCounts, best_depth, count_vector
from laconic.cost.moe.rates import Coding, MoERates
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.routing import Routing
from laconic.topology import Levels

T = TypeVar("T")


def gather_counts(
    routing: Routing, levels: Levels, group: dist.ProcessGroup, device: torch.device | None = None
) -> RowCounts:
    """Count rows of every rank of `group`, which all call it, by group at every level, without duplicates.

    `routing` is of this rank's tokens, its experts numbered by slot. Counts travel on `device`, or else the routing's.
    """
    tokens, experts = (x.detach().cpu().numpy() for x in (routing.tokens, routing.experts))
    vector = torch.from_numpy(count_vector(tokens, experts, routing.num_experts, levels))
    vector = vector.to(device or routing.experts.device)
    gathered = vector.new_empty(group.size(), len(vector))
    torch_compat.all_gather(gathered, vector, group).wait()
    return RowCounts.of_vectors(gathered.cpu().numpy(), levels)


def agree_on_depth(
    dispatcher: HierarchicalDispatcher,
    routing: Routing,
    row_nbytes: float,
    rates: MoERates,
    coding: Coding | None = None,
) -> DepthChoice:
    """Set the dispatcher's depth to the one predicted to be fastest for this routing, the same on all ranks.

    All ranks of the group call this together.

    Args:
        dispatcher: whose depth is set.
        routing: of this rank's tokens, its experts numbered by slot.
        row_nbytes: of a row with its ids and weights.
        rates: of the cluster.
        coding: if rows are coded in transit.

    Returns:
        All candidates and their predicted seconds.
    """
    choice = best_depth(gather_counts(routing, dispatcher.levels, dispatcher.group), row_nbytes, rates, coding)
    choice = first_answer(choice, dispatcher.group)
    dispatcher.set_depth(choice.depth)
    return choice


def first_answer(mine: T, group: dist.ProcessGroup) -> T:
    """Return the value of the group's first rank; all ranks of the group call this together."""
    answer = [mine]
    dist.broadcast_object_list(answer, src=registered_ranks(group)[0], group=group)
    return answer[0]
