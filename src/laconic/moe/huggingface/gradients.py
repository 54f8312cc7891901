"""Norm and clipping of gradients of which each process has other shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.errors import ConfigError
from laconic.formats.shards import local_part


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients to a common 2-norm of at most `max_norm`; return the norm before, 0-dim fp32 (or fp64).

    A `max_norm` that is negative or NaN is a ConfigError.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm}, but it must be at least 0; inf leaves gradients as they are")
    before = norm(parameters)
    scale(parameters, before, max_norm)
    return before


def norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients, 0-dim fp32 (or fp64), the same on every process; all processes call it.

    Shards of DTensors are added up over the processes that hold the others.
    """
    sums: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(parameter.grad, DTensor):
            mesh, placements = parameter.grad.device_mesh, parameter.grad.placements
            # FSDP2 on top of experts has shards of another class, which is_shard() does not count.
            groups = tuple(mesh.get_group(dim) for dim, place in enumerate(placements) if not place.is_replicate())
        grad = local_part(parameter.grad)
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(grad, dtype=dtype).square()
        sums[groups] = sums[groups] + square if groups in sums else square
    total = torch.zeros((), dtype=torch.float32, device="cpu")
    for groups, square in sums.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square + total.to(square.device)
    return total.sqrt()


def scale(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), in place."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor.to(parameter.grad.dtype))
