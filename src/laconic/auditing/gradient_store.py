"""Gradients in codes against the gradients that autograd made, over two micro-batches and, with a group, its ranks.

Backward runs twice into the store, as with two micro-batches, and `reduce()` averages. What comes out has to be the
mean over the ranks of twice the gradient. The bound is derived: each of at most four roundings (two additions, two of a
reduction) is off by half a step of its block, the block's largest magnitude over 127, of which no rank's is larger than
the sum over the ranks; twelve bits code what is left in fourteen steps, of which half are allowed. A sample of whole
blocks of each parameter is compared, so that ranks add up little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.auditing.comparison import Difference
from laconic.formats.gradient import GRADIENT_FORMAT
from laconic.formats.shards import local_part
from laconic.gradients import CompressedGradients

_BLOCK = GRADIENT_FORMAT.block_size
_MAX_BLOCKS = 64
_ROUNDINGS = 4


@torch.no_grad()
def check_store(
    store: CompressedGradients, gradients: Mapping[str, Tensor | None], backward: Callable[[], None]
) -> list[Difference]:
    """The parameters whose gradients in codes are others; all ranks of the store's group call it together.

    Args:
        store: that holds nothing; nothing is what it holds afterwards.
        gradients: of one `backward`, by the names of the store.
        backward: adds the same gradients once.
    """
    try:
        with torch.enable_grad():
            backward()
            with store.last_micro_batch():
                backward()
        store.reduce()
        found = {name: codes.dequantize() for name, codes in store.gradients().items()}
    finally:
        store.zero_()
    group, average = store.group, store.has_group
    wanted = {}
    for name, parameter in store.parameters.items():
        one = gradients.get(name)
        wanted[name] = _sample(torch.zeros_like(local_part(parameter)) if one is None else one) * 2
    largest = {name: _largest(one) for name, one in wanted.items()}
    if group is not None:
        wanted, largest = _over_ranks(wanted, group, average), _over_ranks(largest, group, average)
    differing = []
    for name, expected in wanted.items():
        if not bool(expected.isfinite().all()):
            continue
        got = found.get(name)
        size = float(expected.norm())
        if got is None:
            if size > 0:
                differing.append(Difference(name, math.inf, 0.0, "has no gradient in codes"))
            continue
        bound = largest[name] * (_ROUNDINGS / 254 if store.bits == 8 else _ROUNDINGS / (254 * 7)) + 1e-30
        excess = (_sample(got) - expected).abs() > bound.repeat_interleave(_BLOCK)[: len(expected)]
        if bool(excess.any()):
            slope = float(_sample(got) @ expected) / size**2 if size else math.inf
            error = float((_sample(got) - expected).norm()) / size if size else math.inf
            differing.append(
                Difference(name, error, slope, f"has {slope:.3f} times the gradient of all ranks and micro-batches")
            )
    return sorted(differing, key=lambda one: -one.error)


def _sample(gradient: Tensor) -> Tensor:
    """Whole blocks of a gradient, evenly chosen; fp32, flat."""
    flat = gradient.detach().float().reshape(-1)
    blocks = -(-flat.numel() // _BLOCK)
    if blocks <= _MAX_BLOCKS:
        return flat
    # The last one may be short.
    chosen = (
        torch.linspace(0, blocks - 2, _MAX_BLOCKS, dtype=torch.float32, device="cpu").long().unique().to(flat.device)
    )
    return flat[: (blocks - 1) * _BLOCK].view(-1, _BLOCK)[chosen].reshape(-1)


def _largest(sample: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(sample.abs(), (0, -len(sample) % _BLOCK))
    return padded.view(-1, _BLOCK).amax(-1)


def _over_ranks(tensors: Mapping[str, Tensor], group: dist.ProcessGroup, average: bool) -> dict[str, Tensor]:
    """Their mean, or sum, over the ranks of a group: one raw all-reduce."""
    together = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    dist.all_reduce(together, group=group)
    if average:
        together = together / group.size()
    parts = together.split([tensor.numel() for tensor in tensors.values()])
    return dict(zip(tensors, parts, strict=True))
