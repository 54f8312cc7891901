"""Expert parallelism by one all-to-all: every rank sends every other the rows for its experts.

[Note: path of a row]
Local rows [a, M] are sorted by expert, so the rows for EP rank e are contiguous. They go to the N_ESP ranks that share
e's experts, a copy to each. Rows arrive source by source, each source's sorted by expert, and are put in the order of
experts with the sources in order within an expert. Outputs go back the same way; where N_ESP ranks share an expert,
each has a part of the sum over its hidden dimension, and the parts are added at home. The transpose of a copy is a sum
and the transpose of an exchange is the exchange back, so backward follows the same path in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Buffers, ExchangePlan, ExpertRows, Transport
from laconic.moe.dispatch.chunking import Chunk, SlicedRows, slice_sizes
from laconic.moe.dispatch.staged import StagedDispatcher, experts_of, experts_per_rank
from laconic.moe.parallel.autograd_collectives import exchange_counts
from laconic.moe.permute import Order
from laconic.moe.routing import Routing
from laconic.moe.row_ops import accumulation_dtype


class FlatDispatcher(StagedDispatcher):
    """One all-to-all to the experts and one back; see [Note: path of a row].

    Every assignment's row is sent, also to experts on the same node and several times to the same rank if several of
    its experts are there. Nothing is dropped and nothing padded; a rank may have no tokens, or get no rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_shards: int = 1, codec: Codec | str = "auto") -> None:
        """Spread experts over `group`, one after the other.

        Args:
            group: `Grid.ep`, or with shards `Grid.joint`.
            num_shards: N_ESP adjacent ranks that share each expert; their outputs are added.
            codec: of rows and their gradients, as in `laconic.collectives`.

        Raises:
            ConfigError: the group's ranks cannot be cut into `num_shards`.
        """
        if num_shards < 1 or group.size() % num_shards:
            raise ConfigError(
                f"num_shards is {num_shards}, but it must divide the group's {group.size()} ranks; pass Grid.joint"
                " and the grid's esp"
            )
        self.group, self.num_shards, self.codec = group, num_shards, codec

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.group,)

    @property
    def num_places(self) -> int:
        """N_EP: different places for experts."""
        return self.group.size() // self.num_shards

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        return RowsPlan(self, agreed_rows(self, routing.counts(), num_slices), routing, order)


class RowsPlan(ExchangePlan):
    """Exchange plan of a `FlatDispatcher`; base of all plans where each assignment is a row of its own."""

    def __init__(self, exchange: FlatDispatcher, rows: SlicedRows, routing: Routing, order: Order) -> None:
        self.exchange, self.rows, self.routing, self.order = exchange, rows, routing, order
        self.counts = rows.counts()
        """int64 [num_slices, E_local]: rows that this rank's experts get."""

    def begin(self, x: Tensor) -> Buffers:
        """See `ExchangePlan.begin`: rows [a, M] sorted by expert."""
        return (self.order.permute(x, self.routing)[0],)

    def transport(self, degree: int, *, backward: bool) -> Transport:
        return FlatTransport(self.exchange, self.rows.chunks(degree))

    def enter(self, number: int, buffers: Buffers) -> ExpertRows:
        return ExpertRows(buffers[0], self.counts[number])

    def leave(self, number: int, rows: Tensor, buffers: Buffers) -> Tensor:
        """See `ExchangePlan.leave`: the outputs as they are."""
        return rows

    def finish(self, out: Tensor) -> Tensor:
        """See `ExchangePlan.finish`: each token's weighted sum."""
        return self.order.combine(out, self.routing)


