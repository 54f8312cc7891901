"""Break-even period of an expert migration.

A swap costs seconds once; without it every step loses what the swap would gain. `SwapPeriod` swaps when the losses
since the swap was found have reached its cost. Where routing stays as it is, that costs twice what swapping at once
would have, without knowing beforehand that it stays (the ski rental argument). Where the loss grows evenly, by `growth`
seconds per step, it is optimal: swapping every p steps takes, per step,

    cost / p + growth * (p - 1) / 2

whose best p is next to sqrt(2 * cost / growth) (the square root rule of inventory theory), when the losses,
growth * p^2 / 2, equal the cost.

The best of many swaps, judged by the tokens it was chosen by, looks better than it is. So these tokens do not count:
losses are what the swap would have gained on tokens of later steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.cost.comm.seconds import GroupShape, sent_nbytes
from laconic.cost.moe.rates import MoERates
from laconic.errors import ConfigError

DIRECTIONS = 4
"""All-to-alls of a layer in a training step: dispatch and combine, forward and backward."""

MAX_PERIOD = 4096

QUERY_SHARE = 0.01
"""Share of the time of a layer's all-to-alls that queries of its routing may take."""

_SAMPLED_TOKENS = 4096
"""Of all ranks: shares of rows are off by about 1 %."""
_TOUCHED_NBYTES = 16
"""Bytes read and written by a query, per token, slot and number of groups: two fp32 masks, each written and read."""
_TELLING = 2
"""Messages that announce the result: its length, and the result."""


def move_seconds(nbytes: float, group_shape: GroupShape, rates: MoERates, group: str = "ep") -> float:
    """Predict two ranks of a group sending each other `nbytes` at once, on different nodes if the group has several.

    By the line of `send`, else all-to-all's. A group's `send` goes to the neighbour, which is mostly in the same node;
    so between nodes that of the group that joins them counts (inter1), or all-to-all's if that was not measured.
    """
    line = rates.link(group, group_shape).line("send")
    if group_shape.num_nodes == 1 or group_shape.ranks_per_node == 1:
        return line.seconds(nbytes)
    across = rates.groups.get("inter1")
    between = rates.link(group, group_shape).line("all_to_all") if across is None else across.line("send")
    return max(line.seconds(nbytes), between.seconds(nbytes))


def query_seconds(
    num_tokens: int, num_experts: int, num_groups: Sequence[int], group_shape: GroupShape, rates: MoERates
) -> float:
    """Predict one query of a layer's routing: gather a sample of tokens, price all swaps on one rank, tell the plan.

    Two products per number of groups.
    """
    most = sampled_tokens(group_shape.num_ranks)
    entries = group_shape.num_ranks * min(num_tokens, most) * num_experts
    products = rates.products_seconds(entries * (num_experts * len(num_groups) + sum(num_groups)), 2 * len(num_groups))
    touched = rates.copy.seconds(_TOUCHED_NBYTES * entries * len(num_groups))
    line = rates.link("ep", group_shape).line("all_gather")
    gathered = line.seconds(sent_nbytes("all_gather", most * num_experts / 8, group_shape.num_ranks))
    return products + touched + gathered + _TELLING * line.alpha_seconds


def sampled_tokens(num_ranks: int) -> int:
    """Return the most tokens of each rank that a query of its routing counts."""
    return max(1, _SAMPLED_TOKENS // num_ranks)


def query_distance(query_seconds: float, step_seconds: float) -> int:
    """Return the least steps between queries with which they take QUERY_SHARE of `step_seconds`, 1 .. MAX_PERIOD.

    Args:
        step_seconds: of all that a swap could shorten, the layer's all-to-alls in a step.
    """
    return max(1, math.ceil(min(query_seconds / max(QUERY_SHARE * step_seconds, 1e-30), float(MAX_PERIOD))))


@dataclass
class SwapPeriod:
    """Decides when to query a layer's routing and whether to swap. Equal on ranks with equal input.

    A query finds a swap (`found`) or, where one has been found, weighs it by the tokens of its own step (`weighed`).
    Queries come 1, 2, 4, ... steps after a swap, sooner where the losses will have reached its cost, but never so often
    that they take more than QUERY_SHARE of the all-to-alls' time.
    """

    cost_seconds: float
    """Seconds of a swap: moving the experts."""
    min_period: int = 1
    """Steps between queries, at least."""
    max_period: int = MAX_PERIOD
    """Steps between queries, at most."""
    next_step: int = 0
    """Step of the next query."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Swaps found: slots whose experts should change places."""
    lost_seconds: float = 0.0
    """Seconds lost since the swap was found, as measured by queries."""
    last_swap: int | None = None
    """Step of the last swap, or of the first query."""
    last_look: int = 0
    last_gain_seconds: float | None = None
    """Gain per step of the swap found, by the last query that weighed it."""

    def __post_init__(self) -> None:
        if not self.cost_seconds >= 0:
            raise ConfigError(f"cost_seconds is {self.cost_seconds}, but seconds must not be negative")
        if not 1 <= self.min_period <= self.max_period:
            raise ConfigError(f"min_period is {self.min_period}, but it must be from 1 to max_period {self.max_period}")

    def due(self, step: int) -> bool:
        """Return whether to query in this step."""
        return step >= self.next_step

    def found(self, step: int, pairs: Sequence[tuple[int, int]], gain_seconds: float, distance: int = 1) -> None:
        """Record that a query found `pairs`, none if nothing gains; set the next query.

        Args:
            gain_seconds: per step, by the tokens that they were chosen by; only decides when to query next. Pass
                DIRECTIONS times `SwapPlan.gain_seconds`.
            distance: least steps to the next query, see `query_distance`.
        """
        if self.last_swap is None:
            self.last_swap = step
        self.pairs = tuple(pairs)
        self.lost_seconds, self.last_gain_seconds, self.last_look = 0.0, None, step
        self._set_next(step, gain_seconds if self.pairs else 0.0, distance)

    def weighed(self, step: int, gain_seconds: float, distance: int = 1) -> bool:
        """Return whether to swap now, given the gain of `pairs` on this step's tokens; set the next query.

        A swap that loses in all is given up.

        Args:
            gain_seconds: per step, by tokens of this step, negative if the swap would lose.
            distance: least steps to the next query, see `query_distance`.
        """
        before = gain_seconds if self.last_gain_seconds is None else self.last_gain_seconds
        self.lost_seconds += (step - self.last_look) * (before + gain_seconds) / 2
        self.last_look, self.last_gain_seconds = step, gain_seconds
        swap = gain_seconds > 0 and self.lost_seconds >= self.cost_seconds
        if swap:
            self.last_swap = step
        if swap or self.lost_seconds <= 0:
            self.pairs, self.lost_seconds, self.last_gain_seconds = (), 0.0, None
        self._set_next(step, gain_seconds if self.pairs else 0.0, distance)
        return swap

    def _set_next(self, step: int, gain_seconds: float, distance: int) -> None:
        interval = max(1, step - (step if self.last_swap is None else self.last_swap))
        if gain_seconds > 0:
            left = (self.cost_seconds - self.lost_seconds) / gain_seconds
            interval = max(1, min(interval, math.ceil(min(left, float(MAX_PERIOD)))))
        self.next_step = step + min(max(self.min_period, distance, interval), self.max_period)
