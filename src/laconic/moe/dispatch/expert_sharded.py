"""Experts that ranks share, reached in two steps on two kinds of wires: an exchange, then a gather among sharers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec, Raw
from laconic.moe.dispatch.base import Dispatched
from laconic.moe.dispatch.flat import Arrival, FlatDispatcher, attached, num_local_experts
from laconic.moe.parallel.autograd_collectives import all_gather, reduce_scatter
from laconic.moe.permute import Order
from laconic.moe.routing import Routing

__all__ = ["ShardedDispatcher", "gathered_counts"]


class ShardedDispatcher:
    """FSMoE's data path (arXiv 2501.10714, figure 2): EP-AlltoAll, ESP-AllGather, experts, ESP-ReduceScatter, AlltoAll.

    Each row crosses the wires between EP ranks once and is copied to the other N_ESP - 1 shards on those between them;
    the joint exchange (`FlatDispatcher` with shards) sends every copy the whole way, in one collective less each way.
    """

    def __init__(self, ep: dist.ProcessGroup, esp: dist.ProcessGroup, *, codec: Codec | str = "auto") -> None:
        """`ep` and `esp` of a `Grid`; `codec` of rows and gradients on both."""
        self.esp, self.codec = esp, codec
        self.exchange = FlatDispatcher(ep, codec=codec)

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`. Raises RoutingError if experts cannot be spread evenly."""
        num_local_experts(routing.num_experts, self.exchange.num_places)
        rows, counts = order.permute(x, routing)
        arrival = Arrival.agree(counts, 1, self.exchange.group)
        rows = self.exchange.send(rows, arrival)
        shares = _Shares.agree(arrival.counts, self.esp)
        padded = F.pad(rows, (0, 0, 0, shares.most - len(rows)))
        # index_select's backward adds, but here to different rows only.
        rows = all_gather(padded, self.esp, codec=self.codec).index_select(0, shares.index)
        return Dispatched(rows, shares.counts, (routing, order, arrival, shares))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`; the shards' parts are added in fp32 (fp64 for fp64) and rounded once."""
        routing, order, arrival, shares = dispatched.state
        rows = attached(rows, dispatched.rows)
        padded = rows.new_zeros(shares.most * self.esp.size(), rows.shape[1]).index_copy(0, shares.index, rows)
        mine = reduce_scatter(padded, self.esp, codec=self.codec)[: len(arrival.index)]
        result: Tensor = order.combine(self.exchange.send_back(mine, arrival), routing)
        return result


@dataclass(frozen=True, eq=False)
class _Shares:
    """What the ranks that share experts bring together."""

    most: int
    """Rows of the rank that has most of them; the others pad."""
    counts: Tensor
    """int64 [E_local]: rows of all of them by expert."""
    index: Tensor
    """int64 [q]: row j in the order of experts is row index[j] of the padded ones."""

    @staticmethod
    def agree(counts: Tensor, group: dist.ProcessGroup) -> _Shares:
        table = gathered_counts(counts, group)
        sizes = table.sum(1).tolist()
        most = max(1, *sizes)
        experts = torch.arange(len(counts), device=counts.device).repeat(len(sizes))
        experts = experts.repeat_interleave(table.flatten(), output_size=sum(sizes))
        places = [torch.arange(size, device=counts.device) + rank * most for rank, size in enumerate(sizes)]
        return _Shares(most, table.sum(0), torch.cat(places)[torch.argsort(experts, stable=True)])


def gathered_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """int64 [W, n] of every rank's int64 [n]."""
    table = counts.new_empty(group.size(), len(counts))
    api.all_gather(table, counts.contiguous(), group, codec=Raw())
    return table
