"""Expert parallelism by one exchange: every rank sends every other the rows for its experts.

[Note: rows on their way]
Local rows [a, M] are sorted by expert, so the rows for EP rank e lie together. They go to the N_ESP ranks that share
e's experts, a copy to each. Rows arrive source by source, each source's sorted by expert, and are put in the order of
experts with the sources in order within an expert. Outputs go back the same ways; where N_ESP ranks share an expert,
each has a part of the sum over its hidden dimension, and the parts are added at home. The transpose of a copy is a sum,
that of an exchange the exchange back, so backward is the same picture from the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError, RoutingError
from laconic.moe.dispatch.base import Dispatched
from laconic.moe.parallel.autograd_collectives import all_to_all_rows, exchange_counts
from laconic.moe.permute import Order
from laconic.moe.routing import Routing
from laconic.moe.row_ops import accumulation_dtype, permuted

__all__ = ["Arrival", "FlatDispatcher", "added_up", "attached", "copied", "num_local_experts"]


@dataclass(frozen=True, eq=False)
class Arrival:
    """What one exchange moves, as seen by this rank: rows from whom, to whom, for which experts."""

    sent: list[int]
    """Rows that go to each place of the group."""
    received: list[int]
    """Rows that come from each."""
    counts: Tensor
    """int64 [E_local]: arriving rows by expert."""
    index: Tensor
    """int64 [q]: row j in the order of experts arrives as row index[j]."""
    inverse: Tensor
    """int64 [q]: the inverse of `index`."""
    table: list[list[int]]
    """Rows from each place to each, [from][to]."""

    @staticmethod
    def agree(counts: Tensor, num_shards: int, group: dist.ProcessGroup) -> Arrival:
        """Tell all ranks of `group` how many rows come: counts int64 [E], this rank's rows by expert."""
        world = group.size()
        by_place = counts.view(world // num_shards, 1, -1).expand(-1, num_shards, -1).reshape(world, -1)
        sizes = by_place.sum(1)  # go along, so that every rank knows what all send
        told = exchange_counts(torch.cat((by_place, sizes.expand(world, -1)), 1), group)
        arriving = told[:, :-world]
        table = told[:, -world:].tolist()
        me = group.rank()
        sent, received = table[me], [row[me] for row in table]
        num_experts = by_place.shape[1]
        experts = torch.arange(num_experts, device=counts.device).repeat(world)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        index = torch.argsort(experts, stable=True)
        inverse = torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=index.device))
        return Arrival(sent, received, arriving.sum(0), index, inverse, table)


class FlatDispatcher:
    """One all-to-all to the experts and one back; see [Note: rows on their way].

    Every assignment's row travels, also to experts on the same node and several times to the same rank if several of
    its experts are there. Nothing is dropped and nothing padded; a rank may have no tokens, or get no rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_shards: int = 1, codec: Codec | str = "auto") -> None:
        """Experts are spread over `group`, one after the other.

        Arguments:
            group: `Grid.ep`, or with shards `Grid.joint`.
            num_shards: N_ESP ranks next to each other that share each expert; their outputs are added.
            codec: of rows and their gradients, as in `laconic.collectives`.

        Raises ConfigError if the group's ranks cannot be cut into `num_shards`.
        """
        if num_shards < 1 or group.size() % num_shards:
            raise ConfigError(
                f"num_shards is {num_shards}, but it must divide the group's {group.size()} ranks; pass Grid.joint"
                " and the grid's esp"
            )
        self.group, self.num_shards, self.codec = group, num_shards, codec

    @property
    def num_places(self) -> int:
        """N_EP: different places for experts."""
        return self.group.size() // self.num_shards

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`. Raises RoutingError if experts cannot be spread evenly."""
        num_local_experts(routing.num_experts, self.num_places)
        rows, counts = order.permute(x, routing)
        arrival = Arrival.agree(counts, self.num_shards, self.group)
        rows = self.send(rows, arrival)
        return Dispatched(rows, arrival.counts, (routing, order, arrival))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        routing, order, arrival = dispatched.state
        result: Tensor = order.combine(self.send_back(attached(rows, dispatched.rows), arrival), routing)
        return result

    def send(self, rows: Tensor, arrival: Arrival) -> Tensor:
        """Rows [a, M] sorted by expert, to their experts: [q, M] sorted by expert."""
        rows = copied(rows, arrival.sent[:: self.num_shards], self.num_shards)
        table = arrival.table
        rows = all_to_all_rows(rows, arrival.received, arrival.sent, self.group, codec=self.codec, table=table)
        return permuted(rows, arrival.index, arrival.inverse)

    def send_back(self, rows: Tensor, arrival: Arrival) -> Tensor:
        """Outputs [q, M] to where the rows came from: [a, M], shards added up."""
        rows = permuted(rows, arrival.inverse, arrival.index)
        back = list(zip(*arrival.table, strict=True))
        rows = all_to_all_rows(rows, arrival.sent, arrival.received, self.group, codec=self.codec, table=back)
        return added_up(rows, arrival.sent[:: self.num_shards], self.num_shards)


def num_local_experts(num_experts: int, num_places: int) -> int:
    """Experts of each rank. Raises RoutingError if they are not whole."""
    if num_experts % num_places:
        raise RoutingError(
            f"num_experts is {num_experts}, but {num_places} expert-parallel ranks can only share a multiple of"
            f" {num_places} evenly; change ep or the number of experts"
        )
    return num_experts // num_places


def attached(rows: Tensor, arrived: Tensor) -> Tensor:
    """Outputs `rows` that hang on their inputs `arrived`, and certainly on a graph while gradients are on.

    The other ranks' backward waits for this one's, but experts may return no rows that nothing leads to.
    """
    if not torch.is_grad_enabled():
        return rows
    if not len(rows):
        rows = rows + arrived.sum().to(rows.dtype)  # of nothing
    return rows if rows.requires_grad else rows.detach().requires_grad_()


def copied(rows: Tensor, sizes: Sequence[int], num_copies: int) -> Tensor:
    """Each part of rows [a, M], sizes[i] of them, `num_copies` times: [num_copies * a, M]; backward adds up."""
    if num_copies == 1:
        return rows
    result: Tensor = _Copied.apply(rows, tuple(sizes), num_copies)
    return result


def added_up(rows: Tensor, sizes: Sequence[int], num_copies: int) -> Tensor:
    """The transpose of `copied`: the sum over the copies of each part, in fp32 (fp64 for fp64), rounded once."""
    if num_copies == 1:
        return rows
    result: Tensor = _AddedUp.apply(rows, tuple(sizes), num_copies)
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], num_copies: int) -> Tensor:
        ctx.sizes, ctx.num_copies = sizes, num_copies
        return torch.cat([part for part in rows.split(sizes) for _ in range(num_copies)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return added_up(grads[0], ctx.sizes, ctx.num_copies), None, None


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], num_copies: int) -> Tensor:
        ctx.sizes, ctx.num_copies = sizes, num_copies
        dtype = accumulation_dtype(rows.dtype)
        sums = rows.new_empty(sum(sizes), rows.shape[1], dtype=dtype)
        parts = rows.split([size for size in sizes for _ in range(num_copies)])
        for number, out in enumerate(sums.split(sizes)):
            first, *others = parts[number * num_copies : (number + 1) * num_copies]
            out.copy_(first)
            for part in others:
                out.add_(part)
        return sums.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return copied(grads[0], ctx.sizes, ctx.num_copies), None, None
