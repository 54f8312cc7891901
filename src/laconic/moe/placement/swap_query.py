"""Query of the routing of layers: the gain of swapping experts, agreed by all ranks of a group.

Every rank counts its own tokens, one all-reduce adds up the counts of all layers, and the first rank's answer counts
for all, so that different rounding on different machines cannot lead to different plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from laconic.cost.moe.hierarchy import LevelCost, level_lines
from laconic.cost.moe.rates import Coding, MoERates
from laconic.errors import ConfigError
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.placement.consensus import first_answer
from laconic.moe.placement.swap_search import SwapPlan, SwapTables, group_rows, level_seconds, plan_swaps, swap_tables
from laconic.moe.routing import Routing

__all__ = ["RoutingQuery", "agree_on_swaps", "query_routing"]


@dataclass(frozen=True, eq=False)
class RoutingQuery:
    """Query of one layer."""

    dispatcher: HierarchicalDispatcher
    routing: Routing
    """Of this rank's tokens, its experts numbered by slot."""
    row_nbytes: float
    """Bytes of a row with its ids and weights."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Slots whose exchange is to be weighed, the same on all ranks; none: the best pairs are to be found."""

    @property
    def num_groups(self) -> tuple[int, ...]:
        """Numbers of groups of the levels at the dispatcher's depth, each number once."""
        stages = self.dispatcher.levels.stages(self.dispatcher.depth)
        return tuple(dict.fromkeys(stage.num_groups for stage in stages))


def query_routing(
    asked: Sequence[RoutingQuery],
    group: dist.ProcessGroup,
    rates: MoERates,
    *,
    num_pairs: int = 1,
    coding: Coding | None = None,
) -> list[SwapPlan]:
    """Plan swaps for each layer by the tokens of all ranks of `group`, which call this together and get the same.

    For layers with `pairs` a plan has the gain of those, which may be negative; for the others it has the at most
    `num_pairs` pairs that shorten the all-to-all most, at the current depth. Rows are counted anew after each pair,
    since pairs share tokens, in a round of messages of its own; the first round serves all layers. Nothing moves yet;
    `ExpertMover` does that.

    Args:
        asked: one query per layer.
        group: the ranks.
        rates: of the cluster.
        num_pairs: pairs to find, at most.
        coding: if rows are coded in transit.

    Raises:
        ConfigError: num_pairs is below 1.
    """
    if num_pairs < 1:
        raise ConfigError(f"num_pairs is {num_pairs}, but a plan has at least one pair")
    slots = [one.routing.experts for one in asked]
    plans: dict[int, SwapPlan] = {}
    open_, rounds = list(range(len(asked))), 0
    while open_ and rounds < num_pairs:
        counted = [_Counted.of(asked[i], slots[i]) for i in open_]
        total = torch.cat([one.vector for one in counted])
        torch_compat.all_reduce(total, group).wait()
        parts = total.split([one.vector.numel() for one in counted])
        answers = first_answer([one.plan(part, rates, coding) for one, part in zip(counted, parts, strict=True)], group)
        for i, plan in zip(open_, answers, strict=True):
            plans[i] = plans[i].then(plan) if i in plans else plan
            if plan.pairs:
                slots[i] = torch.tensor(plan.new_slots(asked[i].routing.num_experts), device=slots[i].device)[slots[i]]
        open_ = [i for i, plan in zip(open_, answers, strict=True) if plan.pairs and not asked[i].pairs]
        rounds += 1
    return [plans[i] for i in range(len(asked))]


def agree_on_swaps(
    dispatcher: HierarchicalDispatcher,
    routing: Routing,
    row_nbytes: float,
    rates: MoERates,
    *,
    num_pairs: int = 1,
    coding: Coding | None = None,
) -> SwapPlan:
    """Plan the swaps of slots that shorten the all-to-all of this routing most, at the current depth.

    All ranks of the dispatcher's group call this together.

    Args:
        dispatcher, routing, row_nbytes: see `RoutingQuery`.
        rates, num_pairs, coding: see `query_routing`.

    Raises:
        ConfigError: see `query_routing`.
    """
    asked = [RoutingQuery(dispatcher, routing, row_nbytes)]
    return query_routing(asked, dispatcher.group, rates, num_pairs=num_pairs, coding=coding)[0]


@dataclass(frozen=True, eq=False)
class _Counted:
    """One rank's counts for a layer, to be added up over ranks."""

    asked: RoutingQuery
    vector: Tensor
    """int64: the tables' `flat`; for pairs, rows of groups by number of groups, before and after the exchange."""

    @classmethod
    def of(cls, asked: RoutingQuery, slots: Tensor) -> _Counted:
        routing, groups = asked.routing, asked.num_groups
        if not asked.pairs:
            tables = swap_tables(routing.tokens, slots, routing.num_tokens, routing.num_experts, groups)
            return cls(asked, tables.flat)
        plan = SwapPlan(asked.pairs, 0.0, 0.0)
        moved = torch.tensor(plan.new_slots(routing.num_experts), device=slots.device)[slots]
        rows = [group_rows(routing.tokens, at, routing.num_experts, g) for at in (slots, moved) for g in groups]
        return cls(asked, torch.cat(rows))

    def plan(self, total: Tensor, rates: MoERates, coding: Coding | None) -> SwapPlan:
        """Plan from `total`, the sum of all ranks' vectors."""
        groups, num_experts = self.asked.num_groups, self.asked.routing.num_experts
        if not self.asked.pairs:
            tables = SwapTables(num_experts, groups, total)
            return plan_swaps(tables, self._costs({g: tables.load(g) for g in groups}, rates, coding))
        now, then = total.split(sum(groups))
        loads, moved = (dict(zip(groups, part.split(list(groups)), strict=True)) for part in (now, then))
        costs = self._costs(loads, rates, coding)
        return SwapPlan(self.asked.pairs, level_seconds(loads, costs), level_seconds(moved, costs))

    def _costs(self, loads: dict[int, Tensor], rates: MoERates, coding: Coding | None) -> tuple[LevelCost, ...]:
        fullest = {g: float(load.max()) for g, load in loads.items()}
        asked, dispatcher = self.asked, self.asked.dispatcher
        return level_lines(dispatcher.levels, dispatcher.depth, fullest, asked.row_nbytes, rates, coding)
