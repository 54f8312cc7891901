"""The tensors that implementations of the block-wise ops are compared on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.ops import BITS
from laconic.ops.codebooks import AFFINE

CODES = tuple(BITS)
SYMMETRIC = tuple(code for code in CODES if code not in AFFINE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (16, 32, 64, 128, 256)
SEEDS = (None, 5)
# The last indices of the first 2**32 and the first of the next fall into most tensors of this suite.
FIRST_INDEX = 2**32 - 77


def each_code(codes: Tensor, code: str, length: int) -> Tensor:
    """The codes in bytes [rows, ceil(length * bits / 8)], one per element: [rows, length], cut out of one integer."""
    bits, rows = BITS[code], []
    for row in codes.tolist():
        stream = int.from_bytes(bytes(row), "little")
        assert stream >> (length * bits) == 0, "the bits behind the last code are not zero"
        rows.append([(stream >> (i * bits)) & ((1 << bits) - 1) for i in range(length)])
    return torch.tensor(rows, dtype=torch.uint8).view(len(rows), length)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit type, NaNs and infinities included, in order of their bits."""
    return torch.arange(1 << 16).to(torch.int16).view(dtype)


def awkward_tensors(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Named tensors that cover sizes around the vector lengths, magnitudes, special values and strides."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    yield "whole blocks", normal(5, 256).to(dtype)
    yield "ragged", normal(3, 257).to(dtype)
    yield "odd rows", normal(7, 33).to(dtype)
    yield "one row shorter than a vector", normal(1, 13).to(dtype)
    yield "0-d", normal().to(dtype)
    yield "empty", normal(3, 0).to(dtype)
    yield "no rows", normal(0, 70).to(dtype)
    yield "4-d", normal(2, 3, 2, 40).to(dtype)
    yield "tiny", (normal(3, 130) * 2.0**-130).to(dtype)
    yield "small", (normal(3, 130) * 1e-7).to(dtype)
    yield "wide", (normal(9, 97) * torch.exp2(60 * normal(9, 97))).to(dtype)
    yield "huge", (normal(3, 130) * torch.finfo(dtype).max).to(dtype)
    yield "zeros", torch.zeros(2, 70).to(dtype)
    yield "minus zeros", (-torch.zeros(2, 70)).to(dtype)
    broken = normal(6, 300)
    broken[0, 3], broken[1, 70], broken[2, 299], broken[3, 0] = float("nan"), float("inf"), -float("inf"), 0.0
    yield "broken", broken.to(dtype)
    yield (
        "random bits",
        torch.randint(-(1 << 15), 1 << 15, (16, 256), generator=generator).short().view(torch.bfloat16).to(dtype),
    )
    yield "transposed", normal(70, 6).to(dtype).t()
    yield "row-strided", normal(6, 200).to(dtype)[:, 3:103]
    yield "every second", normal(4, 150).to(dtype)[:, ::2]
    yield "expanded", normal(1, 70).to(dtype).expand(3, 70)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Kernels of the CPU run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def center_of(length: int) -> Tensor:
    """A center [length] for rows of the awkward tensors: of many sizes, every 50th not finite, not contiguous."""
    generator = torch.Generator().manual_seed(length)
    center = torch.randn(length, 2, generator=generator) * torch.exp2(8 * torch.randn(length, 2, generator=generator))
    center[20::100], center[70::100] = float("nan"), -float("inf")
    return center[:, 0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, strides, type and every bit (NaN payloads and signs of zeros too)."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return alike and torch.equal(a.view(bits), b.view(bits))
