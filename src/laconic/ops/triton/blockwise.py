"""Block-wise quantization in Triton: private kernels, and the launchers that carry the names of the ops.

One program handles a tile of whole blocks. To return the reference's bits on any GPU, divisions are IEEE (div_rn),
fused multiply-add is off at launch, and NaNs are written as the one of docs/formats.md. bf16 tensors are passed as
int16, and the interpreter of Triton, whose conversions to bf16 round down, narrows by integer arithmetic.

What bounds these kernels is the number of instructions per element. So tiles are flat: each thread holds neighbours
from the first load to the last store, and offsets in a tile have 32 bits. A code of 4 bits is looked up by the bucket
that n lies in (`bucket_tensor`): two lookups in shared memory and one comparison, for every such code.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import (
    AFFINE,
    ARITHMETIC,
    BITS,
    LEVEL_MAX,
    MIN_SCALE,
    bucket_rounder,
    bucket_tensor,
    codebook_tensor,
    scales_per_block,
)
from laconic.ops.declarations.blockwise import (
    check_dequantize_blockwise,
    check_multiply_quantize_blockwise,
    check_quantize_blockwise,
)
from laconic.ops.reference import seed_key
from laconic.ops.triton.kernel_constants import KernelConstant

_TILE = 2048
"""Elements per program; with 4 warps, each thread moves 32 bytes of bf16."""

# Where bucket_tensor has which table.
_THRESHOLDS = KernelConstant(0)
_NEAREST_CODES = KernelConstant(64)
_LEVELS_BELOW = KernelConstant(64)
_RECIPROCAL_GAPS = KernelConstant(192)
_STOCHASTIC_CODES = KernelConstant(320)

_INTERPRETED = KernelConstant(triton.knobs.runtime.interpret)
_INFINITY_BITS = KernelConstant(0x7F800000)
_SMALLEST_NORMAL_BITS = KernelConstant(0x00800000)
_MIN_SCALE = KernelConstant(MIN_SCALE)
# 1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low bits.
_ROUNDER = KernelConstant(12582912.0)
_ROUNDER_BITS = KernelConstant(0x4B400000)


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
        if _INTERPRETED:
            unsigned = bits.to(tl.uint32, bitcast=True)
            rounded = ((unsigned + 0x7FFF + ((unsigned >> 16) & 1)) >> 16).to(tl.int16)
        else:
            rounded = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
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
def _mix64(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _key(seed_key, high):
    return _mix64((high + seed_key.to(tl.int64)).to(tl.uint64, bitcast=True))


@triton.jit
def _hash(low, key):
    h = low ^ key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = h ^ (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _uniform(seed_key, first, index, ONE_ROW: tl.constexpr):
    """The random numbers of reference.uniform; seed_key is its first mix64, done by the host.

    `index` is int64. Where ONE_ROW its numbers are consecutive from `first` on, so they have one key, seldom two.
    """
    low = index.to(tl.uint32)
    if ONE_ROW:
        key = _key(seed_key, first >> 32)
        numbers = _hash(low, key)
        if first >> 32 != (first + index.numel - 1) >> 32:
            numbers = tl.where(low < first.to(tl.uint32), _hash(low, _key(seed_key, (first >> 32) + 1)), numbers)
    else:
        numbers = _hash(low, _key(seed_key, index >> 32))
    return numbers


@triton.jit
def _tile(num_blocks, blocks_per_row, length, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ONE_ROW: tl.constexpr):
    """For each element of this program's blocks: row, column and whether it is there [BLOCKS * BLOCK_SIZE].

    Tiles are flat, and offsets in them 32 bits wide where a tile is a row of its own: one row for each program.
    """
    element = tl.arange(0, BLOCKS * BLOCK_SIZE)
    program = tl.program_id(0).to(tl.int64)
    if ONE_ROW:
        row = program
        column = element
        blocks_left = num_blocks - tl.program_id(0).to(num_blocks.dtype) * BLOCKS
        exists = element < tl.minimum(blocks_left, BLOCKS).to(tl.int32) * BLOCK_SIZE
    else:
        block = program * BLOCKS + element // BLOCK_SIZE
        row = block // blocks_per_row
        column = (block - row * blocks_per_row) * BLOCK_SIZE + element % BLOCK_SIZE
        exists = (block < num_blocks) & (column < length)
    return row, column, exists


@triton.jit
def _spread(each, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """One number for each block -> one for each element [BLOCKS * BLOCK_SIZE]."""
    return tl.reshape(tl.broadcast_to(each[:, None], [BLOCKS, BLOCK_SIZE]), [BLOCKS * BLOCK_SIZE])


@triton.jit
def _look_up(table_ptr, index, SIZE: tl.constexpr):
    """table[index] from a table of SIZE numbers, by way of shared memory, where addresses have 32 bits."""
    return tl.gather(tl.load(table_ptr + tl.arange(0, SIZE)), index, 0)


@triton.jit(do_not_specialize=["num_blocks", "seed_key", "first_index"])
def _quantize_blockwise_kernel(
    x_ptr, row_stride, length, num_blocks, blocks_per_row, codes_ptr, codes_per_row, scales_ptr, buckets_ptr, seed_key,
    first_index, center_ptr, factor_ptr, product_ptr,
    LEVEL_MAX: tl.constexpr, BITS: tl.constexpr, BUCKET_ROUNDER: tl.constexpr, STOCHASTIC: tl.constexpr,
    CENTERED: tl.constexpr, MULTIPLIED: tl.constexpr, TYPE: tl.constexpr, SCALE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    # 1. A flat tile of blocks in fp32; what lies outside a row is zero.
    TILE: tl.constexpr = BLOCKS * BLOCK_SIZE
    row, column, exists = _tile(num_blocks, blocks_per_row, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    scales_ptr += tl.program_id(0).to(tl.int64) * (BLOCKS * (2 if AFFINE else 1))
    block = tl.arange(0, BLOCKS)
    block_exists = block < num_blocks - tl.program_id(0).to(num_blocks.dtype) * BLOCKS
    x = _widen(tl.load(x_ptr + row * row_stride + column, mask=exists, other=0))
    if MULTIPLIED:
        factor = _widen(tl.load(factor_ptr + row * length + column, mask=exists, other=0))
        tl.store(product_ptr + row * length + column, _narrow(factor * x, TYPE), mask=exists)
    if CENTERED:
        x -= tl.load(center_ptr + column, mask=exists, other=0)

    # 2. One scale per block. Magnitudes are compared as integers, where NaN > infinity > every finite number.
    magnitude_bits = tl.max(tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [BLOCKS, BLOCK_SIZE]), axis=1)
    if AFFINE:
        # Infinities and NaN may make anything of the range; their block is broken below.
        least = tl.min(tl.reshape(tl.where(exists, x, float("inf")), [BLOCKS, BLOCK_SIZE]), axis=1)
        greatest = tl.max(tl.reshape(tl.where(exists, x, -float("inf")), [BLOCKS, BLOCK_SIZE]), axis=1)
        is_small = tl.abs(least) < _MIN_SCALE
        least = tl.where(is_small, tl.where(least < 0, -_MIN_SCALE, 0.0), least)
        stored_minimum = _narrow_down(least, SCALE_TYPE)
        minimum = _widen_bits(stored_minimum, SCALE_TYPE)
        exact = tl.div_rn(greatest - minimum, tl.full([BLOCKS], LEVEL_MAX, tl.float32))
        stored = _narrow_up(exact, SCALE_TYPE)
        scale = _widen_bits(stored, SCALE_TYPE)
        vanished = exact < _MIN_SCALE
        overflows = (scale.to(tl.int32, bitcast=True) >= _INFINITY_BITS) | (minimum == -float("inf"))
    else:
        scale = magnitude_bits.to(tl.float32, bitcast=True)
        if LEVEL_MAX != 1.0:
            scale = tl.div_rn(scale, tl.full([BLOCKS], LEVEL_MAX, tl.float32))
        stored = _narrow(scale, SCALE_TYPE)
        scale = _widen_bits(stored, SCALE_TYPE)
        scale_bits = scale.to(tl.int32, bitcast=True)
        vanished = scale_bits < _SMALLEST_NORMAL_BITS
        overflows = scale_bits >= _INFINITY_BITS
    broken = (magnitude_bits >= _INFINITY_BITS) | overflows
    nan = _narrow(tl.full([BLOCKS], float("nan"), tl.float32), SCALE_TYPE)
    stored = tl.where(broken, nan, tl.where(vanished, 0, stored))
    if AFFINE:
        tl.store(scales_ptr + 2 * block, stored, mask=block_exists)
        tl.store(scales_ptr + 2 * block + 1, tl.where(broken, nan, stored_minimum), mask=block_exists)
    else:
        tl.store(scales_ptr + block, stored, mask=block_exists)

    # 3. Each element becomes the code of a level near n.
    ordinary = (broken | vanished) == 0
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(ordinary, scale, 1.0))
    if AFFINE:
        x = tl.where(_spread(ordinary, BLOCKS, BLOCK_SIZE) & exists, x - _spread(minimum, BLOCKS, BLOCK_SIZE), 0.0)
    n = x * _spread(tl.where(ordinary, inverse, 0.0), BLOCKS, BLOCK_SIZE)
    u = tl.zeros_like(n)
    if STOCHASTIC:
        u = _uniform(seed_key, first_index + row * length, first_index + row * length + column, ONE_ROW)
    if BITS != 4:
        rounded = n + _ROUNDER
        index = rounded.to(tl.int32, bitcast=True) - _ROUNDER_BITS
        if STOCHASTIC:
            nearest = rounded - _ROUNDER
            lower = nearest - tl.where(nearest > n, 1.0, 0.0)
            index = lower.to(tl.int32) + tl.where(u < n - lower, 1, 0)
        # Of a broken block every code is zero.
        most = _spread(tl.where(broken, 0, int(LEVEL_MAX)), BLOCKS, BLOCK_SIZE)
        codes = tl.minimum(tl.maximum(index, 0 if AFFINE else -most), most) & ((1 << BITS) - 1)
    else:
        # A broken block's codes are those of bucket 0, which are zero.
        bucket = (n + BUCKET_ROUNDER).to(tl.int32, bitcast=True) & _spread(tl.where(broken, 0, 63), BLOCKS, BLOCK_SIZE)
        threshold = _look_up(buckets_ptr + _THRESHOLDS, bucket, 64).to(tl.float32, bitcast=True)
        place = 2 * bucket + tl.where(n > threshold, 1, 0)
        if STOCHASTIC:
            lower = _look_up(buckets_ptr + _LEVELS_BELOW, place, 128).to(tl.float32, bitcast=True)
            reciprocal_gap = _look_up(buckets_ptr + _RECIPROCAL_GAPS, place, 128).to(tl.float32, bitcast=True)
            place = 2 * place + tl.where(u < (n - lower) * reciprocal_gap, 1, 0)
            codes = _look_up(buckets_ptr + _STOCHASTIC_CODES, place, 256)
        else:
            codes = _look_up(buckets_ptr + _NEAREST_CODES, place, 128)
    if not ONE_ROW:
        codes = tl.where(exists, codes, 0)

    # 4. The codes of a row as one stream of bits: two codes make a byte, or eight make BITS bytes.
    if BITS == 8:
        tl.store(codes_ptr + row * codes_per_row + column, codes.to(tl.uint8), mask=exists)
    elif BITS == 4:
        even, odd = tl.split(tl.reshape(codes, [TILE // 2, 2]))
        row, column, exists = _tile(num_blocks, blocks_per_row, codes_per_row, BLOCKS, BLOCK_SIZE // 2, ONE_ROW)
        tl.store(codes_ptr + row * codes_per_row + column, (even | (odd << 4)).to(tl.uint8), mask=exists)
    else:
        # The codes of a quad go together in 32 bits, two quads in 64.
        quads = tl.sum(tl.reshape(codes << (tl.arange(0, TILE) % 4 * BITS), [TILE // 4, 4]), axis=1)
        streams = tl.reshape(quads.to(tl.int64) << (tl.arange(0, TILE // 4) % 2 * 4 * BITS), [TILE // 8, 2])
        streams = tl.sum(streams, axis=1)
        bytes = streams[:, None] >> (tl.arange(0, 8)[None, :] * 8)
        row, column, exists = _tile(num_blocks, blocks_per_row, codes_per_row, BLOCKS, BLOCK_SIZE // 8, ONE_ROW)
        at = column[:, None] * BITS + tl.arange(0, 8)[None, :]
        exists = exists[:, None] & (tl.arange(0, 8)[None, :] < BITS) & (at < codes_per_row)
        if not ONE_ROW:
            row = row[:, None]
        tl.store(codes_ptr + row * codes_per_row + at, bytes.to(tl.uint8), mask=exists)


@triton.jit
def _code(row_ptr, column, exists, BITS: tl.constexpr):
    """A code of a row in the low bits, under what follows it."""
    bit = column % 8 * BITS
    row_ptr += column // 8 * BITS
    code = tl.load(row_ptr + bit // 8, mask=exists, other=0).to(tl.int32)
    if 8 % BITS != 0:  # its last bit may be in the next byte
        code |= tl.load(row_ptr + (bit + BITS - 1) // 8, mask=exists, other=0).to(tl.int32) << 8
    return code >> (bit % 8).to(tl.int32)


@triton.jit
def _levels(
    codes_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
    BITS: tl.constexpr, AFFINE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    """The levels of a tile's codes [BLOCKS * BLOCK_SIZE] in fp32, before they are multiplied by their scales."""
    row, column, exists = _tile(num_blocks, blocks_per_row, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    if BITS == 8:
        bytes = tl.load(codes_ptr + row * codes_per_row + column, mask=exists, other=0)
        levels = bytes.to(tl.int8, bitcast=True).to(tl.float32)
    elif BITS == 4:
        row, column, exists = _tile(num_blocks, blocks_per_row, codes_per_row, BLOCKS, BLOCK_SIZE // 2, ONE_ROW)
        bytes = tl.load(codes_ptr + row * codes_per_row + column, mask=exists, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(bytes & 15, bytes >> 4), [BLOCKS * BLOCK_SIZE])
        levels = _look_up(table_ptr, codes, 16)
    else:
        code = _code(codes_ptr + row * codes_per_row, column, exists, BITS)
        levels = (code & 3 if AFFINE else (code << (32 - BITS)) >> (32 - BITS)).to(tl.float32)
    return levels


@triton.jit(do_not_specialize=["num_blocks"])
def _dequantize_blockwise_kernel(
    codes_ptr, codes_per_row, scales_ptr, length, num_blocks, blocks_per_row, values_ptr, table_ptr, center_ptr,
    BITS: tl.constexpr, TYPE: tl.constexpr, CENTERED: tl.constexpr, AFFINE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_exists = block < num_blocks
    scale = _widen(tl.load(scales_ptr + (2 * block if AFFINE else block), mask=block_exists, other=0))
    row, column, exists = _tile(num_blocks, blocks_per_row, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    levels = _levels(
        codes_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, AFFINE, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    values = levels * _spread(scale, BLOCKS, BLOCK_SIZE)
    if AFFINE:
        minimum = _widen(tl.load(scales_ptr + 2 * block + 1, mask=block_exists, other=0))
        values += _spread(minimum, BLOCKS, BLOCK_SIZE)
    if CENTERED:
        values += tl.load(center_ptr + column, mask=exists, other=0)
    tl.store(values_ptr + row * length + column, _narrow(values, TYPE), mask=exists)


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
        _quantize_blockwise_kernel[(-(-num_blocks // blocks),)](
            _readable(x), _TILE if one_row else x.stride(0) if x.dim() == 2 else length, _TILE if one_row else length,
            num_blocks, 1 if one_row else -(-length // block_size), codes,
            _TILE * BITS[code] // 8 if one_row else num_codes, _bits(scales),
            None if code in ARITHMETIC else bucket_tensor(code, seed is not None, x.device),
            0 if seed is None else seed_key(seed), first_index, None if center is None else center.contiguous(),
            None if factor is None else _readable(factor), None if product is None else _bits(product),
            LEVEL_MAX=LEVEL_MAX[code], BITS=BITS[code],
            BUCKET_ROUNDER=0.0 if code in ARITHMETIC else bucket_rounder(code), STOCHASTIC=seed is not None,
            CENTERED=center is not None, MULTIPLIED=factor is not None, TYPE=_name(x.dtype),
            SCALE_TYPE=_name(scale_dtype), AFFINE=code in AFFINE, BLOCK_SIZE=block_size, BLOCKS=blocks, ONE_ROW=one_row,
            enable_fp_fusion=False,
        )  # fmt: skip
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
        _dequantize_blockwise_kernel[(-(-num_blocks // blocks),)](
            codes, _TILE * BITS[code] // 8 if one_row else codes.shape[-1], _readable(scales),
            _TILE if one_row else length, num_blocks, 1 if one_row else -(-length // block_size), _bits(values),
            codebook_tensor(code, codes.device), None if center is None else center.contiguous(),
            BITS=BITS[code], TYPE=_name(dtype), CENTERED=center is not None, AFFINE=code in AFFINE,
            BLOCK_SIZE=block_size, BLOCKS=blocks, ONE_ROW=one_row, enable_fp_fusion=False,
        )  # fmt: skip
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
