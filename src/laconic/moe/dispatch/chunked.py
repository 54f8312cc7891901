"""How the chunks of a layer travel: the steps of an exchange one by one, so that different wires can work at once.

    out     send (between EP ranks), gather (inside nodes), arrange (into slices)
    home    collect (from slices), scatter (inside nodes), send_back (between EP ranks), share (among MP ranks)

Forward goes out with rows and home with outputs; backward goes out with the gradients of outputs and home with those of
rows. Every step is linear, and backward's are forward's transposes. Nothing here is seen by autograd;
`laconic.moe.pipeline.autograd` tells it what the whole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.moe.dispatch.chunking import Chunk, Cut, Sharing, slice_sizes
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher, gathered_counts
from laconic.moe.dispatch.flat import FlatDispatcher, added_up, copied, num_local_experts
from laconic.moe.parallel.autograd_collectives import all_gather, all_to_all_rows, exchange_counts, reduce_scatter
from laconic.moe.permute import Order
from laconic.moe.routing import Routing

__all__ = [
    "Exchanged",
    "FlatExchanged",
    "FlatWires",
    "Parcel",
    "RowsExchanged",
    "ShardedWires",
    "Wires",
    "agreed_cut",
]

Parcel = tuple[Tensor, ...]
"""What travels together: rows [*, M] first, then what belongs to them, such as weights."""


class Wires(Protocol):
    """One layer's exchange in one direction, cut into chunks of one degree. `i` is a chunk; M is that of the rows."""

    @property
    def has_shards(self) -> bool:
        """Whether gather and scatter do anything; they are not called otherwise."""

    @property
    def shares(self) -> bool:
        """Whether share does anything; it is not called otherwise."""

    def send(self, i: int, home: Parcel) -> Parcel:
        """The chunk's part of all that is at home, to the ranks (nodes) that have its experts."""

    def gather(self, i: int, parcel: Parcel) -> Parcel:
        """What came, on to the ranks inside a node that need it."""

    def arrange(self, i: int, parcel: Parcel) -> list[Parcel]:
        """What came, slice by slice, as the slices' graphs take it."""

    def collect(self, i: int, slices: list[Parcel]) -> Parcel:
        """What the slices give, as one message."""

    def scatter(self, i: int, parcel: Parcel) -> Parcel:
        """Back inside the node, summed."""

    def send_back(self, i: int, parcel: Parcel) -> Parcel:
        """To where the chunk came from."""

    def share(self, i: int, parcel: Parcel) -> Parcel:
        """What came home, to the MP ranks that want the same."""

    def land(self, i: int, parcel: Parcel) -> None:
        """Put what came home to its place in `home`."""

    @property
    def home(self) -> Parcel:
        """All chunks, when the last has landed."""


class Exchanged(Protocol):
    """One pass of a layer whose ranks have told each other all about it; `wires` of any degree need no further talk."""

    @property
    def inputs(self) -> Parcel:
        """What goes out in forward, and gets gradients in backward."""

    def wires(self, degree: int, *, backward: bool) -> Wires:
        """The exchange in `degree` chunks."""

    def enter(self, number: int, parcel: Parcel) -> tuple[Tensor, Tensor]:
        """A slice's rows sorted by expert and their counts, int64 [E_local]; differentiable."""

    def leave(self, number: int, rows: Tensor, parcel: Parcel) -> Tensor:
        """What goes home of the experts' outputs of a slice that entered as `parcel`; differentiable."""

    def finish(self, out: Tensor) -> Tensor:
        """Outputs [n, M] of what came home; differentiable."""


class FlatWires:
    """The one exchange of `FlatDispatcher`, whose sharers get copies the whole way."""

    has_shards = False
    shares = False

    def __init__(self, exchange: FlatDispatcher, chunks: list[Chunk]) -> None:
        self._exchange, self._chunks = exchange, chunks
        self._shards = exchange.num_shards
        self._home: Tensor | None = None

    def send(self, i: int, home: Parcel) -> Parcel:
        chunk = self._chunks[i]
        rows = copied(self._outgoing(i, home[0]), chunk.sent, self._shards)
        return (self._exchanged(rows, chunk.received, self._copies(chunk.sent), self._table(i)),)

    def gather(self, i: int, parcel: Parcel) -> Parcel:
        return parcel

    def arrange(self, i: int, parcel: Parcel) -> list[Parcel]:
        chunk = self._chunks[i]
        return [(rows,) for rows in parcel[0].index_select(0, chunk.index).split(chunk.sizes)]

    def collect(self, i: int, slices: list[Parcel]) -> Parcel:
        return (torch.cat([rows for (rows,) in slices]).index_select(0, self._chunks[i].inverse),)

    def scatter(self, i: int, parcel: Parcel) -> Parcel:
        return parcel

    def send_back(self, i: int, parcel: Parcel) -> Parcel:
        chunk = self._chunks[i]
        table = self._table(i)
        back = None if table is None else list(zip(*table, strict=True))
        rows = self._exchanged(parcel[0], self._copies(chunk.sent), chunk.received, back)
        return (added_up(rows, chunk.sent, self._shards),)

    def share(self, i: int, parcel: Parcel) -> Parcel:
        return parcel

    def land(self, i: int, parcel: Parcel) -> None:
        if len(self._chunks) == 1:
            (self._home,) = parcel
        else:
            self._put(self._chunks[i].home, parcel[0], sum(len(chunk.home) for chunk in self._chunks))

    @property
    def home(self) -> Parcel:
        assert self._home is not None, "the plan has combined"
        return (self._home,)

    def _outgoing(self, i: int, rows: Tensor) -> Tensor:
        return rows if len(self._chunks) == 1 else rows.index_select(0, self._chunks[i].home)

    def _put(self, index: Tensor, rows: Tensor, num_rows: int) -> None:
        if self._home is None:
            self._home = rows.new_empty(num_rows, rows.shape[1])
        self._home.index_copy_(0, index, rows)

    def _exchanged(
        self, rows: Tensor, received: list[int], sent: list[int], table: Sequence[Sequence[int]] | None
    ) -> Tensor:
        exchange = self._exchange
        return all_to_all_rows(rows, received, sent, exchange.group, codec=exchange.codec, table=table)

    def _table(self, i: int) -> list[list[int]] | None:
        table = self._chunks[i].table
        return None if table is None else [self._copies(row) for row in table]

    def _copies(self, sizes: list[int]) -> list[int]:
        return [size for size in sizes for _ in range(self._shards)]


