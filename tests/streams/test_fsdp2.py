"""FSDP2's custom reduce-scatters and all-gather, called on the streams that FSDP2 calls them on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import Raw
from laconic.collectives.integrations.fsdp2 import DefaultReduceScatter, ZipAllGather, ZipReduceScatter
from laconic.gradients.fsdp2 import Q8ReduceScatter
from laconic.moe.pipeline.grad_reduce import DenseGradients
from laconic.moe.pipeline.grad_reduce_fsdp2 import _Deferred
from laconic.schedule.moe_gradients import GradientPlan, ReductionSlot
from tests.streams.cuda import CUDA, cuda
from tests.streams.echo import echo

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


@pytest.mark.parametrize(
    "reduce_scatter",
    [
        lambda: Q8ReduceScatter(min_nbytes=0),
        lambda: Q8ReduceScatter(min_nbytes=1 << 20),
        lambda: ZipReduceScatter(Raw()),
        DefaultReduceScatter,
    ],
)
def test_a_unit_gathers_and_reduces(reduce_scatter: Callable[[], Any]) -> None:
    with cuda() as device, echo() as group:
        unit = Unit(group, ZipAllGather(Raw()), reduce_scatter())
        for _ in range(3):
            unit.backward(unit.forward())
            unit.step()
    device.check(150)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("inner", [lambda: Q8ReduceScatter(min_nbytes=0), lambda: ZipReduceScatter(Raw())])
def test_a_unit_that_reduces_in_slots(inner: Callable[[], Any], share: float) -> None:
    """Behind a layer the link's stream reduces a share while backward goes on, and the rest at the end."""
    behind = ReductionSlot("dense", None, share * 2 * NUMEL * 4, 0.0, 0.0)
    plan = GradientPlan((ReductionSlot("moe", 2, 0.0, 0.0, 0.0), behind), 0.0, 0.0, ())
    with cuda() as device, echo() as group:
        gradients = DenseGradients([], None, plan)
        parameter = SimpleNamespace(sharded_param=nn.Parameter(torch.zeros(1)))
        param_group = SimpleNamespace(_reduce_scatter_comm=inner(), fsdp_params=[parameter], _orig_dtype=None)
        unit = Unit(group, ZipAllGather(Raw()), _Deferred("unit", param_group, gradients, group))
        for _ in range(3):
            out = unit.forward()
            unit.backward(out)
            gradients.after("moe")
            torch.cuda.current_stream().wait_event(unit.event)
            unit.held = None  # as FSDP2 does when its own stream has been waited for
            out = out * 2
            gradients.finish()
            unit.step()
    device.check(150)
