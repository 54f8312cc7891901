"""The routing of a layer's last forward: recorded once, read by whoever decides about the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.moe.dispatch.base import row_nbytes
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.routing import RoutedTokens, Routing, SoftRouting

__all__ = ["RecordedRouting", "RoutingRecord", "record_of"]

_ID_NBYTES = 8
"""Of an assignment that travels with a row: the expert's number and a weight in fp32."""


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """One forward of a layer on this rank."""

    routing: Routing
    """Experts as the gate numbers them, without gradients; the slots of a SoftRouting."""
    num_tokens: int
    model_dim: int
    dtype: torch.dtype
    row_nbytes: float
    """Of a row with what travels along, ids and weights."""

    def by_slot(self, layer: MoELayer) -> Routing:
        """The routing with experts numbered by the slots in which they are now."""
        if layer.placement is None:
            return self.routing
        return replace(self.routing, experts=layer.placement(self.routing.experts))


class RoutingRecord(Hook):
    """Records the last forward of its layer, and the last one in training."""

    def __init__(self) -> None:
        self.last: RecordedRouting | None = None
        self.trained: RecordedRouting | None = None
        """Of a gate that assigns tokens to experts."""
        self.keeps_input = False
        self.input: Tensor | None = None
        """What came to the layer, where `keeps_input` was set."""
        self._shape, self._dtype = torch.Size(), torch.float32

    def before_start(self, layer: MoELayer, x: Tensor) -> None:
        """See `Hook`."""
        self._shape, self._dtype = x.shape, x.dtype  # dispatchers that share tokens pass a part of them on
        self.input = x.detach() if self.keeps_input else None

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> None:
        """See `Hook`."""
        x, decided = tokens.x, tokens.routing
        routing = decided.slots() if isinstance(decided, SoftRouting) else decided
        routing = replace(routing, weights=routing.weights.detach(), losses={})
        nbytes = row_nbytes(layer.dispatcher, x) + _ID_NBYTES * len(routing) / max(1, routing.num_tokens)
        self.last = RecordedRouting(routing, self._shape[:-1].numel(), self._shape[-1], self._dtype, nbytes)
        if layer.training and isinstance(decided, Routing):
            self.trained = self.last

    def get(self) -> RecordedRouting:
        """The last forward. Raises ConfigError if there was none."""
        if self.last is None:
            raise ConfigError("the layer has not run yet, but its routing is asked for; call this after a forward")
        return self.last


def record_of(layer: MoELayer) -> RoutingRecord:
    """The layer's record, which becomes one of its hooks with the first call."""
    found = next((hook for hook in layer.hooks if isinstance(hook, RoutingRecord)), None)
    if found is None:
        found = RoutingRecord()
        layer.hooks = (*layer.hooks, found)
    return found
