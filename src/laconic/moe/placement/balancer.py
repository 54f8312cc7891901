"""Migrates experts so that the busiest link and rank take less time, when that gains more than it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe.hierarchy import stage_shape
from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.swap_period import DIRECTIONS, SwapPeriod, move_seconds, query_distance, query_seconds
from laconic.errors import ConfigError
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.placement.consensus import agree_on_depth, first_answer
from laconic.moe.placement.migration import ExpertMover, Moved
from laconic.moe.placement.query import RoutingQuery, query_routing
from laconic.moe.placement.routing_record import record_of
from laconic.moe.placement.search import SwapPlan

T = TypeVar("T")

_PRODUCTS = 3
"""Products of a row with each weight in a training step: one forward, two backward."""

Policy = Literal["cost_aware", "always"]


@dataclass(frozen=True)
class Balanced:
    """Result of one call of `ExpertBalancer.step`; the same on all ranks but for bytes."""

    plans: dict[int, SwapPlan]
    """By layer, of those that were queried: the swap that was found or weighed, with seconds of one all-to-all before
    and after, by the tokens of this step.
    """
    swapped: tuple[int, ...]
    """Layers whose experts have moved."""
    moved: Moved


class ExpertBalancer:
    """Swaps experts of layers during training where measured routing and the cost model predict a gain.

    Call `step` on all ranks after every optimizer step.

    Args:
        mover: with layers that all have a HierarchicalDispatcher over its group.
        rates: of the cluster; the same file on all ranks.
        num_pairs: at most so many swaps per layer at a time; one is the paper's.
        choose_depth: also adapt the depth to the routing.
        coding: if rows are coded in transit.
        min_period: steps between two routing queries of a layer, at least.
        policy: `cost_aware`: a swap is found on the tokens of one step and made when, on tokens of later ones, it would
            have gained what it costs (`SwapPeriod`). `always`: HierMoE's own; every `min_period` steps the best swap
            is made if it shortens the all-to-all of that step's tokens.

    Raises:
        ConfigError: a layer has another dispatcher.
    """

    def __init__(
        self,
        mover: ExpertMover,
        rates: MoERates,
        *,
        num_pairs: int = 1,
        choose_depth: bool = False,
        coding: Coding | None = None,
        min_period: int = 1,
        policy: Policy = "cost_aware",
    ) -> None:
        self.mover, self.rates, self.num_pairs = mover, rates, num_pairs
        self.choose_depth, self.coding, self.policy = choose_depth, coding, policy
        self._records = [record_of(layer) for layer in mover.layers]
        self.periods: list[SwapPeriod] = []
        """One for each layer."""
        for number, layer in enumerate(mover.layers):
            if not isinstance(layer.dispatcher, HierarchicalDispatcher):
                raise ConfigError(
                    f"layer {number} has a {type(layer.dispatcher).__name__}, but balancing counts rows by level; build"
                    " the layer with a HierarchicalDispatcher"
                )
            across = [(0, mover.placement(number).num_experts - 1)] * num_pairs
            self.periods.append(SwapPeriod(self._move_seconds(number, across), min_period=min_period))

    def step(self, number: int) -> Balanced | None:
        """Query the routing of layers due after step `number` and move experts where that gains; None if none is."""
        due = [layer for layer, period in enumerate(self.periods) if period.due(number)]
        if not due:
            return None
        plans, swapped = self._decide(number, due)
        slots: list[torch.Tensor | None] = [None] * len(self.periods)
        for layer in swapped:
            placement = self.mover.placement(layer)
            went = torch.tensor(plans[layer].new_slots(placement.num_experts), device=placement.slots.device)
            slots[layer] = went[placement.slots]
        moved = self.mover.move(slots) if swapped else Moved(0, 0, 0)
        return Balanced(plans, swapped, moved)

    def _decide(self, number: int, due: Sequence[int]) -> tuple[dict[int, SwapPlan], tuple[int, ...]]:
        """Return plans of the layers that are due, and which of these swap; the first replica decides for all."""
        asked = [self._query(layer) for layer in due]
        group = asked[0].dispatcher.group
        found = query_routing(asked, group, self.rates, num_pairs=self.num_pairs, coding=self.coding)
        # Optimizers make their state in the first step. Numbers of tokens differ between ranks.
        mine = [
            (plan, self._move_seconds(layer, plan.pairs), self._distance(one, plan))
            for layer, one, plan in zip(due, asked, found, strict=True)
        ]
        agreed = self._alike(first_answer(mine, group))
        swapped = []
        for layer, one, (plan, cost_seconds, distance) in zip(due, asked, agreed, strict=True):
            period, gain = self.periods[layer], DIRECTIONS * plan.gain_seconds
            period.cost_seconds = cost_seconds
            if self.policy == "always":
                period.next_step = number + period.min_period
                swaps = bool(plan.pairs)
            elif one.pairs:
                swaps = period.weighed(number, gain, distance)
            else:
                period.found(number, plan.pairs, gain, distance)
                swaps = False
            if swaps:
                swapped.append(layer)
        return {layer: plan for layer, (plan, *_) in zip(due, agreed, strict=True)}, tuple(swapped)

    def _query(self, number: int) -> RoutingQuery:
        layer, record = self.mover.layers[number], self._records[number].trained
        dispatcher = layer.dispatcher
        assert isinstance(dispatcher, HierarchicalDispatcher)
        if self.mover.placement(number).copies is not None:
            raise ConfigError(
                f"layer {number} has copies of experts, but swaps are weighed without; drop them with"
                " copy_hot_experts(layers, grid, 0), or call no step"
            )
        if record is None:
            raise ConfigError(
                f"layer {number} has routed nothing in training yet, so there is nothing to balance; call step after a"
                " training step of all layers, with a gate that assigns tokens to experts"
            )
        routing = record.by_slot(layer)
        if self.choose_depth:
            agree_on_depth(dispatcher, routing, record.row_nbytes, self.rates, self.coding)
        pairs = self.periods[number].pairs if self.policy == "cost_aware" else ()
        values = self.mover.expert_numel(number)
        computing = _PRODUCTS / DIRECTIONS * self.rates.gemm.seconds_per_byte * values
        return RoutingQuery(dispatcher, routing, record.row_nbytes, pairs, computing)

    def _distance(self, asked: RoutingQuery, plan: SwapPlan) -> int:
        """Return the least steps to the next query that keep the time of queries negligible."""
        seconds = query_seconds(
            asked.routing.num_tokens,
            asked.routing.num_experts,
            asked.num_groups,
            self._group_shape(asked.dispatcher),
            self.rates,
        )
        return query_distance(seconds, DIRECTIONS * plan.before_seconds)

    def _move_seconds(self, number: int, pairs: Sequence[tuple[int, int]]) -> float:
        dispatcher = self.mover.layers[number].dispatcher
        assert isinstance(dispatcher, HierarchicalDispatcher)
        nbytes, group_shape = self.mover.expert_nbytes(number), self._group_shape(dispatcher)
        if group_shape.num_nodes == 1:
            return move_seconds(len(pairs) * nbytes, group_shape, self.rates)
        each = self.mover.placement(number).num_experts // group_shape.num_nodes
        crossing = sum(a // each != b // each for a, b in pairs)
        seconds = move_seconds(crossing * nbytes, group_shape, self.rates) if crossing else 0.0
        if len(pairs) > crossing:
            node = GroupShape(group_shape.ranks_per_node, group_shape.ranks_per_node)
            seconds += move_seconds((len(pairs) - crossing) * nbytes, node, self.rates, "intra1")
        return seconds

    def _group_shape(self, dispatcher: HierarchicalDispatcher) -> GroupShape:
        return stage_shape(dispatcher.levels, dispatcher.levels.stages(1)[0])

    def _alike(self, mine: T) -> T:
        """Return the first replica's answer: ranks with the same experts move alike."""
        return mine if self.mover.replicas is None else first_answer(mine, self.mover.replicas)
