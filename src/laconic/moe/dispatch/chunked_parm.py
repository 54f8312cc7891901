"""Layers inside an MP group in pieces: the baseline, which pauses nothing, and S2; see `laconic.moe.dispatch.parm`.

S1 needs nothing of its own: it pauses MP before the gate, and what is inside is cut as it is outside.

[Note: sums and copies]
The baseline's home step is a sum over sharers, whose gradients are added as well; the factors 1 / N_MP and N_MP of its
backward are on the wires too. S2 gathers on the side where rows are copies that MP ranks have alike: outputs where
`forward` is "rows", gradients of rows where `backward` is. On a side of copies each rank sends its own part of them. A
chunk's gather runs on the wire inside nodes while other chunks are exchanged, so chunks take the place of SAA's steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.moe.dispatch.chunked import FlatWires, Parcel, RowsExchanged, Wires, agreed_cut
from laconic.moe.dispatch.chunking import Chunk, rows_of_chunks, slice_sizes
from laconic.moe.dispatch.parm import BaselineDispatcher, S2Dispatcher
from laconic.moe.parallel.autograd_collectives import all_gather, all_reduce, split
from laconic.moe.permute import Order
from laconic.moe.routing import Routing

__all__ = ["BaselineExchanged", "S2Exchanged"]


class BaselineExchanged(RowsExchanged):
    """Every row of the ESP group's tokens, on each of its ranks."""

    def __init__(
        self, dispatcher: BaselineDispatcher, x: Tensor, routing: Routing, order: Order, num_slices: int
    ) -> None:
        """See `FlatExchanged`."""
        rows, counts = order.permute(x, routing)
        super().__init__(rows, agreed_cut(dispatcher.exchange, counts, num_slices), routing, order)
        self._dispatcher = dispatcher

    def wires(self, degree: int, *, backward: bool) -> Wires:
        return _BaselineWires(self._dispatcher, self.cut.chunks(degree), backward)


class _BaselineWires(FlatWires):
    has_shards = True

    def __init__(self, dispatcher: BaselineDispatcher, chunks: list[Chunk], backward: bool) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._grid, self._codec, self._backward = dispatcher.grid, dispatcher.codec, backward

    def gather(self, i: int, parcel: Parcel) -> Parcel:
        return (self._total(parcel[0]) / self._grid.layout.mp,) if self._backward else parcel

    def scatter(self, i: int, parcel: Parcel) -> Parcel:
        return (parcel[0] * self._grid.layout.mp,) if self._backward else (self._total(parcel[0]),)

    def _total(self, rows: Tensor) -> Tensor:
        return all_reduce(rows, self._grid.esp, codec=self._codec)


class S2Exchanged(RowsExchanged):
    """Rows that MP ranks have alike, each rank's own on their way."""

    def __init__(self, dispatcher: S2Dispatcher, x: Tensor, routing: Routing, order: Order, num_slices: int) -> None:
        """See `FlatExchanged`."""
        self._dispatcher = dispatcher
        self._own, self._sizes, self._entries = dispatcher.own_share(routing)
        if dispatcher.backward == "rows":
            rows, _ = order.permute(x, routing)
        else:
            own = split(x, dispatcher.grid.mp, sizes=self._sizes, codec=dispatcher.codec)
            rows, _ = order.permute(own, self._own)
        super().__init__(rows, agreed_cut(dispatcher.exchange, self._own.counts(), num_slices), routing, order)

    def wires(self, degree: int, *, backward: bool) -> Wires:
        sides = (self._dispatcher.backward == "rows", self._dispatcher.forward == "rows")
        of_copies, gathers = reversed(sides) if backward else sides
        chunks = self.cut.chunks(degree)
        return _S2Wires(self._dispatcher, chunks, self._places(degree), of_copies=of_copies, gathers=gathers)

    def finish(self, out: Tensor) -> Tensor:
        if self._dispatcher.forward == "rows":
            return super().finish(out)
        parts = (self.routing, self._own, self.order, self._sizes, self._entries)
        return self._dispatcher.gathered_tokens(out, *parts)

    def _places(self, degree: int) -> list[list[Tensor]]:
        """int64 [chunk][MP rank]: which of all rows sorted by expert are that rank's, in its chunk."""
        routing, mp, num_experts = self.routing, len(self._entries), self.routing.num_experts
        device = routing.experts.device
        owners = torch.arange(mp, device=device).repeat_interleave(torch.tensor(self._entries, device=device))
        counts = torch.bincount(owners * num_experts + routing.experts, minlength=mp * num_experts)
        # Rows are sorted by expert; a stable sort by owner keeps that within each.
        of_ranks = torch.argsort(owners[routing.by_expert], stable=True).split(self._entries)
        table = slice_sizes(counts.view(mp, -1), torch.arange(num_experts, device=device), self.cut.num_slices)
        parts = [
            [rows[i] for i in rows_of_chunks(of_rank, degree)] for rows, of_rank in zip(of_ranks, table, strict=True)
        ]
        return [list(chunk) for chunk in zip(*parts, strict=True)]


class _S2Wires(FlatWires):
    def __init__(
        self,
        dispatcher: S2Dispatcher,
        chunks: list[Chunk],
        places: list[list[Tensor]],
        *,
        of_copies: bool,
        gathers: bool,
    ) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._mp, self._codec = dispatcher.grid.mp, dispatcher.codec
        self._places, self._of_copies, self._gathers = places, of_copies, gathers
        # Two threads must not use one group: where it is the same for both, the gather is a part of the way back.
        self.shares = gathers and self._mp is not self._exchange.group

    def send_back(self, i: int, parcel: Parcel) -> Parcel:
        parcel = super().send_back(i, parcel)
        return self.share(i, parcel) if self._gathers and not self.shares else parcel

    def share(self, i: int, parcel: Parcel) -> Parcel:
        most = max(1, *map(len, self._places[i]))
        return (all_gather(F.pad(parcel[0], (0, 0, 0, most - len(parcel[0]))), self._mp, codec=self._codec),)

    def land(self, i: int, parcel: Parcel) -> None:
        if not self._gathers:
            super().land(i, parcel)
            return
        num_rows = sum(len(index) for chunk in self._places for index in chunk)
        for index, rows in zip(self._places[i], parcel[0].chunk(self._mp.size()), strict=True):
            self._put(index, rows[: len(index)], num_rows)

    def _outgoing(self, i: int, rows: Tensor) -> Tensor:
        return rows.index_select(0, self._places[i][self._mp.rank()]) if self._of_copies else super()._outgoing(i, rows)
