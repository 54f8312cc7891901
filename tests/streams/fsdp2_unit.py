"""One unit of FSDP2 as it issues work, for tests that look between its steps; FSDP2 itself is in test_wrappers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.streams.cuda import CUDA

__all__ = ["Unit"]

NUMEL = 160  # of a shard


class Unit:
    """One FSDP2 unit over steps, as its foreach_all_gather and foreach_reduce issue work."""

    def __init__(self, group: dist.ProcessGroup, all_gather: Any, reduce_scatter: Any) -> None:
        self.group, self.all_gather, self.reduce_scatter = group, all_gather, reduce_scatter
        self.gathers, self.reduces = torch.cuda.Stream(), torch.cuda.Stream()
        self.shard = torch.linspace(-1, 1, NUMEL, device=CUDA)
        self.gradient: Tensor | None = None

    def forward(self) -> Tensor:
        compute = torch.cuda.current_stream()
        self.gathers.wait_stream(compute)
        with torch.cuda.stream(self.gathers):
            whole = self.all_gather.allocate((self.group.size() * NUMEL,), dtype=torch.float32, device=CUDA)
            mine = self.shard * 1
            work = self.all_gather(whole, mine, self.group, False)
            gathered = torch.cuda.current_stream().record_event()
        if work is not None:
            work.wait()
        compute.wait_event(gathered)
        whole.record_stream(compute)
        return whole.square()

    def backward(self, out: Tensor) -> None:
        """Leave the reduced gradient, still under way on the stream for reductions; return what must be held."""
        rows = self.reduce_scatter.allocate((self.group.size() * NUMEL,), dtype=torch.float32, device=CUDA)
        rows.copy_(out * 2)
        self.reduces.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.reduces):
            mine = self.reduce_scatter.allocate((NUMEL,), dtype=torch.float32, device=CUDA)
            self.reduce_scatter(mine, rows, self.group, dist.ReduceOp.AVG)
        self.held, self.event, self.gradient = rows, self.reduces.record_event(), mine

    def step(self) -> None:
        """What FSDP2 does at the end of backward, and an optimizer's step."""
        torch.cuda.current_stream().wait_event(self.event)
        del self.held
        assert self.gradient is not None
        self.shard = self.shard - 0.1 * self.gradient
        self.gradient = None
