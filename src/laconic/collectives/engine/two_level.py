"""Two-level collectives for machines with a fast inside and a slow network between them: two process groups.

Rank r of N nodes with L ranks each has local rank r % L on node r // L. Inside of a node values are sent raw, between
nodes each rank exchanges with those of its local rank, over the codec, so that each value crosses the slow links once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.engine.call import Exchange

__all__ = [
    "TwoLevel",
    "all_gather_on_two_levels",
    "all_reduce_on_two_levels",
    "all_to_all_on_two_levels",
    "reduce_scatter_on_two_levels",
]


@dataclass(frozen=True)
class TwoLevel:
    """A collective in two levels: native inside a node of L processes, compressed between nodes.

    With a mesh of shape (nodes, L) and names ("cluster", "node") the groups are `mesh["node"].get_group()` and
    `mesh["cluster"].get_group()`.
    """

    node: dist.ProcessGroup
    """The L processes of this machine, in the same order on every machine."""
    cluster: dist.ProcessGroup
    """The processes that have this one's local rank on their machines."""


def all_gather_on_two_levels(node: Exchange, cluster: Exchange, rows: Tensor, mine: Tensor) -> None:
    """rows[r] of rows [W, n] becomes rank r's `mine` [n]; exactly what one level gives.

    Between nodes first: what arrives there is passed on inside, decoded.
    """
    column = mine.new_empty(cluster.world, mine.numel())
    cluster.all_gather(column, mine)
    columns = mine.new_empty(node.world, column.numel())
    node.all_gather(columns, column.view(-1))
    rows.view(cluster.world, node.world, -1).copy_(columns.view(node.world, cluster.world, -1).transpose(0, 1))


def all_to_all_on_two_levels(node: Exchange, cluster: Exchange, received: Tensor, sent: Tensor) -> None:
    """received[r] becomes what rank r has for this one in its sent [W, n]; exactly what one level gives.

    Inside the node first: each rank collects what its node has for the ranks of its own local rank on all nodes.
    """
    shape = (cluster.world, node.world, sent.shape[1])
    by_local_rank = sent.view(shape).transpose(0, 1).contiguous()  # [local rank, node, n]
    collected = torch.empty_like(by_local_rank)  # [source's local rank, node, n]
    node.all_to_all(collected.view(node.world, -1), by_local_rank.view(node.world, -1))
    by_node = collected.transpose(0, 1).contiguous()  # [node, source's local rank, n]
    cluster.all_to_all(received.view(cluster.world, -1), by_node.view(cluster.world, -1))


def reduce_scatter_on_two_levels(node: Exchange, cluster: Exchange, mine: Tensor, rows: Tensor, factor: float) -> None:
    """`mine` [n] becomes the sum of rows[rank] of rows [W, n]: of each node in fp32, rounded, then of these in fp32."""
    by_local_rank = rows.view(cluster.world, node.world, -1).transpose(0, 1).contiguous().view(node.world, -1)
    sums = mine.new_empty(by_local_rank.shape[1])
    node_factor, cluster_factor = (factor, 1.0) if cluster.world == 1 else (1.0, factor)
    node.reduce_scatter(sums, by_local_rank, node_factor)
    cluster.reduce_scatter(mine, sums.view(cluster.world, -1), cluster_factor)


def all_reduce_on_two_levels(node: Exchange, cluster: Exchange, x: Tensor, factor: float) -> None:
    """`x` [n] becomes its sum: of each node in fp32, rounded, then of these in fp32, rounded; a part per local rank."""
    step = -(-x.numel() // node.world)
    rows = x.new_zeros(node.world * step)
    rows[: x.numel()].copy_(x)
    rows = rows.view(node.world, step)
    sums = x.new_empty(step)
    node_factor, cluster_factor = (factor, 1.0) if cluster.world == 1 else (1.0, factor)
    node.reduce_scatter(sums, rows, node_factor)
    cluster.all_reduce(sums, cluster_factor)
    node.all_gather(rows, sums)
    x.copy_(rows.view(-1)[: x.numel()])
