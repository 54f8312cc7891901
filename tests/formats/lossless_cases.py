"""Tensors that the lossless format is tried on, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES

DTYPES = EXPONENT_DTYPES
"""Those that windows code; `structured.py` has the others too."""


EVERY_DTYPE = [
    dtype
    if dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64)
    else pytest.param(dtype, marks=pytest.mark.slow)
    for dtype in DTYPE_NUMBERS
]
"""One of each kind, and the others that repeat them, which are slow in plain torch."""


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 around 1 in the given type; integers get what a quantizer makes of it."""
    if dtype == torch.uint8:
        return (x * 30 + 128).clamp(0, 255).to(dtype)
    if dtype == torch.int8:
        return (x * 30).clamp(-127, 127).to(dtype)
    return x.to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal values, in integers around their middle."""
    return as_dtype(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dtype)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All values of an 8-bit or 16-bit type in order of their bits; 2**17 random words of a 32-bit type."""
    generator = torch.Generator().manual_seed(1)
    size = torch.empty((), dtype=dtype).element_size()
    if size == 4:
        return torch.randint(0, 256, (4 << 17,), dtype=torch.uint8, generator=generator).view(dtype)
    return torch.arange(1 << (8 * size)).to(torch.int16 if size == 2 else torch.uint8).view(dtype)


def arithmetic(numel: int, dtype: torch.dtype) -> Tensor:
    """Near-normal values made by whole numbers, the same in every release of torch: for golden bytes."""
    index = torch.arange(4 * numel)
    noise = ((index * 2654435761 + 12345) % (1 << 32)) >> 22  # 10 bits
    four = noise.view(4, numel) - 511
    return as_dtype(four.sum(0).float() / 1024, dtype)


def special_tensors(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Values and shapes that take every branch of the encoder, and what networks really produce at their worst."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(2)
    ones = torch.full((5000 * size,), 255, dtype=torch.uint8).view(dtype)
    yield "all bits set", ones
    yield "zeros", torch.zeros(5000, dtype=dtype)
    yield "minus zeros", as_dtype(-torch.zeros(5000), dtype)
    yield "all equal", as_dtype(torch.full((5000,), 0.7), dtype)
    for share in (0.1, 0.13, 0.5, 0.99):
        kept = torch.rand(9000, generator=generator) >= share
        yield f"{share:.0%} zeros", torch.where(kept, normal(9000, dtype=dtype), torch.zeros((), dtype=dtype))
    yield "zeros that the sample misses", torch.where(torch.arange(8192) % 512 < 32, 1.5, 0.0).to(dtype)
    yield "zeros that only the sample has", torch.where(torch.arange(8192) % 512 < 32, 0.0, 1.5).to(dtype)
    yield "alternating far apart", as_dtype(torch.tensor([1e-3, 2.0]).repeat(3000), dtype)
    escaping = torch.where(torch.arange(8192) % 512 < 32, 1.0, 1e-4 * normal(8192).abs())
    yield "an exponent that only the sample has", as_dtype(escaping, dtype)
    yield "random bits", torch.randint(0, 256, (9001 * size,), generator=generator, dtype=torch.uint8).view(dtype)
    yield "heavy tails", as_dtype(normal(9001) / normal(9001, seed=5), dtype)
    yield "scales per row", as_dtype(normal(40, 500) * torch.exp2(6 * normal(40, 1, seed=6)), dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        largest = [info.max, info.min, info.tiny, float("nan"), -0.0, info.smallest_normal / 2]
        yield "extremes", torch.tensor(largest * 1000).to(dtype)
        yield "denormal", (normal(5000) * info.smallest_normal / 4).to(dtype)
    yield "every pattern", every_pattern(dtype)
    yield "0-d", normal(dtype=dtype)
    for shape in ((0,), (3, 0, 2), (1,) * 8, (2, 3, 5, 7, 11)):
        yield f"shape {shape}", normal(*shape, dtype=dtype)
    yield "transposed", normal(70, 130, dtype=dtype).t()
    yield "every third", normal(15001, dtype=dtype)[::3]
    yield "expanded", normal(1, 300, dtype=dtype).expand(30, 300)
    yield "storage offset", normal(5004, dtype=dtype)[3:]
