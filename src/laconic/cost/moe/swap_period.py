"""When exchanging experts pays.

A swap costs seconds once; without it every step loses what the swap would gain. `SwapPeriod` swaps when the losses
since the last swap have reached its cost. Where routing stays as it is, that costs twice what swapping at once would
have, without knowing beforehand that it stays (the ski rental argument). Where the loss grows evenly, by `growth`
seconds per step, it is the best there is: swapping every p steps takes, per step,

    cost / p + growth * (p - 1) / 2

whose best p is next to sqrt(2 * cost / growth) (`best_period`; the square root rule of inventory theory), when the
losses, growth * p^2 / 2, equal the cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.shape import LayerShape
from laconic.cost.wire.seconds import World
from laconic.errors import ConfigError

__all__ = ["DIRECTIONS", "SwapPeriod", "best_period", "expert_nbytes", "move_seconds"]

DIRECTIONS = 4
"""All-to-alls of a layer in a training step: dispatch and combine, forward and backward."""

MAX_PERIOD = 4096


def expert_nbytes(shape: LayerShape, esp: int = 1, nbytes_per_parameter: float = 16.0) -> float:
    """Bytes of what moves with an expert's shard. 16 per parameter: weight and gradient master copy of 4 bytes each
    and two moments of 4; without the gradient and with 8-bit moments, 6."""
    return shape.num_gemms * shape.model_dim * shape.hidden_dim / esp * nbytes_per_parameter


def move_seconds(nbytes: float, world: World, rates: MoERates, group: str = "ep") -> float:
    """Of two ranks of a group that send each other so many bytes at once, by the line of `send`, else all-to-all's."""
    return rates.link(group, world).line("send").seconds(nbytes)


def best_period(cost_seconds: float, growth_seconds: float, max_period: int = MAX_PERIOD) -> int:
    """The whole number of steps between swaps for which cost / p + growth * (p - 1) / 2 is least, 1 .. max_period.

    cost_seconds: of looking and swapping. growth_seconds: per step and step. Without growth, max_period.
    """
    if growth_seconds <= 0:
        return max_period
    lower = max(1, min(max_period, math.isqrt(int(min(2 * cost_seconds / growth_seconds, float(max_period) ** 2)))))

    def seconds(period: int) -> float:
        return cost_seconds / period + growth_seconds * (period - 1) / 2

    return min((lower, min(lower + 1, max_period)), key=lambda period: (seconds(period), period))


@dataclass
class SwapPeriod:
    """Decides when to look for a swap and whether one that was found should be made. Equal on ranks with equal input.

    Looks come 1, 2, 4, ... steps after a swap, sooner where the losses will have reached its cost.
    Raises ConfigError for a cost that is negative or periods that are no range.
    """

    cost_seconds: float
    """Of a swap: moving the experts."""
    min_period: int = 1
    """Steps between looks, at least."""
    max_period: int = MAX_PERIOD
    """Steps between looks, at most."""
    next_step: int = 0
    """When to look next."""
    lost_seconds: float = 0.0
    """Since the last swap, as far as looks tell."""
    last_swap: int | None = None
    """Or the first look."""
    last_look: int = 0
    last_gain_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.cost_seconds >= 0:
            raise ConfigError(f"cost_seconds is {self.cost_seconds}, but seconds must not be negative")
        if not 1 <= self.min_period <= self.max_period:
            raise ConfigError(f"min_period is {self.min_period}, but it must be from 1 to max_period {self.max_period}")

    def due(self, step: int) -> bool:
        """Whether to look in this step."""
        return step >= self.next_step

    def decide(self, step: int, gain_seconds: float) -> bool:
        """Whether to swap now, having found a plan that would gain `gain_seconds` per step; sets the next look.

        Pass DIRECTIONS times `SwapPlan.gain_seconds`, 0 for an empty plan.
        """
        gain = max(0.0, gain_seconds)
        if self.last_swap is None:
            self.last_swap = self.last_look = step
        self.lost_seconds += (step - self.last_look) * (self.last_gain_seconds + gain) / 2
        swap = gain > 0 and self.lost_seconds >= self.cost_seconds
        if swap:
            self.last_swap, self.lost_seconds, gain = step, 0.0, 0.0
        self.last_look, self.last_gain_seconds = step, gain
        interval = max(1, step - self.last_swap)
        if gain:
            interval = min(interval, max(1, math.ceil((self.cost_seconds - self.lost_seconds) / gain)))
        self.next_step = step + max(self.min_period, min(interval, self.max_period))
        return swap
