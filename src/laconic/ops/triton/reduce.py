"""Sums of quantized gradients in Triton: one kernel, and the two launchers that carry the names of the ops.

One program handles a tile of whole blocks and walks the shards, so that each code is read once and nothing but the
result is written. The arithmetic is that of blockwise.py: no fused multiply-add, IEEE division.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.reduce import check_sum_blockwise
from laconic.ops.triton.blockwise import (
    _INFINITY_BITS,
    _ROUNDER,
    _ROUNDER_BITS,
    _SMALLEST_NORMAL_BITS,
    _bits,
    _narrow,
    _on_device,
)

_BLOCKS = 8
"""Blocks per program: 1024 elements, 8 per thread of 4 warps."""
_RESIDUAL_BLOCKS = 16
"""The same of 12 bits, where no loop over shards is unrolled: wider loads and fewer instructions per element."""


@triton.jit
def _round_block(x, LEVEL_MAX: tl.constexpr, BLOCKS: tl.constexpr):
    """fp32 [BLOCKS, 128] -> integers within +-LEVEL_MAX of the same shape, fp32 scales [BLOCKS]."""
    magnitude_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    magnitude = magnitude_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(magnitude, tl.full([BLOCKS], LEVEL_MAX, tl.float32))
    broken = magnitude_bits >= _INFINITY_BITS
    vanished = scale.to(tl.int32, bitcast=True) < _SMALLEST_NORMAL_BITS
    ordinary = (broken | vanished) == 0
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(ordinary, scale, 1.0))
    n = x * tl.where(ordinary, inverse, 0.0)[:, None]
    integers = (n + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    most = tl.where(broken, 0, LEVEL_MAX)[:, None]
    stored = tl.where(broken, float("nan"), tl.where(vanished, 0.0, scale))
    return tl.minimum(tl.maximum(integers, -most), most), stored


@triton.jit
def _sum_blockwise_kernel(
    codes_ptr, codes_stride, scales_ptr, scales_stride, residual_codes_ptr, residual_codes_stride, residual_scales_ptr,
    residual_scales_stride, num_shards, length, num_pairs, num_blocks, factor, values_ptr, new_codes_ptr,
    new_scales_ptr, new_residual_codes_ptr, new_residual_scales_ptr,
    RESIDUAL: tl.constexpr, REQUANTIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # 1. Where this program's blocks lie, and where the pairs of 4-bit codes of the same blocks.
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    column = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    exists = is_block[:, None] & (column < length)
    pair = block[:, None] * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
    is_pair = is_block[:, None] & (pair < num_pairs)

    # 2. The sum of the shards, first to last.
    total = tl.zeros([BLOCKS, BLOCK_SIZE], tl.float32)
    for shard in range(num_shards):
        row = tl.full([1], shard, tl.int64)
        codes = tl.load(codes_ptr + row * codes_stride + column, mask=exists, other=0)
        scale = tl.load(scales_ptr + row * scales_stride + block, mask=is_block, other=0)
        value = codes.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
        if RESIDUAL:
            pairs = tl.load(residual_codes_ptr + row * residual_codes_stride + pair, mask=is_pair, other=0).to(tl.int32)
            # Four bits in two's complement: the sign bit counts -8.
            nibbles = tl.reshape(tl.join(pairs & 15, pairs >> 4), [BLOCKS, BLOCK_SIZE])
            levels = ((nibbles ^ 8) - 8).to(tl.float32)
            scale = tl.load(residual_scales_ptr + row * residual_scales_stride + block, mask=is_block, other=0)
            value += levels * scale[:, None]
        if shard == 0:
            total = value
        else:
            total += value
    total *= factor

    # 3. The sum itself, or its codes, and the codes of what those lost.
    if REQUANTIZE:
        total = tl.where(exists, total, 0.0)
        codes, scale = _round_block(total, 127, BLOCKS)
        tl.store(new_codes_ptr + column, (codes & 0xFF).to(tl.uint8), mask=exists)
        tl.store(new_scales_ptr + block, scale, mask=is_block)
        if RESIDUAL:
            rest = tl.where(exists, total - codes.to(tl.float32) * scale[:, None], 0.0)
            codes, scale = _round_block(rest, 7, BLOCKS)
            even, odd = tl.split(tl.reshape(codes & 15, [BLOCKS, BLOCK_SIZE // 2, 2]))
            tl.store(new_residual_codes_ptr + pair, (even | (odd << 4)).to(tl.uint8), mask=is_pair)
            tl.store(new_residual_scales_ptr + block, scale, mask=is_block)
    else:
        tl.store(values_ptr + column, _narrow(total, "float32"), mask=exists)


def sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> Tensor:
    """`reference.sum_blockwise` in Triton, the same bits."""
    _, length, _ = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    values = scales.new_empty(length)
    _launch(codes, scales, residual_codes, residual_scales, factor, values, None)
    return values


def sum_requantize_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.sum_requantize_blockwise` in Triton, the same bits."""
    _, length, num_blocks = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    has_residual = residual_codes is not None
    results = (
        codes.new_empty(length),
        scales.new_empty(num_blocks),
        codes.new_empty((length + 1) // 2 if has_residual else 0),
        scales.new_empty(num_blocks if has_residual else 0),
    )
    _launch(codes, scales, residual_codes, residual_scales, factor, None, results)
    return results


def _launch(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    factor: float,
    values: Tensor | None,
    requantized: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    num_shards, length = codes.shape
    num_blocks = scales.shape[1]
    if num_blocks == 0:
        return
    inputs: list[Tensor | int | None] = []
    for x in (codes, scales, residual_codes, residual_scales):
        # Shards may be rows of a larger buffer, such as a received message.
        rows = x if x is None or x.stride(1) == 1 else x.contiguous()
        inputs += [rows, rows.stride(0) if rows is not None else 0]
    outputs = requantized or (None, None, None, None)
    blocks = _BLOCKS if residual_codes is None else _RESIDUAL_BLOCKS
    with _on_device(codes):
        _sum_blockwise_kernel[(-(-num_blocks // blocks),)](
            *inputs, num_shards, length, -(-length // 2), num_blocks, factor, None if values is None else _bits(values),
            *outputs,
            RESIDUAL=residual_codes is not None, REQUANTIZE=requantized is not None, BLOCK_SIZE=GRADIENT_BLOCK_SIZE,
            BLOCKS=blocks, enable_fp_fusion=False,
        )  # fmt: skip
