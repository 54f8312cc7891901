"""How the ranks of a collective lie: each layout carries out the same kinds of collectives on flat tensors.

- `Exchange` (call.py): one process group, whose ranks all exchange with each other.
- `TwoLevelExchange`: machines with a fast inside and a slow network between them. Rank r of N nodes with L ranks each
  has local rank r % L on node r // L. Inside of a node values are sent raw, between nodes each rank exchanges with
  those of its local rank, over the codec, so that each value crosses the slow links once.
- `OneRank`: nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime.group_facts import check_member
from laconic.ops.huge_pages import empty

if TYPE_CHECKING:
    from laconic.collectives.engine.call import Exchange


@dataclass(frozen=True)
class TwoLevel:
    """A collective in two levels: native inside a node of L processes, compressed between nodes.

    With a mesh of shape (nodes, L) and names ("cluster", "node") the groups are `mesh["node"].get_group()` and
    `mesh["cluster"].get_group()`.

    Raises:
        ConfigError: a group does not contain this process.
    """

    node: dist.ProcessGroup
    """The L processes of this machine, in the same order on every machine."""
    cluster: dist.ProcessGroup
    """The processes that have this one's local rank on their machines."""

    def __post_init__(self) -> None:
        for group in (self.node, self.cluster):
            check_member(group)


class OneRank:
    """A call of a rank without others, which has nothing to send: `Exchange` says what the arguments are."""

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """The only row of `rows` becomes `mine`."""
        rows[0].copy_(mine)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """`received` becomes `sent`."""
        received.copy_(sent)

    def all_to_all_uneven(self, received: Sequence[Tensor], sent: Sequence[Tensor], *_: Any) -> None:
        """`received` becomes `sent`."""
        received[0].copy_(sent[0])

    def broadcast(self, x: Tensor, src: int) -> None:
        """`x` stays as it is."""

    def gather(self, rows: Tensor | None, mine: Tensor, dst: int) -> None:
        """The only row of `rows` becomes `mine`."""
        assert rows is not None
        rows[0].copy_(mine)

    def scatter(self, mine: Tensor, rows: Tensor | None, src: int) -> None:
        """`mine` becomes the only row of `rows`."""
        assert rows is not None
        mine.copy_(rows[0])

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        """`mine` becomes the only row of `rows`."""
        mine.copy_(rows[0])

    def all_reduce(self, x: Tensor, factor: float) -> None:
        """`x` stays as it is."""


@dataclass(slots=True)
class TwoLevelExchange:
    """A call on two levels, `node` inside and `cluster` between nodes; results are those of `Exchange` but for sums."""

    node: Exchange
    cluster: Exchange

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """rows[r] of rows [W, n] becomes rank r's `mine` [n]; exactly what one level gives.

        Between nodes first: what arrives there is passed on inside, decoded.
        """
        column = empty((self.cluster.world, mine.numel()), mine.dtype, mine.device)
        self.cluster.all_gather(column, mine)
        columns = empty((self.node.world, column.numel()), mine.dtype, mine.device)
        self.node.all_gather(columns, column.view(-1))
        rows.view(self.cluster.world, self.node.world, -1).copy_(
            columns.view(self.node.world, self.cluster.world, -1).transpose(0, 1)
        )

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """received[r] becomes what rank r has for this one in its sent [W, n]; exactly what one level gives.

        Inside the node first: each rank collects what its node has for the ranks of its own local rank on all nodes.
        """
        by_local_rank = _turned(sent, self.cluster.world)  # [local rank, node * n]
        collected = empty(by_local_rank.shape, sent.dtype, sent.device)  # [source's local rank, node * n]
        self.node.all_to_all(collected, by_local_rank)
        by_node = _turned(collected.view(sent.shape), self.node.world)  # [node, source's local rank * n]
        self.cluster.all_to_all(received.view(by_node.shape), by_node)

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        """`mine` [n] becomes the sum of rows[rank] of rows [W, n]: each node's in fp32, rounded, then theirs."""
        by_local_rank = _turned(rows, self.cluster.world)
        sums = empty(by_local_rank.shape[1:], mine.dtype, mine.device)
        node_factor, cluster_factor = (factor, 1.0) if self.cluster.world == 1 else (1.0, factor)
        self.node.reduce_scatter(sums, by_local_rank, node_factor)
        self.cluster.reduce_scatter(mine, sums.view(self.cluster.world, -1), cluster_factor)

    def all_reduce(self, x: Tensor, factor: float) -> None:
        """`x` [n] becomes its sum: each node's in fp32, rounded, then theirs, rounded; a part per local rank."""
        step = -(-x.numel() // self.node.world)
        flat = empty((self.node.world * step,), x.dtype, x.device)
        flat[: x.numel()].copy_(x)
        flat[x.numel() :].zero_()
        rows = flat.view(self.node.world, step)
        sums = empty((step,), x.dtype, x.device)
        node_factor, cluster_factor = (factor, 1.0) if self.cluster.world == 1 else (1.0, factor)
        self.node.reduce_scatter(sums, rows, node_factor)
        self.cluster.all_reduce(sums, cluster_factor)
        self.node.all_gather(rows, sums)
        x.copy_(flat[: x.numel()])


def _turned(x: Tensor, num: int) -> Tensor:
    """[m, num * n] of x [num * m, n]: part i of row j is row i * m + j. A view where these lie in order."""
    m, n = len(x) // num, x.shape[1]
    if num == 1 or m == 1:
        return x.view(m, num * n)
    turned = empty((m, num, n), x.dtype, x.device)
    return turned.copy_(x.view(num, m, n).transpose(0, 1)).view(m, num * n)
