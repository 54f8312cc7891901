"""Block-wise quantization on the CPU: `reference/blockwise.py` in C++, the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.codebooks import ARITHMETIC, BITS, LEVEL_MAX, codebook_tensor
from laconic.ops.native.library import FLOAT_TYPES, isa_number, kernels
from laconic.ops.schemas import check_dequantize_blockwise, check_quantize_blockwise

__all__ = ["codebook_address", "dequantize_blockwise", "quantize_blockwise"]

_CPU = torch.device("cpu")


def codebook_address(code: str) -> int:
    """Where the tables of a 4-bit code lie; 0 for integers, which have none."""
    return 0 if code in ARITHMETIC else codebook_tensor(code, _CPU).data_ptr()


def quantize_blockwise(
    x: Tensor,
    code: str,
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int | None,
    center: Tensor | None = None,
    *,
    isa: str | None = None,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    length, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype, center)
    leading = x.shape[:-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    center = None if center is None else center.contiguous()
    codes = huge_pages.empty((*leading, num_codes), torch.uint8)
    scales = torch.empty((*leading, num_scales), dtype=scale_dtype)
    kernels().quantize_blockwise(
        isa_number(isa),
        torch.get_num_threads(),
        x.data_ptr(),
        FLOAT_TYPES[x.dtype],
        math.prod(leading),
        x.stride(0) if x.dim() == 2 else length,
        length,
        block_size,
        codes.data_ptr(),
        scales.data_ptr(),
        FLOAT_TYPES[scale_dtype],
        BITS[code],
        LEVEL_MAX[code],
        codebook_address(code),
        seed is not None,
        seed or 0,
        first_index,
        0 if center is None else center.data_ptr(),
    )
    return codes, scales


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """`reference.dequantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype, center)
    codes, scales = codes.contiguous(), scales.contiguous()
    center = None if center is None else center.contiguous()
    values = huge_pages.empty((*codes.shape[:-1], length), dtype)
    kernels().dequantize_blockwise(
        isa_number(isa),
        torch.get_num_threads(),
        codes.data_ptr(),
        scales.data_ptr(),
        FLOAT_TYPES[scales.dtype],
        math.prod(codes.shape[:-1]),
        length,
        block_size,
        values.data_ptr(),
        FLOAT_TYPES[dtype],
        BITS[code],
        codebook_address(code),
        0 if center is None else center.data_ptr(),
    )
    return values
