"""Collectives as calls that can be repeated: torch's own, or this library's over a codec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def normal(numel: int) -> Tensor:
    """bf16 [numel] from a normal distribution, as weights are; different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (0.02 * torch.randn(numel, generator=generator)).bfloat16()


def call(operation: str, x: Tensor, *, codec: Any = None, group: Any = None) -> Callable[[], object]:
    """One collective of what every rank has in x [numel], with the same input in every call.

    Without a codec it is torch.distributed's own. "send and receive": rank 0 sends x to rank 1, which answers. "ring",
    of torch.distributed only: an isend to the next rank and an irecv from the one before.
    """
    from laconic import collectives

    rank, world = dist.get_rank(), dist.get_world_size()
    ours = codec is not None
    api: Any = collectives if ours else dist
    how = {"group": group, "codec": codec} if ours else {"group": group}
    length = max(1, x.numel() // world)
    rows, part, out = x[: world * length], x.new_empty(length), torch.empty_like(x)
    whole = x.new_empty(world * x.numel()) if operation in ("all_gather", "gather") else x
    if operation == "all_reduce":  # a sum in place would grow and grow
        return lambda: api.all_reduce(out.copy_(x), **how)
    if operation == "broadcast":
        return lambda: api.broadcast(out.copy_(x), 0, **how)
    if operation == "send and receive":
        return partial(_answer if rank == 1 else _ask, api, x, out, how) if rank < 2 else lambda: None
    if operation == "ring":
        return partial(_ring, x, out, (rank - 1) % world, (rank + 1) % world, group)
    if operation == "gather":
        parts = None if rank else whole if ours else list(whole.chunk(world))
        return partial(api.gather, *((parts, x) if ours else (x, parts)), 0, **how)
    if operation == "scatter":
        parts = None if rank else rows if ours else list(rows.chunk(world))
        return partial(api.scatter, part, parts, 0, **how)
    output = {"all_gather": whole, "reduce_scatter": part, "all_to_all": torch.empty_like(rows)}[operation]
    function = getattr(collectives, operation) if ours else _torch_function(operation)
    return partial(function, output, x if operation == "all_gather" else rows, **how)


def _torch_function(operation: str) -> Any:
    """torch's function on one tensor; torch 2.13 renamed two of them."""
    return {
        "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
        "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }[operation]


def _ask(api: Any, x: Tensor, out: Tensor, how: dict[str, Any]) -> None:
    api.send(x, 1, **how)
    api.recv(out, 1, **how)


def _answer(api: Any, x: Tensor, out: Tensor, how: dict[str, Any]) -> None:
    api.recv(out, 0, **how)
    api.send(x, 0, **how)


def _ring(x: Tensor, out: Tensor, before: int, after: int, group: Any) -> None:
    works = [dist.isend(x, group_dst=after, group=group), dist.irecv(out, group_src=before, group=group)]
    for work in works:
        assert work is not None
        work.wait()
