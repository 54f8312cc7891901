"""Block-wise quantization on the CPU: `reference/blockwise.py` in C++, the same bits."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from laconic.ops import huge_pages
from laconic.ops.codebooks import ARITHMETIC, BITS, LEVEL_MAX, codebook_tensor
from laconic.ops.declarations.blockwise import (
    check_center,
    check_dequantize_blockwise,
    check_multiply_quantize_blockwise,
    check_quantize_blockwise,
)
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["codebook_address", "dequantize_blockwise", "multiply_quantize_blockwise", "quantize_blockwise"]

_CPU = torch.device("cpu")


@cache
def _tables(code: str) -> Tensor:
    with no_dispatch():  # of FakeTensorMode, whose tensors have no memory
        return codebook_tensor(code, _CPU)


@cache
def codebook_address(code: str) -> int:
    """Where the tables of a 4-bit code lie, as long as the process lives; 0 for integers, which have none."""
    return 0 if code in ARITHMETIC else _tables(code).data_ptr()


@lru_cache(maxsize=4096)
def _sizes(
    shape: torch.Size, dtype: torch.dtype, code: str, block_size: int, scale_dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Shapes of codes and scales, rows and length of a tensor that is quantized; arguments are checked on the way."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    length, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype)
    leading = shape[:-1]
    return (*leading, num_codes), (*leading, num_scales), math.prod(leading), length


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
    factor: Tensor | None = None,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_blockwise` in C++, the same bits; `isa` overrides the instruction set.

    With `factor`, contiguous and like x, factor * x is written to `product`, likewise.
    """
    codes_shape, scales_shape, rows, length = _sizes(x.shape, x.dtype, code, block_size, scale_dtype)
    if center is not None:
        check_center(center, length, x.device)
        center = center.contiguous()
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    codes = huge_pages.empty(codes_shape, torch.uint8)
    scales = torch.empty(scales_shape, dtype=scale_dtype, device="cpu")
    kernels.quantize_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        x.data_ptr(), FLOAT_TYPES[x.dtype], rows, x.stride(0) if x.dim() == 2 else length, length, block_size,
        codes.data_ptr(), scales.data_ptr(), FLOAT_TYPES[scale_dtype], BITS[code], LEVEL_MAX[code],
        codebook_address(code), seed is not None, seed or 0, first_index, 0 if center is None else center.data_ptr(),
        0 if factor is None else factor.data_ptr(), 0 if product is None else product.data_ptr(),
    )  # fmt: skip
    return codes, scales


def multiply_quantize_blockwise(
    a: Tensor, b: Tensor, code: str, block_size: int, scale_dtype: torch.dtype, *, isa: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.multiply_quantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    check_multiply_quantize_blockwise(a, b)
    product = huge_pages.empty(b.shape, b.dtype)
    codes, scales = quantize_blockwise(
        b, code, block_size, scale_dtype, None, isa=isa, factor=a.contiguous(), product=product
    )
    return product, codes, scales


@lru_cache(maxsize=4096)
def _value_sizes(
    codes_shape: torch.Size,
    codes_dtype: torch.dtype,
    scales_shape: torch.Size,
    scales_dtype: torch.dtype,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
) -> tuple[tuple[int, ...], int]:
    """Shape and rows of a tensor that is dequantized; arguments are checked, but for devices."""
    codes, scales = (
        torch.empty(shape, dtype=kind, device="meta")
        for shape, kind in ((codes_shape, codes_dtype), (scales_shape, scales_dtype))
    )
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype)
    leading = codes_shape[:-1]
    return (*leading, length), math.prod(leading)


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
    if not scales.is_cpu or not codes.is_cpu:
        check_dequantize_blockwise(codes, scales, code, block_size, length, dtype, center)
    shape, rows = _value_sizes(codes.shape, codes.dtype, scales.shape, scales.dtype, code, block_size, length, dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    if center is not None:
        check_center(center, length, codes.device)
        center = center.contiguous()
    values = huge_pages.empty(shape, dtype)
    kernels.dequantize_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        codes.data_ptr(), scales.data_ptr(), FLOAT_TYPES[scales.dtype], rows, length, block_size,
        values.data_ptr(), FLOAT_TYPES[dtype], BITS[code], codebook_address(code),
        0 if center is None else center.data_ptr(),
    )  # fmt: skip
    return values
