"""How the chunks of a layer travel: the steps of an exchange one by one, so that different wires can work at once.

Every step is linear, and the way home is the transpose of the way out:

    out     send (between EP ranks), gather (among ranks that share experts), arrange (into slices)
    home    collect (from slices), scatter (sums among sharers), send_back (between EP ranks)

So forward goes out with rows and home with outputs, and backward goes out with the gradients of outputs and home with
those of rows. Nothing here is seen by autograd; `laconic.moe.pipeline` tells it what the whole is.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.moe.collectives import all_gather, all_to_all_rows, exchange_counts, reduce_scatter
from laconic.moe.cuts import Chunk, Cut, Sharing
from laconic.moe.flat import FlatDispatcher, added_up, copied, num_local_experts
from laconic.moe.sharded import ShardedDispatcher, gathered_counts

__all__ = ["Exchanged", "FlatWires", "ShardedWires", "Wires"]


class Wires(Protocol):
    """One layer's exchange, cut into chunks of one degree. `i` is a chunk; M is whatever the rows' dimension is."""

    @property
    def has_shards(self) -> bool:
        """Whether gather and scatter do anything; they are not called otherwise."""

    def home(self, i: int) -> Tensor:
        """int64 [a]: which rows at home are the chunk's."""

    def send(self, i: int, rows: Tensor) -> Tensor:
        """This rank's rows [a, M] of the chunk, to the ranks that have their experts."""

    def gather(self, i: int, rows: Tensor) -> Tensor:
        """What came, to the ranks that share the experts."""

    def arrange(self, i: int, rows: Tensor) -> list[Tensor]:
        """What came, slice by slice, sorted by expert: [q, M] each."""

    def counts(self, i: int) -> tuple[Tensor, ...]:
        """int64 [E_local]: rows of each expert in each slice."""

    def collect(self, i: int, slices: list[Tensor]) -> Tensor:
        """The transpose of `arrange`."""

    def scatter(self, i: int, rows: Tensor) -> Tensor:
        """The transpose of `gather`."""

    def send_back(self, i: int, rows: Tensor) -> Tensor:
        """The transpose of `send`: [a, M]."""


class FlatWires:
    """The one exchange of `FlatDispatcher`, whose sharers get copies the whole way."""

    has_shards = False

    def __init__(self, exchange: FlatDispatcher, chunks: list[Chunk]) -> None:
        self._exchange, self._chunks = exchange, chunks
        self._shards = exchange.num_shards

    def home(self, i: int) -> Tensor:
        return self._chunks[i].home

    def counts(self, i: int) -> tuple[Tensor, ...]:
        return self._chunks[i].counts

    def send(self, i: int, rows: Tensor) -> Tensor:
        chunk = self._chunks[i]
        rows = copied(rows, chunk.sent, self._shards)
        return all_to_all_rows(rows, chunk.received, self._copies(i), self._exchange.group, codec=self._exchange.codec)

    def gather(self, i: int, rows: Tensor) -> Tensor:
        return rows

    def arrange(self, i: int, rows: Tensor) -> list[Tensor]:
        chunk = self._chunks[i]
        return list(rows.index_select(0, chunk.index).split(chunk.sizes))

    def collect(self, i: int, slices: list[Tensor]) -> Tensor:
        return torch.cat(slices).index_select(0, self._chunks[i].inverse)

    def scatter(self, i: int, rows: Tensor) -> Tensor:
        return rows

    def send_back(self, i: int, rows: Tensor) -> Tensor:
        chunk, exchange = self._chunks[i], self._exchange
        rows = all_to_all_rows(rows, self._copies(i), chunk.received, exchange.group, codec=exchange.codec)
        return added_up(rows, chunk.sent, self._shards)

    def _copies(self, i: int) -> list[int]:
        return [size for size in self._chunks[i].sent for _ in range(self._shards)]


class ShardedWires(FlatWires):
    """`ShardedDispatcher`'s: each row crosses to one sharer, who hands it on; outputs are summed before they return."""

    has_shards = True

    def __init__(self, dispatcher: ShardedDispatcher, chunks: list[Chunk], shares: list[Sharing]) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._esp, self._codec, self._shares = dispatcher.esp, dispatcher.codec, shares

    def counts(self, i: int) -> tuple[Tensor, ...]:
        return self._shares[i].counts

    def gather(self, i: int, rows: Tensor) -> Tensor:
        rows = rows.index_select(0, self._chunks[i].index)
        return all_gather(F.pad(rows, (0, 0, 0, self._shares[i].most - len(rows))), self._esp, codec=self._codec)

    def arrange(self, i: int, rows: Tensor) -> list[Tensor]:
        shares = self._shares[i]
        return list(rows.index_select(0, shares.index).split(shares.sizes))

    def collect(self, i: int, slices: list[Tensor]) -> Tensor:
        rows, shares = torch.cat(slices), self._shares[i]
        return rows.new_zeros(shares.most * self._esp.size(), rows.shape[1]).index_copy_(0, shares.index, rows)

    def scatter(self, i: int, rows: Tensor) -> Tensor:
        inverse = self._chunks[i].inverse
        return reduce_scatter(rows, self._esp, codec=self._codec)[: len(inverse)].index_select(0, inverse)


class Exchanged:
    """Rows of one layer that the ranks have told each other about; `wires` of any degree, without further talk."""

    def __init__(self, dispatcher: FlatDispatcher | ShardedDispatcher, counts: Tensor, num_slices: int) -> None:
        """counts int64 [E]: this rank's rows by expert. All ranks of the dispatcher's groups come here together.

        Raises RoutingError if experts cannot be spread evenly.
        """
        self._dispatcher = dispatcher
        exchange = dispatcher.exchange if isinstance(dispatcher, ShardedDispatcher) else dispatcher
        num_local = num_local_experts(len(counts), exchange.num_places)
        group, shards = exchange.group, exchange.num_shards
        by_place = counts.view(-1, 1, num_local).expand(-1, shards, -1).reshape(group.size(), -1)
        arriving = exchange_counts(by_place, group) if group.size() > 1 else by_place
        self._cut = Cut.of(counts, arriving, group.rank() // shards, num_slices)
        self._table: Tensor | None = None
        if isinstance(dispatcher, ShardedDispatcher):
            mine = self._cut.counts()
            self._table = gathered_counts(mine.flatten(), dispatcher.esp).view(-1, *mine.shape)

    def wires(self, degree: int) -> Wires:
        """The exchange in `degree` chunks."""
        chunks = self._cut.chunks(degree)
        if isinstance(self._dispatcher, FlatDispatcher):
            return FlatWires(self._dispatcher, chunks)
        assert self._table is not None
        return ShardedWires(self._dispatcher, chunks, Sharing.of(self._table, degree))
