"""torch's `monitored_barrier` for laconic's groups.

torch's function refuses every group whose backend is not called gloo, before it asks the group. So the first group that
is laconic's puts a function before it that asks laconic's groups and hands all others on; a program that makes no such
group keeps torch's own.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

__all__ = ["take_groups_of"]


@cache  # a second call changes nothing
def take_groups_of(kind: type[Any]) -> None:
    """Let `torch.distributed.monitored_barrier` ask the groups of a class."""
    original = dist.monitored_barrier

    @wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found: Any = dist.group.WORLD if group is None else group
        if isinstance(found, kind):
            found.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
