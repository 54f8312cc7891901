"""One bit per value in Triton: values are read and written as integers of their size."""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.declarations.bits import check_pack_bits, check_select_bits, check_unpack_bits
from laconic.ops.reference.bits import INTEGERS, bit_patterns
from laconic.ops.triton.blockwise import _on_device

_TILE = 4096
"""Values per program."""


@triton.jit
def _pack_bits_kernel(x_ptr, length, codes_ptr, num_codes, IS_FLOAT: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    index = first + tl.arange(0, TILE)
    x = tl.load(x_ptr + index, mask=index < length, other=0)
    if IS_FLOAT:
        x = x << 1  # a float is zero whatever its sign is
    bits = tl.reshape(tl.where(x != 0, 1, 0), [TILE // 8, 8])
    codes = tl.sum(bits << tl.arange(0, 8)[None, :], axis=1)
    at = first // 8 + tl.arange(0, TILE // 8)
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=at < num_codes)


@triton.jit(do_not_specialize=["zero", "one"])
def _unpack_bits_kernel(codes_ptr, length, zero, one, values_ptr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = index < length
    codes = tl.load(codes_ptr + index // 8, mask=exists, other=0).to(tl.int32)
    bits = (codes >> (index % 8).to(tl.int32)) & 1
    word = values_ptr.dtype.element_ty
    tl.store(values_ptr + index, tl.where(bits != 0, one.to(word), zero.to(word)), mask=exists)


@triton.jit
def _select_bits_kernel(x_ptr, codes_ptr, length, values_ptr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = index < length
    codes = tl.load(codes_ptr + index // 8, mask=exists, other=0).to(tl.int32)
    is_set = ((codes >> (index % 8).to(tl.int32)) & 1) != 0
    tl.store(values_ptr + index, tl.where(is_set, tl.load(x_ptr + index, mask=exists, other=0), 0), mask=exists)


def pack_bits(x: Tensor) -> Tensor:
    """`reference.pack_bits` in Triton, the same bits."""
    codes = x.new_empty(check_pack_bits(x), dtype=torch.uint8)
    x = x.detach().contiguous()
    if x.numel():
        with _on_device(x):
            _pack_bits_kernel[(-(-x.numel() // _TILE),)](
                x.view(INTEGERS[x.element_size()]),
                x.numel(),
                codes,
                codes.numel(),
                IS_FLOAT=x.is_floating_point(),
                TILE=_TILE,
                enable_fp_fusion=False,
            )
    return codes


def unpack_bits(codes: Tensor, length: int, dtype: torch.dtype, zero: float, one: float) -> Tensor:
    """`reference.unpack_bits` in Triton, the same bits."""
    check_unpack_bits(codes, length, dtype)
    values = codes.new_empty(length, dtype=dtype)
    if length:
        with _on_device(codes):
            _unpack_bits_kernel[(-(-length // _TILE),)](
                codes.contiguous(),
                length,
                *bit_patterns(zero, one, dtype),
                values.view(INTEGERS[dtype.itemsize]),
                TILE=_TILE,
                enable_fp_fusion=False,
            )
    return values


def select_bits(x: Tensor, codes: Tensor) -> Tensor:
    """`reference.select_bits` in Triton, the same bits."""
    check_select_bits(x, codes)
    values = x.new_empty(x.shape)
    x = x.detach().contiguous()
    if x.numel():
        word = INTEGERS[x.element_size()]
        with _on_device(x):
            _select_bits_kernel[(-(-x.numel() // _TILE),)](
                x.view(word), codes.contiguous(), x.numel(), values.view(word), TILE=_TILE, enable_fp_fusion=False
            )
    return values
