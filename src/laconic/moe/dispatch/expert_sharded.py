"""Dispatch to experts that ranks share, in two steps on two networks: an exchange, then a gather among sharers."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec, Raw
from laconic.moe.dispatch.base import Buffers, ExchangePlan, Transport
from laconic.moe.dispatch.chunking import Chunk, ShardGather, SlicedRows
from laconic.moe.dispatch.flat import FlatDispatcher, FlatTransport, RowsPlan, agreed_rows
from laconic.moe.dispatch.staged import StagedDispatcher
from laconic.moe.parallel.autograd_collectives import all_gather, reduce_scatter
from laconic.moe.permute import Order
from laconic.moe.routing import Routing


class ShardedDispatcher(StagedDispatcher):
    """FSMoE's data path (arXiv 2501.10714, figure 2): EP-AlltoAll, ESP-AllGather, experts, ESP-ReduceScatter, AlltoAll.

    Each row crosses the network between EP ranks once and is then copied to the other N_ESP - 1 shards; the joint
    exchange (`FlatDispatcher` with shards) sends every copy between EP ranks, with one collective less in each
    direction. The shards' parts of outputs are added in fp32 (fp64 for fp64) and rounded once.
    """

    def __init__(self, ep: dist.ProcessGroup, esp: dist.ProcessGroup, *, codec: Codec | str = "auto") -> None:
        """Take `ep` and `esp` of a `Grid`; `codec` of rows and gradients on both."""
        self.esp, self.codec = esp, codec
        self.exchange = FlatDispatcher(ep, codec=codec)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (*self.exchange.groups, self.esp)

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        return _ShardedPlan(self, agreed_rows(self.exchange, routing.counts(), num_slices), routing, order)


class _ShardedPlan(RowsPlan):
    def __init__(self, dispatcher: ShardedDispatcher, rows: SlicedRows, routing: Routing, order: Order) -> None:
        super().__init__(dispatcher.exchange, rows, routing, order)
        self._dispatcher = dispatcher
        table = gathered_counts(self.counts.flatten(), dispatcher.esp)
        self._table = table.view(dispatcher.esp.size(), *self.counts.shape)
        self._gathers: dict[int, list[ShardGather]] = {}
        self.counts = self._table.sum(0)

    def transport(self, degree: int, *, backward: bool) -> Transport:
        if degree not in self._gathers:
            self._gathers[degree] = ShardGather.of(self._table, degree)
        return _ShardedTransport(self._dispatcher, self.rows.chunks(degree), self._gathers[degree])


class _ShardedTransport(FlatTransport):
    """Sends each row to one sharer, which passes it on; outputs are summed before they return."""

    def __init__(self, dispatcher: ShardedDispatcher, chunks: list[Chunk], gathers: list[ShardGather]) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._esp, self._codec, self._gathers = dispatcher.esp, dispatcher.codec, gathers

    def gather(self, i: int, buffers: Buffers) -> Buffers:
        rows = buffers[0].index_select(0, self._chunks[i].index)
        rows = F.pad(rows, (0, 0, 0, self._gathers[i].most - len(rows)))
        return (all_gather(rows, self._esp, codec=self._codec),)

    def unpack(self, i: int, buffers: Buffers) -> list[Buffers]:
        gather = self._gathers[i]
        return [(rows,) for rows in buffers[0].index_select(0, gather.index).split(gather.sizes)]

    def pack(self, i: int, slices: list[Buffers]) -> Buffers:
        rows, gather = torch.cat([rows for (rows,) in slices]), self._gathers[i]
        return (rows.new_zeros(gather.most * self._esp.size(), rows.shape[1]).index_copy_(0, gather.index, rows),)

    def scatter(self, i: int, buffers: Buffers) -> Buffers:
        inverse = self._chunks[i].inverse
        rows = reduce_scatter(buffers[0], self._esp, codec=self._codec)
        return (rows[: len(inverse)].index_select(0, inverse),)


def gathered_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather every rank's counts int64 [n]: int64 [W, n]."""
    table = counts.new_empty(group.size(), len(counts))
    api.all_gather(table, counts.contiguous(), group, codec=Raw())
    return table
