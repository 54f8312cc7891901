"""Gradients of a model whose experts are on different processes: averaged, measured, clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.collectives import operations
from laconic.collectives.codec import Codec
from laconic.formats.shards import local_part
from laconic.moe.grid import Grid

__all__ = ["average", "clip"]

# Elements of one message: small gradients travel together, and a buffer of this size is all that is needed besides.
_BUCKET_NUMEL = 1 << 23


def average(
    dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], grid: Grid, codec: Codec | str = "auto"
) -> None:
    """Divide sums of gradients by numbers of processes: `dense` over the dp group, `experts` over the edp group.

    A parameter that has no gradient on one process has none on any, but for experts nobody chose: theirs is zero.
    """
    for parameters, group in ((dense, grid.dp), (experts, grid.edp)):
        if group.size() > 1:
            for bucket in _buckets(parameters):
                flat = torch.cat([grad.flatten() for grad in bucket])
                operations.all_reduce(flat, group, codec=codec)
                flat /= group.size()
                for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                    grad.copy_(part.view_as(grad))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            # Another process's tokens may have needed it.
            parameter.grad = torch.zeros_like(parameter)
        grad = local_part(parameter.grad)
        if bucket and (grad.dtype != bucket[0].dtype or sum(g.numel() for g in bucket) + grad.numel() > _BUCKET_NUMEL):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def clip(dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], grid: Grid | None, max_norm: float) -> Tensor:
    """Scale all gradients so that their common 2-norm is at most `max_norm`; the norm before, 0-dim fp32 (or fp64).

    Shards of DTensors are added up over the processes that hold the others.
    """
    total = _square(dense) + _square(experts)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*dense, *experts):
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor.to(parameter.grad.dtype))
    return norm


def _square(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The sum of squares of all gradients, on every process the same."""
    sums: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(parameter.grad, DTensor):
            mesh, placements = parameter.grad.device_mesh, parameter.grad.placements
            groups = tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())
        grad = local_part(parameter.grad)
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(grad, dtype=dtype).square()
        sums[groups] = sums[groups] + square if groups in sums else square
    total = torch.zeros(())
    for groups, square in sums.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square + total.to(square.device)
    return total
