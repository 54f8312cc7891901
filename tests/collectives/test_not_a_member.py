"""What torch gives a process outside of a new group is refused by whatever takes a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic import collectives
from laconic.errors import ConfigError
from laconic.gradients import all_reduce_q8, reduce_scatter_q8

OUTSIDE: Any = dist.GroupMember.NON_GROUP_MEMBER
X = torch.ones(8)
CALLS: dict[str, Callable[[], object]] = {
    "all_gather": lambda: collectives.all_gather(X, X, OUTSIDE),
    "all_reduce": lambda: collectives.all_reduce(X, OUTSIDE),
    "all_to_all": lambda: collectives.all_to_all(X, X, group=OUTSIDE),
    "broadcast": lambda: collectives.broadcast(X, 0, OUTSIDE),
    "send": lambda: collectives.send(X, 0, OUTSIDE),
    "TwoLevel": lambda: collectives.TwoLevel(OUTSIDE, OUTSIDE),
    "all_reduce_q8": lambda: all_reduce_q8(X, OUTSIDE),
    "reduce_scatter_q8": lambda: reduce_scatter_q8(X, OUTSIDE),
    "compress_gradients": lambda: laconic.compress_gradients(torch.nn.Linear(8, 8), OUTSIDE),
    "audit": lambda: laconic.audit(torch.nn.Linear(8, 8), X, group=OUTSIDE),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="group does not contain this process"):
        CALLS[name]()
