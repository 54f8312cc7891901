"""Dispatchers: rows to where the experts are, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from laconic.collectives.codec import Blockwise
from laconic.moe.permute import Order
from laconic.moe.routing import Routing, SoftRouting

if TYPE_CHECKING:
    from laconic.moe.gates.base import Gate

__all__ = ["Dispatched", "Dispatcher", "LocalDispatcher", "SharesTokens", "row_nbytes"]


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What lies at the experts of this rank after dispatch."""

    rows: Tensor
    """[q, M], sorted by local expert."""
    counts: Tensor
    """int64 [E_local]: rows of each local expert; they sum to q."""
    state: Any
    """What the same dispatcher's `combine` needs; nobody else looks inside."""


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts and the experts' outputs back.

    Experts are numbered by slot: slot s lives on expert-parallel rank s // (E / N_EP), as local expert s % (E / N_EP).
    Both halves are differentiable, and combine is the transpose of dispatch with the gate's weights applied. Every rank
    of the group calls both, also one without tokens. `order` does the local expansion and the local weighted sums.
    """

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """Send tokens x [n, M] to their experts."""
        ...

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the outputs [q, M] of `dispatched.rows` back and sum them with their weights: [n, M]."""
        ...


@runtime_checkable
class SharesTokens(Protocol):
    """What a dispatcher also has if ranks share their tokens before the gate sees them."""

    def route(self, gate: Gate, x: Tensor) -> tuple[Tensor, Routing | SoftRouting, Any]:
        """Of a layer's tokens [n, M] those that pass this rank's gate, what the gate says, and what `restore` needs."""
        ...

    def restore(self, out: Tensor, state: Any) -> Tensor:
        """The outputs [n, M] of the layer's tokens, of those that passed here."""
        ...


class LocalDispatcher:
    """All experts are here: no rank needs to be told anything."""

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        rows, counts = order.permute(x, routing)
        return Dispatched(rows, counts, (routing, order))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        routing, order = dispatched.state
        result: Tensor = order.combine(rows, routing)
        return result


def row_nbytes(dispatcher: Dispatcher, x: Tensor) -> int:
    """Of a row of x [n, M] on the wire, before lossless coding."""
    codec = getattr(dispatcher, "codec", None)
    if isinstance(codec, Blockwise):
        return codec.format.nbytes((x.shape[1],))
    return x.shape[1] * x.itemsize
