"""Machines that are fast inside and slow between: two process groups instead of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["TwoLevel"]


@dataclass(frozen=True)
class TwoLevel:
    """A collective in two levels: native inside a node of L processes, compressed between nodes.

    With a mesh of shape (nodes, L) and names ("cluster", "node") the groups are `mesh["node"].get_group()` and
    `mesh["cluster"].get_group()`.
    """

    node: dist.ProcessGroup
    """The L processes of this machine, in the same order on every machine."""
    cluster: dist.ProcessGroup
    """The processes that have this one's place on their machines."""