class FlatTransport(Transport):
    """Transport of `FlatDispatcher`: one exchange that sends a copy to every sharer of an expert."""

    def __init__(
        self,
        exchange: FlatDispatcher,
        chunks: list[Chunk],
        leaving: Sequence[Tensor | None] = (),
        landing: Sequence[Tensor | None] = (),
    ) -> None:
        """Bind the transport to the chunks of this rank's rows.

        `leaving` and `landing`, int64 [a] for each chunk, are which rows at home it takes and where those that come
        home belong; None: all, in their order. By default they are the chunks' own.
        """
        self._exchange, self._chunks = exchange, chunks
        self._leaving = leaving or [chunk.home for chunk in chunks]
        self._landing = landing or [chunk.home for chunk in chunks]
        self._shards, self._is_alone = exchange.num_shards, exchange.group.size() == 1

    def send(self, i: int, home: Buffers) -> Buffers:
        chunk, exchange, index, (rows, *_) = self._chunks[i], self._exchange, self._leaving[i], home
        rows = copied(rows if index is None else rows.index_select(0, index), chunk.sent, self._shards)
        if self._is_alone:
            return (rows,)
        arrived = rows.new_empty(sum(chunk.received), rows.shape[1])
        splits = chunk.received, chunk.splits
        api.all_to_all(arrived, rows.contiguous(), *splits, exchange.group, codec=exchange.codec, table=chunk.table)
        return (arrived,)

    def unpack(self, i: int, buffers: Buffers) -> list[Buffers]:
        chunk = self._chunks[i]
        return [(rows,) for rows in buffers[0].index_select(0, chunk.index).split(chunk.sizes)]

    def pack(self, i: int, slices: list[Buffers]) -> Buffers:
        return (_joined([rows for (rows,) in slices]).index_select(0, self._chunks[i].inverse),)

    def send_back(self, i: int, buffers: Buffers) -> Buffers:
        """See `Transport.send_back`; adds the parts of the N_ESP sharers."""
        chunk, exchange, (rows,) = self._chunks[i], self._exchange, buffers
        if self._is_alone:
            return (added_up(rows, chunk.sent, self._shards),)
        arrived = rows.new_empty(sum(chunk.splits), rows.shape[1])
        table, splits = list(zip(*chunk.table, strict=True)), (chunk.splits, chunk.received)
        api.all_to_all(arrived, rows.contiguous(), *splits, exchange.group, codec=exchange.codec, table=table)
        return (added_up(arrived, chunk.sent, self._shards),)

    def join(self, chunks: list[Buffers]) -> Buffers:
        if self._landing[0] is None:
            return chunks[0]
        home = chunks[0][0].new_empty(sum(len(rows) for (rows,) in chunks), chunks[0][0].shape[1])
        for index, (rows,) in zip(self._landing, chunks, strict=True):
            assert index is not None, "there are several chunks"
            home.index_copy_(0, index, rows)
        return (home,)


def agreed_rows(exchange: FlatDispatcher, counts: Tensor, num_slices: int) -> SlicedRows:
    """Agree on the slices of what all ranks of an exchange send, counts int64 [E] of this one. All call it together.

    Fewer experts than ranks are a RoutingError.
    """
    num_places, num_shards, group = exchange.num_places, exchange.num_shards, exchange.group
    num_local, device, world = experts_per_rank(len(counts), num_places), counts.device, group.size()
    here = experts_of(group.rank() // num_shards, len(counts), num_places)
    # The last ranks may have fewer experts: missing ones are experts without rows.
    counts = F.pad(counts, (0, num_places * num_local - len(counts)))
    home = slice_sizes(counts, torch.arange(len(counts), device=device), num_slices)
    sizes = home.view(num_places, num_local, num_slices).sum(1)
    if world == 1:
        return SlicedRows(home, home[None], sizes[None], 0)
    by_place = counts.view(num_places, 1, num_local).expand(-1, num_shards, -1).reshape(world, num_local)
    # The sizes go along, so that every rank knows what all send.
    exchanged = exchange_counts(torch.cat((by_place, sizes.flatten().expand(world, -1)), 1), group)
    numbers = torch.arange(here.start, here.stop, device=device)
    arriving = slice_sizes(exchanged[:, : len(here)], numbers, num_slices)
    return SlicedRows(home, arriving, exchanged[:, num_local:].view(world, num_places, num_slices), group.rank())


def copied(rows: Tensor, sizes: Sequence[int], num_copies: int) -> Tensor:
    """Repeat each part of rows [a, M], sizes[i] rows long, `num_copies` times: [num_copies * a, M]."""
    if num_copies == 1:
        return rows
    return torch.cat([part for part in rows.split(list(sizes)) for _ in range(num_copies)])


def added_up(rows: Tensor, sizes: Sequence[int], num_copies: int) -> Tensor:
    """Sum the copies of each part, in fp32 (fp64 for fp64), rounded once; the transpose of `copied`."""
    if num_copies == 1:
        return rows
    sums = rows.new_empty(sum(sizes), rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    parts = rows.split([size for size in sizes for _ in range(num_copies)])
    for number, out in enumerate(sums.split(list(sizes))):
        first, *others = parts[number * num_copies : (number + 1) * num_copies]
        out.copy_(first)
        for part in others:
            out.add_(part)
    return sums.to(rows.dtype)


def _joined(slices: list[Tensor]) -> Tensor:
    return slices[0] if len(slices) == 1 else torch.cat(slices)
