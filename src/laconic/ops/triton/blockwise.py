"""Block-wise quantization in Triton: private kernels, and the launchers that carry the names of the ops.

One program handles a tile of whole blocks. To return the reference's bits on any GPU, divisions are IEEE (div_rn),
fused multiply-add is off at launch, and floats are narrowed to bf16 by integer arithmetic. bf16 tensors are passed as
int16: their bits are all that is needed, and Triton's interpreter has no bf16 arithmetic of its own.

Levels and thresholds come from a table in memory (the struct of csrc/kernels/blockwise.h), which stays in L1. One table
lookup per step of a binary search costs less than a chain of 15 comparisons, and serves every 4-bit code.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import AFFINE, BITS, LEVEL_MAX, MIN_SCALE, codebook_tensor, scales_per_block
from laconic.ops.declarations.blockwise import (
    check_dequantize_blockwise,
    check_multiply_quantize_blockwise,
    check_quantize_blockwise,
)
from laconic.ops.reference import seed_key

__all__ = ["dequantize_blockwise", "multiply_quantize_blockwise", "quantize_blockwise"]

_TILE = 2048
"""Elements per program; with 4 warps, each thread moves 32 bytes of bf16."""

# Where each table starts in the codebook.
_LEVELS = tl.constexpr(0)
_SORTED_LEVELS = tl.constexpr(16)
_CODES = tl.constexpr(32)
_THRESHOLDS = tl.constexpr(48)
_FLOOR_THRESHOLDS = tl.constexpr(64)
_RECIPROCAL_GAPS = tl.constexpr(80)

_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
# 1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low bits.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)


# Triton joins the types of all returns it meets, hence one return per function.


@triton.jit
def _widen(x):
    """int16 (bf16 bits), fp16 or fp32 -> fp32, exactly."""
    if x.dtype == tl.int16:
        value = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def _narrow(value, TYPE: tl.constexpr):
    """fp32 -> the bits of "float32" (int32), "bfloat16" or "float16" (int16), to nearest even, every NaN alike."""
    bits = value.to(tl.int32, bitcast=True)
    if TYPE == "float32":
        result = tl.where(value == value, bits, 0x7FC00000)
    elif TYPE == "bfloat16":
        unsigned = bits.to(tl.uint32, bitcast=True)
        rounded = ((unsigned + 0x7FFF + ((unsigned >> 16) & 1)) >> 16).to(tl.int32)
        result = tl.where(value == value, rounded, 0x7FC0).to(tl.int16)
    else:
        half = value.to(tl.float16).to(tl.int16, bitcast=True)
        result = tl.where(value == value, half.to(tl.int32), 0x7E00).to(tl.int16)
    return result


@triton.jit
def _widen_bits(bits, TYPE: tl.constexpr):
    """The inverse of _narrow."""
    if TYPE == "float32":
        value = bits.to(tl.float32, bitcast=True)
    elif TYPE == "bfloat16":
        value = _widen(bits)
    else:
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _narrow_down(value, TYPE: tl.constexpr):
    """fp32 -> the bits of the largest number of a type at or below; -infinity where there is none."""
    bits = _narrow(value, TYPE)
    if TYPE != "float32":
        # A sign bit and a magnitude: the next number below has the magnitude less one, or more if it is negative.
        below = tl.where(bits < 0, 1, -1)
        bits = (bits + tl.where(_widen_bits(bits, TYPE) > value, below, 0)).to(tl.int16)
    return bits


@triton.jit
def _narrow_up(value, TYPE: tl.constexpr):
    """fp32, at least 0 -> the bits of the smallest number of a type at or above; infinity where there is none."""
    bits = _narrow(value, TYPE)
    if TYPE != "float32":
        bits = (bits + tl.where(_widen_bits(bits, TYPE) < value, 1, 0)).to(tl.int16)
    return bits


@triton.jit
def _search(n, thresholds, index, STEP: tl.constexpr):
    return index + tl.where(n > tl.load(thresholds + index + (STEP - 1)), STEP, 0)


@triton.jit
def _count_below(n, thresholds):
    """How many of the 15 ascending numbers at `thresholds` lie strictly below n: binary search."""
    index = _search(n, thresholds, tl.zeros_like(n).to(tl.int32), 8)
    index = _search(n, thresholds, index, 4)
    index = _search(n, thresholds, index, 2)
    return _search(n, thresholds, index, 1)


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed_key, index):
    """The random numbers of reference.uniform; seed_key is its first mix64, done by the host."""
    index = index.to(tl.uint64, bitcast=True)
    key = _mix64((index >> 32) + seed_key.to(tl.int64).to(tl.uint64, bitcast=True))
    h = (index ^ key).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _place(num_blocks, length, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ONE_ROW: tl.constexpr):
    """For this program's blocks: number, row and first column [BLOCKS], and whether each is there."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    if ONE_ROW:
        row = tl.zeros_like(block)
        column = block * BLOCK_SIZE
    else:
        blocks_per_row = tl.cdiv(length, BLOCK_SIZE)
        row = block // blocks_per_row
        column = (block - row * blocks_per_row) * BLOCK_SIZE
    return block, row, column, block < num_blocks


