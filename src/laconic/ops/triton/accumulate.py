"""The gradient store in Triton: launchers carry the names of the ops; `blockwise.py` explains why bits are equal."""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.accumulate import check_accumulate_blockwise_, check_square_sum_blockwise
from laconic.ops.triton.blockwise import _bits, _on_device, _widen
from laconic.ops.triton.kernel_constants import KernelConstant
from laconic.ops.triton.reduce import _round_block

_BLOCKS = 16
"""Blocks of 128 elements per program."""
_SQUARE_BLOCKS = 32
"""Blocks per program of the sum of squares, which reads a byte or so of each element and has little to write."""
_FOLD = 256
"""Numbers that one program of the fold adds up; a power of two, as is _SQUARE_BLOCKS, so that each is a subtree. 1024
would spill registers on sm_80."""

_BLOCK_SIZE = KernelConstant(GRADIENT_BLOCK_SIZE)


@triton.jit
def _unpack(bytes):
    """Bytes [B, 64] (int32) -> signed int4 numbers [B, 128]."""
    return (tl.interleave(bytes << 28, bytes << 24)) >> 28


@triton.jit
def _accumulate_kernel(
    codes_ptr, scales_ptr, residual_codes_ptr, residual_scales_ptr, gradient_ptr, length, num_pairs, num_blocks, alpha,
    RESIDUAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # 1. What the store holds, plus alpha * gradient.
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_exists = block < num_blocks
    element = block[:, None] * _BLOCK_SIZE + tl.arange(0, _BLOCK_SIZE)[None, :]
    exists = element < length
    scale = tl.load(scales_ptr + block, mask=block_exists, other=0.0)
    codes = tl.load(codes_ptr + element, mask=exists, other=0).to(tl.int8, bitcast=True)
    value = codes.to(tl.float32) * scale[:, None]
    pair = block[:, None] * (_BLOCK_SIZE // 2) + tl.arange(0, _BLOCK_SIZE // 2)[None, :]
    pair_exists = pair < num_pairs
    if RESIDUAL:
        rest_scale = tl.load(residual_scales_ptr + block, mask=block_exists, other=0.0)
        pairs = tl.load(residual_codes_ptr + pair, mask=pair_exists, other=0).to(tl.int32)
        value += _unpack(pairs).to(tl.float32) * rest_scale[:, None]
    value += _widen(tl.load(gradient_ptr + element, mask=exists, other=0)) * alpha
    value = tl.where(exists, value, 0.0)

    # 2. Rounded to int8.
    integers, scale = _round_block(value, 127, BLOCKS)
    tl.store(codes_ptr + element, (integers & 0xFF).to(tl.uint8), mask=exists)
    tl.store(scales_ptr + block, scale, mask=block_exists)

    # 3. And what that lost to int4.
    if RESIDUAL:
        rest = value - integers.to(tl.float32) * scale[:, None]
        integers, scale = _round_block(rest, 7, BLOCKS)
        even, odd = tl.split(tl.reshape(integers & 15, [BLOCKS, _BLOCK_SIZE // 2, 2]))
        tl.store(residual_codes_ptr + pair, (even | (odd << 4)).to(tl.uint8), mask=pair_exists)
        tl.store(residual_scales_ptr + block, scale, mask=block_exists)


@triton.jit
def _add_neighbours(values, ROUNDS: tl.constexpr, COUNT: tl.constexpr):
    """[COUNT] -> [COUNT >> ROUNDS]."""
    for i in tl.static_range(ROUNDS):
        even, odd = tl.split(tl.reshape(values, [COUNT >> (i + 1), 2]))
        values = even + odd
    return values


@triton.jit
def _square_kernel(
    codes_ptr, scales_ptr, residual_codes_ptr, residual_scales_ptr, sums_ptr, length, num_pairs, num_blocks,
    RESIDUAL: tl.constexpr, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * _BLOCK_SIZE + tl.arange(0, _BLOCK_SIZE)[None, :]
    exists = element < length
    scale = tl.load(scales_ptr + block, mask=block < num_blocks, other=0.0).to(tl.float64)
    codes = tl.load(codes_ptr + element, mask=exists, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    squares = scale * scale * tl.sum(codes * codes, axis=1).to(tl.float64)
    if RESIDUAL:
        pair = block[:, None] * (_BLOCK_SIZE // 2) + tl.arange(0, _BLOCK_SIZE // 2)[None, :]
        pairs = tl.load(residual_codes_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        rest = tl.where(exists, _unpack(pairs), 0)
        rest_scale = tl.load(residual_scales_ptr + block, mask=block < num_blocks, other=0.0).to(tl.float64)
        squares += 2.0 * scale * rest_scale * tl.sum(codes * rest, axis=1).to(tl.float64)
        squares += rest_scale * rest_scale * tl.sum(rest * rest, axis=1).to(tl.float64)
    tl.store(sums_ptr + tl.program_id(0) + tl.arange(0, 1), _add_neighbours(squares, ROUNDS, BLOCKS))


@triton.jit
def _fold_kernel(values_ptr, sums_ptr, count, FOLD: tl.constexpr, ROUNDS: tl.constexpr):
    at = tl.program_id(0) * FOLD + tl.arange(0, FOLD)
    values = tl.load(values_ptr + at, mask=at < count, other=0.0)
    tl.store(sums_ptr + tl.program_id(0) + tl.arange(0, 1), _add_neighbours(values, ROUNDS, FOLD))


def accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient: Tensor,
    alpha: float,
) -> None:
    """`reference.accumulate_blockwise_` in Triton, the same bits."""
    check_accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)
    gradient = gradient.detach().contiguous()
    num_blocks = scales.numel()
    if num_blocks == 0:
        return
    with _on_device(codes):
        _accumulate_kernel[(-(-num_blocks // _BLOCKS),)](
            codes, scales, codes if residual_codes is None else residual_codes,
            scales if residual_scales is None else residual_scales,
            _bits(gradient) if gradient.dtype == torch.bfloat16 else gradient, codes.numel(), -(-codes.numel() // 2),
            num_blocks, float(alpha),
            RESIDUAL=residual_codes is not None, BLOCKS=_BLOCKS, enable_fp_fusion=False,
        )  # fmt: skip


def square_sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> Tensor:
    """`reference.square_sum_blockwise` in Triton, the same bits."""
    check_square_sum_blockwise(codes, scales, residual_codes, residual_scales)
    num_blocks = scales.numel()
    if num_blocks == 0:
        return scales.new_zeros((), dtype=torch.float64)
    sums = scales.new_empty(-(-num_blocks // _SQUARE_BLOCKS), dtype=torch.float64)
    with _on_device(codes):
        _square_kernel[(sums.numel(),)](
            codes, scales, codes if residual_codes is None else residual_codes,
            scales if residual_scales is None else residual_scales, sums, codes.numel(), -(-codes.numel() // 2),
            num_blocks,
            RESIDUAL=residual_codes is not None, BLOCKS=_SQUARE_BLOCKS, ROUNDS=_SQUARE_BLOCKS.bit_length() - 1,
            enable_fp_fusion=False,
        )  # fmt: skip
        while sums.numel() > 1:
            values, sums = sums, sums.new_empty(-(-sums.numel() // _FOLD))
            _fold_kernel[(sums.numel(),)](
                values, sums, values.numel(), FOLD=_FOLD, ROUNDS=_FOLD.bit_length() - 1, enable_fp_fusion=False
            )
    return sums.view(())
