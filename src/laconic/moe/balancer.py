"""Keeps experts where the fewest rows cross slow links: looks, plans, and moves when it pays (HierMoE, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.swap_period import DIRECTIONS, SwapPeriod, move_seconds
from laconic.errors import ConfigError
from laconic.moe.agreement import agree_on_depth, agree_on_swaps, first_answer, hierarchy_of
from laconic.moe.hierarchy import HierarchicalDispatcher
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.moves import ExpertMover, Moved
from laconic.moe.routing import Routing
from laconic.moe.swap_plan import SwapPlan

__all__ = ["Balanced", "ExpertBalancer"]

T = TypeVar("T")

_ID_NBYTES = 8
"""Of an assignment that travels with a row: the expert's number and a weight in fp32."""


@dataclass(frozen=True)
class Balanced:
    """What one call of `ExpertBalancer.step` found and did; the same on all ranks but for bytes."""

    plans: dict[int, SwapPlan]
    """By layer, of those that were looked at: the best swap, with seconds of one all-to-all before and after."""
    swapped: tuple[int, ...]
    """Layers of which experts have moved."""
    moved: Moved


class _Watch(Hook):
    """Remembers what a layer's gate said last."""

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.row_nbytes = 0.0

    def before_dispatch(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        routing, x = batch["routing"], batch["x"]
        if layer.training and isinstance(routing, Routing):
            self.routing = replace(routing, weights=routing.weights.detach(), losses={})
            entries_per_token = len(routing) / max(1, routing.num_tokens)
            self.row_nbytes = float(x.shape[1] * x.itemsize + _ID_NBYTES * entries_per_token)


class ExpertBalancer:
    """Swaps experts of layers during training where measured routing and the cost model say that it pays.

    Arguments:
        mover: with layers that all have a HierarchicalDispatcher over its group.
        rates: of the cluster; the same file on all ranks.
        num_pairs: at most so many swaps per layer at a time; one is the paper's.
        choose_depth: also let the depth follow the routing.
        coding: if rows are coded on the wire.
        min_period: steps between two looks at a layer, at least.

    Call `step` on all ranks after every optimizer step. When to look at a layer, and whether a swap has paid, decides
    `laconic.cost.moe.swap_period.SwapPeriod`.

    Raises ConfigError for a layer with another dispatcher.
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
    ) -> None:
        self.mover, self.rates, self.num_pairs = mover, rates, num_pairs
        self.choose_depth, self.coding = choose_depth, coding
        self._watches = []
        self.periods: list[SwapPeriod] = []
        """One for each layer."""
        for number, layer in enumerate(mover.layers):
            if not isinstance(layer.dispatcher, HierarchicalDispatcher):
                raise ConfigError(
                    f"layer {number} has a {type(layer.dispatcher).__name__}, but balancing counts rows by level; build"
                    " the layer with a HierarchicalDispatcher"
                )
            self.periods.append(SwapPeriod(self._move_seconds(number), min_period=min_period))
            watch = _Watch()
            self._watches.append(watch)
            layer.hooks = (*layer.hooks, watch)

    def step(self, number: int) -> Balanced | None:
        """Look at the layers that are due after step `number` and move experts where that pays.

        None if no layer was due.
        """
        due = [layer for layer, period in enumerate(self.periods) if period.due(number)]
        if not due:
            return None
        plans = {layer: self._plan(layer) for layer in due}
        for layer in due:
            # Optimizers make their state in the first step.
            self.periods[layer].cost_seconds = self._alike(self._move_seconds(layer))
        swapped = tuple(
            layer for layer, plan in plans.items() if self.periods[layer].decide(number, DIRECTIONS * plan.gain_seconds)
        )
        slots: list[torch.Tensor | None] = [None] * len(self.periods)
        for layer in swapped:
            placement = self.mover.placement(layer)
            went = torch.tensor(plans[layer].new_slots(placement.num_experts), device=placement.slots.device)
            slots[layer] = went[placement.slots]
        moved = self.mover.move(slots) if swapped else Moved(0, 0, 0)
        return Balanced(plans, swapped, moved)

    def _move_seconds(self, number: int) -> float:
        dispatcher = self.mover.layers[number].dispatcher
        assert isinstance(dispatcher, HierarchicalDispatcher)
        hierarchy = hierarchy_of(dispatcher)
        world = hierarchy.world(hierarchy.levels(1)[0])
        return move_seconds(self.num_pairs * self.mover.expert_nbytes(number), world, self.rates)

    def _plan(self, number: int) -> SwapPlan:
        dispatcher, watch = self.mover.layers[number].dispatcher, self._watches[number]
        assert isinstance(dispatcher, HierarchicalDispatcher)
        if watch.routing is None:
            raise ConfigError(
                f"layer {number} has routed nothing in training yet, so there is nothing to balance; call step after a"
                " training step of all layers, with a gate that assigns tokens to experts"
            )
        slots = self.mover.placement(number)(watch.routing.experts)
        routing = replace(watch.routing, experts=slots)
        if self.choose_depth:
            agree_on_depth(dispatcher, routing, watch.row_nbytes, self.rates, self.coding)
        plan = agree_on_swaps(
            dispatcher, routing, watch.row_nbytes, self.rates, num_pairs=self.num_pairs, coding=self.coding
        )
        return self._alike(plan)

    def _alike(self, mine: T) -> T:
        """The first replica's answer: those with the same experts move alike."""
        return mine if self.mover.replicas is None else first_answer(mine, self.mover.replicas)
