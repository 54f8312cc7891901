"""Rows times a matrix that is held as codes on the CPU: `reference/linear.py` in C++, the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops.codebooks import BITS
from laconic.ops.declarations.linear import check_linear_blockwise
from laconic.ops.native.blockwise import codebook_address
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["linear_blockwise"]


def linear_blockwise(
    x: Tensor, codes: Tensor, scales: Tensor, code: str, block_size: int, *, isa: str | None = None
) -> Tensor:
    """`reference.linear_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    shape = check_linear_blockwise(x, codes, scales, code, block_size)
    rows, codes, scales = x.detach().float().contiguous(), codes.contiguous(), scales.contiguous()
    out = x.new_zeros(shape)
    kernels.linear_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(), rows.data_ptr(), math.prod(shape[:-1]), x.shape[-1],
        codes.data_ptr(), scales.data_ptr(), FLOAT_TYPES[scales.dtype], block_size, BITS[code],
        codebook_address(code), len(codes), out.data_ptr(), FLOAT_TYPES[x.dtype],
    )  # fmt: skip
    return out