class ShardedWires(FlatWires):
    """`ShardedDispatcher`'s: each row crosses to one sharer, who hands it on; outputs are summed before they return."""

    has_shards = True

    def __init__(self, dispatcher: ShardedDispatcher, chunks: list[Chunk], shares: list[Sharing]) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._esp, self._codec, self._sharing = dispatcher.esp, dispatcher.codec, shares

    def gather(self, i: int, parcel: Parcel) -> Parcel:
        rows = parcel[0].index_select(0, self._chunks[i].index)
        rows = F.pad(rows, (0, 0, 0, self._sharing[i].most - len(rows)))
        return (all_gather(rows, self._esp, codec=self._codec),)

    def arrange(self, i: int, parcel: Parcel) -> list[Parcel]:
        sharing = self._sharing[i]
        return [(rows,) for rows in parcel[0].index_select(0, sharing.index).split(sharing.sizes)]

    def collect(self, i: int, slices: list[Parcel]) -> Parcel:
        rows, sharing = torch.cat([rows for (rows,) in slices]), self._sharing[i]
        return (rows.new_zeros(sharing.most * self._esp.size(), rows.shape[1]).index_copy_(0, sharing.index, rows),)

    def scatter(self, i: int, parcel: Parcel) -> Parcel:
        inverse = self._chunks[i].inverse
        rows = reduce_scatter(parcel[0], self._esp, codec=self._codec)
        return (rows[: len(inverse)].index_select(0, inverse),)


class RowsExchanged:
    """What is alike where assignments are cut by expert, each a row of its own."""

    def __init__(self, rows: Tensor, cut: Cut, routing: Routing, order: Order) -> None:
        """rows [a, M], differentiable, by expert; the slices of what all ranks send."""
        self.rows, self.cut, self.routing, self.order = rows, cut, routing, order
        self.counts = cut.counts()
        """int64 [num_slices, E_local]: rows that this rank's experts get."""

    @property
    def inputs(self) -> Parcel:
        return (self.rows,)

    def enter(self, number: int, parcel: Parcel) -> tuple[Tensor, Tensor]:
        return parcel[0], self.counts[number]

    def leave(self, number: int, rows: Tensor, parcel: Parcel) -> Tensor:
        return rows

    def finish(self, out: Tensor) -> Tensor:
        result: Tensor = self.order.combine(out, self.routing)
        return result


class FlatExchanged(RowsExchanged):
    """Of `FlatDispatcher` and `ShardedDispatcher`."""

    def __init__(
        self,
        dispatcher: FlatDispatcher | ShardedDispatcher,
        x: Tensor,
        routing: Routing,
        order: Order,
        num_slices: int,
    ) -> None:
        """Tokens x [n, M] and their routing. All ranks of the dispatcher's groups come here together.

        Raises RoutingError if experts cannot be spread evenly.
        """
        exchange = dispatcher.exchange if isinstance(dispatcher, ShardedDispatcher) else dispatcher
        rows, counts = order.permute(x, routing)
        super().__init__(rows, agreed_cut(exchange, counts, num_slices), routing, order)
        self._dispatcher = dispatcher
        if isinstance(dispatcher, ShardedDispatcher):
            mine = self.counts
            self._table = gathered_counts(mine.flatten(), dispatcher.esp).view(-1, *mine.shape)
            self.counts = self._table.sum(0)

    def wires(self, degree: int, *, backward: bool) -> Wires:
        chunks = self.cut.chunks(degree)
        if isinstance(self._dispatcher, FlatDispatcher):
            return FlatWires(self._dispatcher, chunks)
        return ShardedWires(self._dispatcher, chunks, Sharing.of(self._table, degree))


def agreed_cut(exchange: FlatDispatcher, counts: Tensor, num_slices: int) -> Cut:
    """The slices of what all ranks of an exchange send, counts int64 [E] here."""
    places, group = exchange.num_places, exchange.group
    num_local = num_local_experts(len(counts), places)
    home = slice_sizes(counts, torch.arange(len(counts), device=counts.device), num_slices)
    if group.size() == 1:
        return Cut.of(counts, counts.view(1, -1), 0, num_slices)
    by_place = counts.view(places, 1, num_local).expand(-1, exchange.num_shards, -1).reshape(group.size(), -1)
    sizes = home.view(places, num_local, -1).sum(1).flatten()  # go along, so that every rank knows what all send
    told = exchange_counts(torch.cat((by_place, sizes.expand(group.size(), -1)), 1), group)
    cut = Cut.of(counts, told[:, :num_local], group.rank() // exchange.num_shards, num_slices)
    return replace(cut, table=told[:, num_local:].view(-1, places, num_slices))
