"""Contracts of dispatch: dispatchers, exchange plans and the transports that carry them out.

[Note: one exchange]
An `ExchangePlan` fixes once what a layer sends; its `Transport` then moves buffers step by step, in one chunk or in
several:

    out     send (between EP ranks), gather (inside nodes), unpack (into slices)
    home    pack (from slices), scatter (inside nodes), send_back (between EP ranks), share (among MP ranks), join

Forward goes out with rows and home with outputs. Backward goes out with the gradients of outputs and home with those of
rows. Every step is linear and backward's are forward's transposes, so one transport serves both directions. A whole
layer is one chunk, run by `laconic.moe.dispatch.staged`; several chunks are run at once by
`laconic.moe.ChunkedSchedule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Blockwise
from laconic.moe.permute import Order
from laconic.moe.routing import RoutedTokens, Routing

if TYPE_CHECKING:
    from laconic.moe.gates.base import Gate

Buffers = tuple[Tensor, ...]
"""Tensors of one message: rows [*, M] first, then what belongs to them, such as weights."""

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows at the experts of this rank: their inputs, or their outputs."""

    rows: Tensor
    """[q, M], sorted by local expert."""
    counts: Tensor
    """int64 [E_local]: rows of each local expert; they sum to q."""


@dataclass(frozen=True, eq=False)
class Dispatched(ExpertRows, Generic[State]):
    """The experts' inputs after dispatch."""

    state: State
    """What the same dispatcher's `combine` needs; opaque to everybody else."""


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts and the experts' outputs back.

    Experts are numbered by slot: slot s lives on expert-parallel rank s // c, as local expert s % c, where c is
    ceil(E / N_EP); where N_EP does not divide E, the last ranks have fewer slots, or none.
    Both halves are differentiable, and combine is the transpose of dispatch with the gate's weights applied. Every rank
    of the group calls both, also one without tokens. `order` does the local expansion and the local weighted sums.
    """

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched[Any]:
        """Send tokens x [n, M] to their experts."""

    def combine(self, rows: Tensor, dispatched: Dispatched[Any]) -> Tensor:
        """Bring the outputs [q, M] of `dispatched.rows` back and sum them with their weights: [n, M]."""


class Started(Protocol):
    """A dispatch under way."""

    def finish(self) -> Dispatched[Any]:
        """Wait for the rows and return what `Dispatcher.dispatch` returns."""

    def abandon(self) -> None:
        """Wait for the rows and drop them; nothing after `finish`. Raises nothing."""


@runtime_checkable
class StartsDispatch(Protocol):
    """What a dispatcher has whose rows may travel while the caller computes."""

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those that rows travel in now; until `finish`, the caller sends nothing in them."""

    def start(self, x: Tensor, routing: Routing, order: Order) -> Started:
        """Start what `Dispatcher.dispatch` does, with the same arguments and result."""


@dataclass(frozen=True, eq=False)
class RoutedShare(RoutedTokens):
    """The tokens that pass this rank's gate, where ranks share their tokens before the gate."""

    sizes: list[int]
    """Tokens of each rank of the group that shares them."""


@runtime_checkable
class SharesTokens(Protocol):
    """Additional methods of a dispatcher whose ranks share their tokens before the gate."""

    def route(self, gate: Gate, x: Tensor) -> RoutedShare:
        """Select the tokens that pass this rank's gate, of the layer's tokens x [n, M], and route them."""

    def share(self, x: Tensor, routing: Routing) -> RoutedShare:
        """Select the tokens that this rank sends, of the layer's tokens x [n, M], where all are routed already."""

    def restore(self, out: Tensor, share: RoutedShare) -> Tensor:
        """Return the outputs [n, M] of the layer's tokens, given those [m, M] of the tokens that passed here."""


@dataclass(frozen=True, eq=False)
class _LocalState:
    routing: Routing
    order: Order


class LocalDispatcher(Dispatcher):
    """Dispatcher for experts that are all on this rank; sends nothing."""

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched[_LocalState]:
        rows, counts = order.permute(x, routing)
        return Dispatched(rows, counts, _LocalState(routing, order))

    def combine(self, rows: Tensor, dispatched: Dispatched[_LocalState]) -> Tensor:
        return dispatched.state.order.combine(rows, dispatched.state.routing)


Step = Callable[[int, Buffers], Buffers]
"""A step of one chunk: its number, and the buffers of the step before it."""


class Transport(ABC):
    """Buffers of one layer's exchange in one direction and one number of chunks; see [Note: one exchange].

    `i` is the number of a chunk. Of the optional steps a transport has those that do something.
    """

    gather: Step | None = None
    """Passes received buffers on to the ranks inside a node that need them. A transport has it and `scatter`, or
    neither."""
    scatter: Step | None = None
    """Sends outputs back inside the node, summed."""
    share: Step | None = None
    """Copies what came home to the MP ranks that need the same rows."""

    @abstractmethod
    def send(self, i: int, home: Buffers) -> Buffers:
        """Send the chunk's part of the home buffers to the ranks (nodes) that have its experts."""

    @abstractmethod
    def unpack(self, i: int, buffers: Buffers) -> list[Buffers]:
        """Split received buffers by slice, as `ExchangePlan.enter` takes them."""

    @abstractmethod
    def pack(self, i: int, slices: list[Buffers]) -> Buffers:
        """Join what `ExchangePlan.leave` gave for the chunk's slices into one message."""

    @abstractmethod
    def send_back(self, i: int, buffers: Buffers) -> Buffers:
        """Send outputs back to the ranks that the chunk came from."""

    @abstractmethod
    def join(self, chunks: list[Buffers]) -> Buffers:
        """Put what came home, chunk by chunk, to its places."""


class ExchangePlan(Protocol):
    """Messages of all ranks for one pass of a layer, agreed between them; transports need no further agreement."""

    def begin(self, x: Tensor) -> Buffers:
        """Return the buffers that go out for tokens x [n, M]; differentiable."""

    def transport(self, degree: int, *, backward: bool) -> Transport:
        """Return the exchange in `degree` chunks, a divisor of the plan's number of slices; for a single use."""

    def enter(self, number: int, buffers: Buffers) -> ExpertRows:
        """Return the experts' inputs of a slice; differentiable."""

    def leave(self, number: int, rows: Tensor, buffers: Buffers) -> Tensor:
        """Return what goes home of the experts' outputs of a slice that entered as `buffers`; differentiable."""

    def finish(self, out: Tensor) -> Tensor:
        """Return outputs [n, M] of what came home; differentiable."""


def row_nbytes(dispatcher: Dispatcher, x: Tensor) -> int:
    """Return the bytes of a row of x [n, M] in transit, before lossless coding."""
    codec = getattr(dispatcher, "codec", None)
    if isinstance(codec, Blockwise):
        return codec.format.nbytes((x.shape[1],))
    return x.shape[1] * x.itemsize
