"""One bit per value on the CPU: `reference/bits.py` in C++, the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.declarations.bits import check_pack_bits, check_select_bits, check_unpack_bits
from laconic.ops.native.library import ISA_NUMBERS, kernels
from laconic.ops.reference.bits import bit_patterns

__all__ = ["pack_bits", "select_bits", "unpack_bits"]


def pack_bits(x: Tensor, *, isa: str | None = None) -> Tensor:
    """`reference.pack_bits` in C++, the same bits; `isa` overrides the instruction set."""
    codes = huge_pages.empty((check_pack_bits(x),), torch.uint8)
    x = x.contiguous()
    num_bits = 8 * x.element_size()
    kernels.pack_bits(
        ISA_NUMBERS[isa],
        torch.get_num_threads(),
        x.data_ptr(),
        x.element_size(),
        (1 << (num_bits - x.is_floating_point())) - 1,
        x.numel(),
        codes.data_ptr(),
    )
    return codes


def unpack_bits(
    codes: Tensor, length: int, dtype: torch.dtype, zero: float, one: float, *, isa: str | None = None
) -> Tensor:
    """`reference.unpack_bits` in C++, the same bits; `isa` overrides the instruction set."""
    check_unpack_bits(codes, length, dtype)
    codes = codes.contiguous()
    values = huge_pages.empty((length,), dtype)
    word = (1 << 64) - 1
    kernels.unpack_bits(
        ISA_NUMBERS[isa],
        torch.get_num_threads(),
        codes.data_ptr(),
        length,
        dtype.itemsize,
        *(pattern & word for pattern in bit_patterns(zero, one, dtype)),
        values.data_ptr(),
    )
    return values


def select_bits(x: Tensor, codes: Tensor, *, isa: str | None = None) -> Tensor:
    """`reference.select_bits` in C++, the same bits; `isa` overrides the instruction set."""
    check_select_bits(x, codes)
    x, codes = x.contiguous(), codes.contiguous()
    values = huge_pages.empty(x.shape, x.dtype)
    kernels.select_bits(
        ISA_NUMBERS[isa],
        torch.get_num_threads(),
        x.data_ptr(),
        codes.data_ptr(),
        x.numel(),
        x.element_size(),
        values.data_ptr(),
    )
    return values
