"""Record of the routing of a layer's last forward, for all that decide about the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.moe.dispatch.base import row_nbytes
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.routing import RoutedTokens, Routing, SoftRouting

_ID_NBYTES = 8
"""Bytes of an assignment sent with a row: the expert's number and a weight in fp32."""


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """One forward of a layer on this rank."""

    routing: Routing
    """Experts as the gate numbers them, without gradients; the slots of a SoftRouting."""
    num_tokens: int
    model_dim: int
    dtype: torch.dtype
    row_nbytes: float
    """Bytes of a row with its ids and weights."""

    def by_slot(self, layer: MoELayer) -> Routing:
        """Return the routing with experts numbered by their current slots; see `MoELayer.by_slot`."""
        return layer.by_slot(self.routing)


class RoutingRecord(Hook):
    """Records the last forward of its layer, and the last one in training."""

    def __init__(self) -> None:
        self.last: RecordedRouting | None = None
        self.trained: RecordedRouting | None = None
        """The last forward in training of a gate that assigns tokens to experts."""
        self.keeps_input = False
        self.input: Tensor | None = None
        """The layer's input, where `keeps_input` was set."""
        self._shape, self._dtype = torch.Size(), torch.float32

    def before_start(self, layer: MoELayer, x: Tensor) -> None:
        """See `Hook.before_start`; records shape and dtype of the input."""
        self._shape, self._dtype = x.shape, x.dtype  # dispatchers that share tokens pass on a part
        self.input = x.detach() if self.keeps_input else None

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> None:
        """See `Hook.before_dispatch`; records the routing."""
        x, decided = tokens.x, tokens.routing
        routing = decided.slots() if isinstance(decided, SoftRouting) else decided
        routing = replace(routing, weights=routing.weights.detach(), losses={})
        nbytes = row_nbytes(layer.dispatcher, x) + _ID_NBYTES * len(routing) / max(1, routing.num_tokens)
        self.last = RecordedRouting(routing, self._shape[:-1].numel(), self._shape[-1], self._dtype, nbytes)
        if layer.training and isinstance(decided, Routing):
            self.trained = self.last

    def get(self) -> RecordedRouting:
        """Return the last forward; a ConfigError if the layer has not run yet."""
        if self.last is None:
            raise ConfigError("the layer has not run yet, but its routing is asked for; call this after a forward")
        return self.last


def record_of(layer: MoELayer) -> RoutingRecord:
    """Return the layer's record; the first call adds it to the layer's hooks."""
    found = next((hook for hook in layer.hooks if isinstance(hook, RoutingRecord)), None)
    if found is None:
        found = RoutingRecord()
        layer.hooks = (*layer.hooks, found)
    return found
