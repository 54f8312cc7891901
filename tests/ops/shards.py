"""Shards of gradients in 8 and 12 bits, as the sums of `laconic.ops` take them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.ops import reference

LENGTHS = (0, 1, 2, 15, 127, 128, 129, 300, 1024)
FACTORS = (1.0, 0.5, 1 / 3)


def shards_of(x: Tensor, bits: int) -> tuple[Tensor | None, ...]:
    """x [W, n] as codes and scales of 8 bits, or with a residual of 12."""
    codes, scales = reference.quantize_blockwise(x, "int8", 128, torch.float32, None)
    if bits == 8:
        return codes, scales, None, None
    rest = x - reference.dequantize_blockwise(codes, scales, "int8", 128, x.shape[1], torch.float32)
    return codes, scales, *reference.quantize_blockwise(rest, "int4", 128, torch.float32, None)


def strided(parts: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same numbers in rows that lie apart."""
    return tuple(x if x is None else torch.nn.functional.pad(x, (3, 5))[:, 3 : 3 + x.shape[1]] for x in parts)


def awkward_shards() -> Iterator[tuple[str, Tensor]]:
    """Named gradients [W, n]: sizes around the blocks, magnitudes, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(2)
    for length in LENGTHS:
        yield f"length {length}", torch.randn(3, length, generator=generator)
    yield "one shard", torch.randn(1, 200, generator=generator)
    yield "many shards", torch.randn(17, 260, generator=generator)
    wide = torch.randn(4, 400, generator=generator) * torch.exp2(40 * torch.randn(4, 400, generator=generator))
    yield "wide", wide
    yield "tiny", torch.randn(3, 300, generator=generator) * 2.0**-125
    yield "huge", torch.randn(3, 300, generator=generator) * 1e38
    yield "zeros", torch.zeros(2, 130)
    cancelling = torch.randn(1, 300, generator=generator)
    yield "cancelling", torch.cat((cancelling, -cancelling))
    broken = torch.randn(3, 400, generator=generator)
    broken[0, 3], broken[1, 200], broken[2, 399] = float("nan"), float("inf"), -float("inf")
    yield "broken", broken