@triton.jit(do_not_specialize=["seed_key", "first_index"])
def _quantize_blockwise_kernel(
    x_ptr,
    row_stride,
    length,
    num_blocks,
    codes_ptr,
    codes_per_row,
    scales_ptr,
    table_ptr,
    seed_key,
    first_index,
    center_ptr,
    factor_ptr,
    product_ptr,
    LEVEL_MAX: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    CENTERED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    # 1. A tile of blocks [BLOCKS, BLOCK_SIZE] in fp32; what lies outside a row is zero.
    block, row, first_column, block_exists = _place(num_blocks, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    column = first_column[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    exists = block_exists[:, None] & (column < length)
    x = _widen(tl.load(x_ptr + row[:, None] * row_stride + column, mask=exists, other=0))
    if MULTIPLIED:
        at = row[:, None] * length + column
        factor = _widen(tl.load(factor_ptr + at, mask=exists, other=0))
        tl.store(product_ptr + at, _narrow(factor * x, TYPE), mask=exists)
    if CENTERED:
        x -= tl.load(center_ptr + column, mask=exists, other=0)

    # 2. One scale per block. Magnitudes are compared as integers, where NaN > infinity > every finite number.
    magnitude_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if AFFINE:
        # Infinities and NaN may make anything of the range; their block is broken below.
        least = tl.min(tl.where(exists, x, float("inf")), axis=1)
        greatest = tl.max(tl.where(exists, x, -float("inf")), axis=1)
        is_small = tl.abs(least) < _MIN_SCALE
        least = tl.where(is_small, tl.where(least < 0, -_MIN_SCALE, 0.0), least)
        minimum = _widen_bits(_narrow_down(least, SCALE_TYPE), SCALE_TYPE)
        exact = tl.div_rn(greatest - minimum, tl.full([BLOCKS], LEVEL_MAX, tl.float32))
        scale = _widen_bits(_narrow_up(exact, SCALE_TYPE), SCALE_TYPE)
        vanished = exact < _MIN_SCALE
        overflows = (scale.to(tl.int32, bitcast=True) >= _INFINITY_BITS) | (minimum == -float("inf"))
    else:
        magnitude = magnitude_bits.to(tl.float32, bitcast=True)
        scale_bits = _narrow(tl.div_rn(magnitude, tl.full([BLOCKS], LEVEL_MAX, tl.float32)), SCALE_TYPE)
        scale = _widen_bits(scale_bits, SCALE_TYPE)
        stored_bits = scale.to(tl.int32, bitcast=True)
        vanished = stored_bits < _SMALLEST_NORMAL_BITS
        overflows = stored_bits >= _INFINITY_BITS
    broken = (magnitude_bits >= _INFINITY_BITS) | overflows
    stored = _narrow(tl.where(broken, float("nan"), tl.where(vanished, 0.0, scale)), SCALE_TYPE)
    if AFFINE:
        tl.store(scales_ptr + 2 * block, stored, mask=block_exists)
        stored = _narrow(tl.where(broken, float("nan"), minimum), SCALE_TYPE)
        tl.store(scales_ptr + 2 * block + 1, stored, mask=block_exists)
    else:
        tl.store(scales_ptr + block, stored, mask=block_exists)

    # 3. Each element becomes the code of a level near n.
    ordinary = (broken | vanished) == 0
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(ordinary, scale, 1.0))
    if AFFINE:
        x = tl.where(ordinary[:, None] & exists, x - minimum[:, None], 0.0)
    n = x * tl.where(ordinary, inverse, 0.0)[:, None]
    u = tl.zeros_like(n)
    if STOCHASTIC:
        u = _uniform(seed_key, first_index + row[:, None] * length + column)
    if BITS != 4:
        rounded = n + _ROUNDER
        index = rounded.to(tl.int32, bitcast=True) - _ROUNDER_BITS
        if STOCHASTIC:
            nearest = rounded - _ROUNDER
            lower = nearest - tl.where(nearest > n, 1.0, 0.0)
            index = lower.to(tl.int32) + tl.where(u < n - lower, 1, 0)
        most: tl.constexpr = int(LEVEL_MAX)
        codes = tl.minimum(tl.maximum(index, 0 if AFFINE else -most), most) & ((1 << BITS) - 1)
    else:
        if STOCHASTIC:
            index = _count_below(n, table_ptr + _FLOOR_THRESHOLDS)
            lower = tl.load(table_ptr + _SORTED_LEVELS + index)
            index += tl.where(u < (n - lower) * tl.load(table_ptr + _RECIPROCAL_GAPS + index), 1, 0)
        else:
            index = _count_below(n, table_ptr + _THRESHOLDS)
        codes = tl.load(table_ptr + _CODES + index).to(tl.int32)
    codes = tl.where(exists & (broken[:, None] == 0), codes, 0)

    # 4. The codes of a row as one stream of bits: two codes make a byte, or eight make BITS bytes.
    if BITS == 8:
        tl.store(codes_ptr + row[:, None] * codes_per_row + column, codes.to(tl.uint8), mask=exists)
    elif BITS == 4:
        even, odd = tl.split(tl.reshape(codes, [BLOCKS, BLOCK_SIZE // 2, 2]))
        at = first_column[:, None] // 2 + tl.arange(0, BLOCK_SIZE // 2)[None, :]
        exists = block_exists[:, None] & (at < codes_per_row)
        tl.store(codes_ptr + row[:, None] * codes_per_row + at, (even | (odd << 4)).to(tl.uint8), mask=exists)
    else:
        eight = tl.arange(0, 8)[None, None, :]
        eights = tl.reshape(codes.to(tl.int64), [BLOCKS, BLOCK_SIZE // 8, 8])
        stream = tl.sum(eights << (eight * BITS), axis=2)
        bytes = ((stream[:, :, None] >> (eight * 8)) & 0xFF).to(tl.uint8)
        at = (first_column[:, None] // 8 + tl.arange(0, BLOCK_SIZE // 8)[None, :])[:, :, None] * BITS + eight
        exists = block_exists[:, None, None] & (eight < BITS) & (at < codes_per_row)
        tl.store(codes_ptr + row[:, None, None] * codes_per_row + at, bytes, mask=exists)


@triton.jit
def _levels(
    codes_ptr,
    codes_per_row,
    table_ptr,
    row,
    first_column,
    block_exists,
    length,
    BITS: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The levels of a tile's codes [BLOCKS, BLOCK_SIZE] in fp32, before they are multiplied by their scales."""
    column = first_column[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    exists = block_exists[:, None] & (column < length)
    if BITS == 8:
        bytes = tl.load(codes_ptr + row[:, None] * codes_per_row + column, mask=exists, other=0)
        levels = bytes.to(tl.int8, bitcast=True).to(tl.float32)
    elif BITS == 4:
        at = first_column[:, None] // 2 + tl.arange(0, BLOCK_SIZE // 2)[None, :]
        bytes_exist = block_exists[:, None] & (at < codes_per_row)
        bytes = tl.load(codes_ptr + row[:, None] * codes_per_row + at, mask=bytes_exist, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(bytes & 15, bytes >> 4), [BLOCKS, BLOCK_SIZE])
        levels = tl.load(table_ptr + _LEVELS + codes)
    else:
        # The one or two bytes that hold a code, its top bit shifted up to the sign and back.
        bit = column * BITS
        at = bit // 8
        low = tl.load(codes_ptr + row[:, None] * codes_per_row + at, mask=exists, other=0).to(tl.int32)
        high_exists = exists & (at + 1 < codes_per_row)
        high = tl.load(codes_ptr + row[:, None] * codes_per_row + at + 1, mask=high_exists, other=0).to(tl.int32)
        code = (low | (high << 8)) >> (bit % 8).to(tl.int32)
        levels = (code & 3 if AFFINE else (code << (32 - BITS)) >> (32 - BITS)).to(tl.float32)
    return levels


@triton.jit
def _dequantize_blockwise_kernel(
    codes_ptr,
    codes_per_row,
    scales_ptr,
    length,
    num_blocks,
    values_ptr,
    table_ptr,
    center_ptr,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    CENTERED: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    block, row, first_column, block_exists = _place(num_blocks, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    scale = _widen(tl.load(scales_ptr + (2 * block if AFFINE else block), mask=block_exists, other=0))
    column = first_column[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    exists = block_exists[:, None] & (column < length)
    levels = _levels(
        codes_ptr, codes_per_row, table_ptr, row, first_column, block_exists, length, BITS, AFFINE, BLOCK_SIZE, BLOCKS
    )
    values = levels * scale[:, None]
    if AFFINE:
        values += _widen(tl.load(scales_ptr + 2 * block + 1, mask=block_exists, other=0))[:, None]
    if CENTERED:
        values += tl.load(center_ptr + column, mask=exists, other=0)
    tl.store(values_ptr + row[:, None] * length + column, _narrow(values, TYPE), mask=exists)


def quantize_blockwise(
    x: Tensor,
    code: str,
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int | None,
    center: Tensor | None = None,
    *,
    first_index: int = 0,
    factor: Tensor | None = None,
    product: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_blockwise` in Triton, the same bits.

    With `factor`, contiguous and like x, factor * x is written to `product`, likewise.
    """
    length, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype, center)
    leading = x.shape[:-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    codes = x.new_empty((*leading, num_codes), dtype=torch.uint8)
    scales = x.new_empty((*leading, num_scales), dtype=scale_dtype)
    one_row = x.is_contiguous() and length % block_size == 0 and center is None
    num_blocks = scales.numel() // scales_per_block(code)
    if num_blocks == 0:
        return codes, scales
    blocks = _TILE // block_size
    with _on_device(x):
        _quantize_blockwise_kernel[(triton.cdiv(num_blocks, blocks),)](
            _readable(x),
            x.stride(0) if x.dim() == 2 else length,
            x.numel() if one_row else length,
            num_blocks,
            codes,
            codes.numel() if one_row else num_codes,
            _bits(scales),
            codebook_tensor(code, x.device),
            0 if seed is None else seed_key(seed),
            first_index,
            None if center is None else center.contiguous(),
            None if factor is None else _readable(factor),
            None if product is None else _bits(product),
            LEVEL_MAX=LEVEL_MAX[code],
            BITS=BITS[code],
            STOCHASTIC=seed is not None,
            CENTERED=center is not None,
            MULTIPLIED=factor is not None,
            TYPE=_name(x.dtype),
            SCALE_TYPE=_name(scale_dtype),
            AFFINE=code in AFFINE,
            BLOCK_SIZE=block_size,
            BLOCKS=blocks,
            ONE_ROW=one_row,
            enable_fp_fusion=False,
        )
    return codes, scales


def multiply_quantize_blockwise(
    a: Tensor, b: Tensor, code: str, block_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.multiply_quantize_blockwise` in Triton, the same bits."""
    check_multiply_quantize_blockwise(a, b)
    product = b.new_empty(b.shape)
    codes, scales = quantize_blockwise(b, code, block_size, scale_dtype, None, factor=a.contiguous(), product=product)
    return product, codes, scales


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> Tensor:
    """`reference.dequantize_blockwise` in Triton, the same bits."""
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype, center)
    codes, scales = codes.contiguous(), scales.contiguous()
    values = codes.new_empty((*codes.shape[:-1], length), dtype=dtype)
    one_row = length % block_size == 0 and center is None
    num_blocks = scales.numel() // scales_per_block(code)
    if num_blocks == 0:
        return values
    blocks = _TILE // block_size
    with _on_device(codes):
        _dequantize_blockwise_kernel[(triton.cdiv(num_blocks, blocks),)](
            codes,
            codes.numel() if one_row else codes.shape[-1],
            _readable(scales),
            values.numel() if one_row else length,
            num_blocks,
            _bits(values),
            codebook_tensor(code, codes.device),
            None if center is None else center.contiguous(),
            BITS=BITS[code],
            TYPE=_name(dtype),
            CENTERED=center is not None,
            AFFINE=code in AFFINE,
            BLOCK_SIZE=block_size,
            BLOCKS=blocks,
            ONE_ROW=one_row,
            enable_fp_fusion=False,
        )
    return values


def _readable(x: Tensor) -> Tensor:
    """What `_widen` reads: of bf16 the bits."""
    return _bits(x) if x.dtype == torch.bfloat16 else x


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
