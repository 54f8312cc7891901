"""The mean of experts' gradients over data-parallel ranks, as a node in the graph of each forward.

[Note: the mean in the graph]
Backward of the exchange brings all rows' gradients to an expert; those of its N_EDP replicas are still to be added, and
the sum to be divided by N_DP. A hook on a parameter would be lost where a host replaces the parameter (`Module._apply`
of a DTensor does), and would not know which forward a gradient is of. A node in front of the parameters is part of the
forward that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from laconic.formats.shards import local_part
from laconic.moe.parallel.grid import Grid


class ExpertMean:
    """Divides gradients by N_DP after adding them over the N_EDP replicas."""

    def __init__(self, grid: Grid) -> None:
        self._divisor = grid.layout.dp
        self._replicas = grid.edp if grid.layout.edp > 1 else None

    def call(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return experts(rows, counts); gradients of parameters become their mean on the way to them."""
        trained = {name: p for name, p in experts.named_parameters() if p.requires_grad}
        out: Tensor = functional_call(
            experts, dict(zip(trained, self.through(trained.values()), strict=True)), (rows, counts)
        )
        return out

    def through(self, parameters: Iterable[Tensor]) -> Sequence[Tensor]:
        """Return the same values, whose gradients are reduced together."""
        found: Sequence[Tensor] = _Mean.apply(self, False, *parameters)
        return found

    def of(self, grad: Tensor) -> Tensor:
        """Return the mean of a gradient of this rank and its replicas', all of which call it."""
        grad = grad / self._divisor
        if self._replicas is not None:
            held = local_part(grad)
            summed = held.contiguous()
            dist.all_reduce(summed, group=self._replicas)
            if summed is not held:
                held.copy_(summed)
        return grad


class _Mean(torch.autograd.Function):
    """The identity, or the mean; the derivative of both is the mean, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, mean: ExpertMean, of_gradients: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mean = mean
        return tuple(mean.of(x) if of_gradients else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_Mean.apply(ctx.mean, True, *grads)
