"""What a layer's routing was like when its way was chosen, and whether it still is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from laconic.errors import ConfigError
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.routing import RoutedTokens, Routing, SoftRouting

__all__ = ["Drift", "RoutingStatistics", "RoutingWatch"]


@dataclass(frozen=True)
class Drift:
    """How far a layer may go from what it was priced for. Raises ConfigError for what is no limit.

    The defaults are about what moves a prediction by as much as it is uncertain anyway, a tenth.
    """

    tokens: float = 0.25
    """Largest relative change of the tokens of a rank."""
    load: float = 0.1
    """Largest change of the experts' shares of all rows: half the sum of absolute differences (total variation), so the
    share of rows that go elsewhere than before."""
    duplicates: float = 0.05
    """Largest change of the duplicate rate to nodes."""
    check_every: int = 16
    """Steps between two looks, in which ranks tell each other E + 3 numbers per layer."""
    smoothing: float = 0.9
    """Of shares of rows: what they were counts this much, the newest forward the rest."""

    def __post_init__(self) -> None:
        for name in ("tokens", "load", "duplicates"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but a limit must not be negative; raise it")
        if self.check_every < 1:
            raise ConfigError(f"check_every is {self.check_every}, but it must be at least 1; raise it")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"smoothing is {self.smoothing}, but it must be from 0 to below 1; change it")


@dataclass(frozen=True)
class RoutingStatistics:
    """What choices hang on, over all ranks."""

    num_tokens: float
    """Mean of the ranks."""
    shares: tuple[float, ...]
    """[E]: of all rows, by expert."""
    duplicates: float
    """Share of rows that go to an EP rank's part of the experts that has the token already."""

    def has_left(self, now: RoutingStatistics, limits: Drift) -> str:
        """Why `now` is no longer like this one; empty if it is."""
        if abs(now.num_tokens - self.num_tokens) > limits.tokens * self.num_tokens:
            return f"tokens of a rank went from {self.num_tokens:.0f} to {now.num_tokens:.0f}"
        moved = sum(abs(a - b) for a, b in zip(self.shares, now.shares, strict=True)) / 2
        if moved > limits.load:
            return f"{moved:.0%} of the rows go to other experts"
        if abs(now.duplicates - self.duplicates) > limits.duplicates:
            return f"duplicates went from {self.duplicates:.0%} to {now.duplicates:.0%}"
        return ""


class RoutingWatch(Hook):
    """Remembers a layer's last tokens and routing, and a smoothed load."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.num_tokens: int | None = None
        self.model_dim, self.dtype = 0, torch.float32
        self.routing: Routing | None = None
        self.keeps_input = False
        self.input: Tensor | None = None
        self._load: Tensor | None = None

    def before_start(self, layer: MoELayer, x: Tensor) -> None:
        """See `Hook`."""
        self.num_tokens = x.shape[:-1].numel()
        self.model_dim, self.dtype = x.shape[-1], x.dtype
        if self.keeps_input:
            self.input = x.detach()

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> None:
        """See `Hook`."""
        routing = tokens.routing
        routing = routing.slots() if isinstance(routing, SoftRouting) else routing
        self.routing = replace(routing, weights=routing.weights.detach(), losses={})
        load = routing.counts().double()
        self._load = load if self._load is None else self._load.lerp(load, 1 - self.smoothing)

    def slots(self, layer: MoELayer) -> Routing | None:
        """The last routing with experts numbered by slot."""
        if self.routing is None or layer.placement is None:
            return self.routing
        return replace(self.routing, experts=layer.placement(self.routing.experts))

    def statistics(self, num_places: int, group: dist.ProcessGroup) -> RoutingStatistics:
        """Of all ranks of `group`, which call it together. num_places: N_EP.

        Raises ConfigError on a rank that has not run the layer.
        """
        routing, load = self.routing, self._load
        if routing is None or load is None or self.num_tokens is None:
            raise ConfigError("the layer has not run yet, but its routing is asked for; call this after a forward")
        place = routing.tokens * num_places + routing.experts // (routing.num_experts // num_places)
        unique = len(torch.unique(place))
        mine = load.new_tensor([float(self.num_tokens), 1.0, float(unique), float(len(routing))])
        told = torch.cat([load, mine])
        torch_compat.all_reduce(told, group).wait()
        *loads, tokens, ranks, unique_rows, rows = told.tolist()
        whole = sum(loads) or 1.0
        return RoutingStatistics(
            tokens / ranks, tuple(one / whole for one in loads), 1 - unique_rows / rows if rows else 0.0
        )
