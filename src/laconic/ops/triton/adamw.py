"""AdamW with moments in 8 or 4 bits in Triton; `blockwise.py` explains why bits are equal."""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import astuple
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.adamw_scalars import LARGEST_GRADIENT
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.adamw import AdamWStep, AdamWTensors, checked_step
from laconic.ops.dynamic_map import BLOCK_SIZES, dynamic_map_tensor, zero_code
from laconic.ops.triton.blockwise import _bits, _name, _narrow, _on_device, _place, _widen, _widen_bits

__all__ = ["adamw8bit_multi_"]

_BLOCKS = {8: 4, 4: 8}
"""By the bits of a code, blocks per program: 1024 elements."""

_GRADIENT_BLOCK = tl.constexpr(GRADIENT_BLOCK_SIZE)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LARGEST_GRADIENT = tl.constexpr(LARGEST_GRADIENT)
_SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)

# Where each table starts in a map.
_BORDERS = tl.constexpr(256)
_SLOPES = tl.constexpr(264)
_OFFSETS = tl.constexpr(272)
_LAST = tl.constexpr(280)
_ZERO_BORDER = tl.constexpr(288)
_TOP = tl.constexpr(289)


@triton.jit
def _dequantize(
    codes_ptr, scales_ptr, map_ptr, at, exists, block, block_exists, ZERO: tl.constexpr, BITS: tl.constexpr
):
    """Codes -> fp32 [BLOCKS, BLOCK_SIZE]; `at` is the byte of each."""
    codes = tl.load(codes_ptr + at, mask=exists, other=ZERO).to(tl.int32)
    if BITS == 4:
        pairs = tl.join(codes & 15, codes >> 4)
        codes = tl.reshape(pairs, [pairs.shape[0], 2 * pairs.shape[1]])
    return tl.load(map_ptr + codes) * tl.load(scales_ptr + block, mask=block_exists, other=0.0)[:, None]


@triton.jit
def _quantize(
    x,
    codes_ptr,
    scales_ptr,
    map_ptr,
    at,
    exists,
    is_element,
    block,
    block_exists,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIGNED_SCALE: tl.constexpr,
):
    """fp32 [BLOCKS, BLOCK_SIZE], zeros outside the tensor -> codes and scales, stored."""
    magnitude_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = magnitude_bits.to(tl.float32, bitcast=True)
    broken = magnitude_bits >= _INFINITY_BITS
    vanished = magnitude_bits < _SMALLEST_NORMAL_BITS
    scale = tl.where(broken, float("nan"), tl.where(vanished, 0.0, largest))
    if SIGNED_SCALE:  # negations are products
        is_positive = tl.max(x.to(tl.int32, bitcast=True), axis=1) == magnitude_bits
        scale = tl.where(is_positive | broken | vanished, scale, largest * -1.0)
    tl.store(scales_ptr + block, scale, mask=block_exists)

    ordinary = (broken | vanished) == 0
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(ordinary, scale, 1.0))
    n = tl.where(ordinary[:, None], x * inverse[:, None], 0.0)
    magnitude = tl.abs(n)
    decade = tl.zeros_like(magnitude).to(tl.int32)
    for d in tl.static_range(6):
        decade += tl.where(magnitude > tl.load(map_ptr + (_BORDERS + d)), 1, 0)
    line = magnitude * tl.load(map_ptr + _SLOPES + decade) + tl.load(map_ptr + _OFFSETS + decade)
    number = tl.minimum(line.to(tl.int32), tl.load(map_ptr + _LAST + decade).to(tl.int32))
    number += tl.where(magnitude > tl.load(map_ptr + _TOP), 1, 0)
    number = tl.where(magnitude > tl.load(map_ptr + _ZERO_BORDER), number, 0)
    codes = tl.where(n < 0, ZERO - tl.minimum(number, ZERO), ZERO + number)
    if BITS == 4:
        codes = tl.where(is_element, codes, 0)
        even, odd = tl.split(tl.reshape(codes, [BLOCKS, codes.shape[1] // 2, 2]))
        codes = even | (odd << 4)
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=exists)


@triton.jit
def _update(
    parameter_ptr,
    exp_avg_codes_ptr,
    exp_avg_scales_ptr,
    exp_avg_sq_codes_ptr,
    exp_avg_sq_scales_ptr,
    signed_map_ptr,
    unsigned_map_ptr,
    gradient_ptr,
    gradient_scales_ptr,
    residual_codes_ptr,
    residual_scales_ptr,
    factor_ptr,
    row,
    first_column,
    length,
    block,
    block_exists,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    ratio_max,
    inverse_correction2,
    eps,
    decay,
    step_size,
    TYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    BITS: tl.constexpr,
):
    """Update the elements of the blocks `block` [BLOCKS], which begin at `first_column` of their `row`."""
    column = first_column[:, None] + tl.arange(0, BLOCK_SIZE)[None, :]
    exists = block_exists[:, None] & (column < length)
    at = row[:, None] * length + column
    # Where the codes are: in 4 bits two in a byte, and every row begins at a byte.
    if BITS == 8:
        code_at = at
        code_exists = exists
    else:
        pair = first_column[:, None] // 2 + tl.arange(0, BLOCK_SIZE // 2)[None, :]
        code_at = row[:, None] * tl.cdiv(length, 2) + pair
        code_exists = block_exists[:, None] & (2 * pair < length)

    # 1. The gradient in fp32. Negations are products, because 0 - x loses the sign of zero.
    g = tl.load(gradient_ptr + at, mask=exists, other=0)
    if QUANTIZED:
        gradient_block = at // _GRADIENT_BLOCK
        scale = tl.load(gradient_scales_ptr + gradient_block, mask=exists, other=0.0)
        g = g.to(tl.int8, bitcast=True).to(tl.float32) * scale
        if RESIDUAL:
            pair = tl.load(residual_codes_ptr + at // 2, mask=exists, other=0).to(tl.int32)
            nibble = (pair >> (4 * (at % 2)).to(tl.int32)) & 15
            scale = tl.load(residual_scales_ptr + gradient_block, mask=exists, other=0.0)
            g += ((nibble ^ 8) - 8).to(tl.float32) * scale
    else:
        g = _widen(g)
    if FACTOR:
        g = g * tl.load(factor_ptr)
    if MAXIMIZE:
        g = g * -1.0
    # A finite gradient makes no infinite square; infinity and NaN go on to where they are seen.
    magnitude = tl.abs(g)
    is_huge = (magnitude > _LARGEST_GRADIENT) & (magnitude < float("inf"))
    g = tl.where(is_huge, tl.where(g > 0, _LARGEST_GRADIENT, -_LARGEST_GRADIENT), g)

    # 2. The moments.
    m = _dequantize(
        exp_avg_codes_ptr,
        exp_avg_scales_ptr,
        signed_map_ptr,
        code_at,
        code_exists,
        block,
        block_exists,
        SIGNED_ZERO,
        BITS,
    )
    v = _dequantize(
        exp_avg_sq_codes_ptr,
        exp_avg_sq_scales_ptr,
        unsigned_map_ptr,
        code_at,
        code_exists,
        block,
        block_exists,
        0,
        BITS,
    )
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    root = tl.sqrt_rn(v)

    # 3. No |m| beyond what Adam's could be; comparisons with NaN leave m alone.
    limit = root * ratio_max
    m = tl.where(limit < m, limit, m)
    m = tl.where(limit * -1.0 > m, limit * -1.0, m)

    # 4. The weights.
    change = tl.div_rn(m, root * inverse_correction2 + eps)
    p = _widen_bits(tl.load(parameter_ptr + at, mask=exists, other=0), TYPE)
    p = p * decay - change * step_size
    tl.store(parameter_ptr + at, _narrow(p, TYPE), mask=exists)

    # 5. The moments again in codes.
    m = tl.where(exists, m, 0.0)
    v = tl.where(exists, v, 0.0)
    _quantize(
        m,
        exp_avg_codes_ptr,
        exp_avg_scales_ptr,
        signed_map_ptr,
        code_at,
        code_exists,
        exists,
        block,
        block_exists,
        SIGNED_ZERO,
        BITS,
        BLOCKS,
        BITS == 4,
    )
    _quantize(
        v,
        exp_avg_sq_codes_ptr,
        exp_avg_sq_scales_ptr,
        unsigned_map_ptr,
        code_at,
        code_exists,
        exists,
        block,
        block_exists,
        0,
        BITS,
        BLOCKS,
        False,
    )


@triton.jit
def _adamw_kernel(
    parameter_ptr,
    exp_avg_codes_ptr,
    exp_avg_scales_ptr,
    exp_avg_sq_codes_ptr,
    exp_avg_sq_scales_ptr,
    signed_map_ptr,
    unsigned_map_ptr,
    gradient_ptr,
    gradient_scales_ptr,
    residual_codes_ptr,
    residual_scales_ptr,
    factor_ptr,
    length,
    num_blocks,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    ratio_max,
    inverse_correction2,
    eps,
    decay,
    step_size,
    TYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    block, row, first_column, block_exists = _place(num_blocks, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    _update(
        parameter_ptr,
        exp_avg_codes_ptr,
        exp_avg_scales_ptr,
        exp_avg_sq_codes_ptr,
        exp_avg_sq_scales_ptr,
        signed_map_ptr,
        unsigned_map_ptr,
        gradient_ptr,
        gradient_scales_ptr,
        residual_codes_ptr,
        residual_scales_ptr,
        factor_ptr,
        row,
        first_column,
        length,
        block,
        block_exists,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        ratio_max,
        inverse_correction2,
        eps,
        decay,
        step_size,
        TYPE,
        QUANTIZED,
        RESIDUAL,
        FACTOR,
        MAXIMIZE,
        BLOCKS,
        BLOCK_SIZE,
        SIGNED_ZERO,
        BITS,
    )


@triton.jit
def _pointer(table_ptr, column, num_tensors, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of the table as a pointer to elements of a type."""
    pointer = tl.load(table_ptr + column * num_tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["num_tensors"])
def _adamw_multi_kernel(
    table_ptr,
    num_tensors,
    signed_map_ptr,
    unsigned_map_ptr,
    factor_ptr,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    ratio_max,
    inverse_correction2,
    eps,
    decay,
    step_size,
    TYPE: tl.constexpr,
    BITS_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FACTOR: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BLOCKS blocks of one tensor; table_ptr is int64 [12, num_tensors] of `_table`."""
    # The last tensor whose first program is not behind this one.
    program = tl.program_id(0).to(tl.int64)
    tensor = num_tensors * 0
    end = num_tensors
    while end - tensor > 1:
        middle = (tensor + end) // 2
        is_behind = tl.load(table_ptr + middle) > program
        end = tl.where(is_behind, middle, end)
        tensor = tl.where(is_behind, tensor, middle)

    first_block = (program - tl.load(table_ptr + tensor)) * BLOCKS
    length = tl.load(table_ptr + num_tensors + tensor)
    num_blocks = tl.load(table_ptr + 2 * num_tensors + tensor)
    if ALIGNED:
        length = tl.multiple_of(length, 16 * 8 // BITS)
    parameter_ptr = _pointer(table_ptr, 3, num_tensors, tensor, BITS_TYPE, ALIGNED)
    exp_avg_codes_ptr = _pointer(table_ptr, 4, num_tensors, tensor, tl.uint8, ALIGNED)
    exp_avg_scales_ptr = _pointer(table_ptr, 5, num_tensors, tensor, tl.float32, ALIGNED)
    exp_avg_sq_codes_ptr = _pointer(table_ptr, 6, num_tensors, tensor, tl.uint8, ALIGNED)
    exp_avg_sq_scales_ptr = _pointer(table_ptr, 7, num_tensors, tensor, tl.float32, ALIGNED)
    gradient_ptr = _pointer(table_ptr, 8, num_tensors, tensor, GRADIENT_TYPE, ALIGNED)
    # Addresses that are not read are 0.
    gradient_scales_ptr = _pointer(table_ptr, 9, num_tensors, tensor, tl.float32, ALIGNED)
    residual_codes_ptr = _pointer(table_ptr, 10, num_tensors, tensor, tl.uint8, ALIGNED)
    residual_scales_ptr = _pointer(table_ptr, 11, num_tensors, tensor, tl.float32, ALIGNED)
    block = first_block + tl.arange(0, BLOCKS)
    blocks_per_row = tl.cdiv(length, BLOCK_SIZE)
    row = block // blocks_per_row
    first_column = (block - row * blocks_per_row) * BLOCK_SIZE
    block_exists = block < num_blocks
    _update(
        parameter_ptr,
        exp_avg_codes_ptr,
        exp_avg_scales_ptr,
        exp_avg_sq_codes_ptr,
        exp_avg_sq_scales_ptr,
        signed_map_ptr,
        unsigned_map_ptr,
        gradient_ptr,
        gradient_scales_ptr,
        residual_codes_ptr,
        residual_scales_ptr,
        factor_ptr,
        row,
        first_column,
        length,
        block,
        block_exists,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        ratio_max,
        inverse_correction2,
        eps,
        decay,
        step_size,
        TYPE,
        QUANTIZED,
        RESIDUAL,
        FACTOR,
        MAXIMIZE,
        BLOCKS,
        BLOCK_SIZE,
        SIGNED_ZERO,
        BITS,
    )


def adamw8bit_multi_(*arguments: Any) -> None:
    """`reference.adamw8bit_multi_` in Triton, the same bits."""
    step = checked_step(*arguments)
    if not step.each:
        return
    device = step.each[0].parameter.device
    # A graph outlives this call, and with it the addresses in its launches; nothing would keep a table for it.
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_capturing or len(step.each) == 1:
        for tensors, (rows, length) in zip(step.each, step.shapes, strict=True):
            if tensors.parameter.numel():
                _launch_one(tensors, rows, length, step)
    else:
        _launch_many(step, device)


def _launch_one(tensors: AdamWTensors, rows: int, length: int, step: AdamWStep) -> None:
    parameter, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales = tensors[:5]
    gradient, gradient_scales, residual_codes, residual_scales = tensors[5:]
    num_blocks = exp_avg_scales.numel()
    one_row = rows == 1 or length % BLOCK_SIZES[step.bits] == 0
    blocks = _BLOCKS[step.bits]
    # Pointers that are not read still have to be tensors.
    unused = exp_avg_scales
    with _on_device(parameter):
        _adamw_kernel[(triton.cdiv(num_blocks, blocks),)](
            _bits(parameter.detach()),
            exp_avg_codes,
            exp_avg_scales,
            exp_avg_sq_codes,
            exp_avg_sq_scales,
            dynamic_map_tensor(True, parameter.device, step.bits),
            dynamic_map_tensor(False, parameter.device, step.bits),
            _bits(gradient.detach()) if gradient.dtype == torch.bfloat16 else gradient.detach(),
            unused if gradient_scales is None else gradient_scales,
            unused if residual_codes is None else residual_codes,
            unused if residual_scales is None else residual_scales,
            unused if step.gradient_factor is None else step.gradient_factor,
            parameter.numel() if one_row else length,
            num_blocks,
            *astuple(step.scalars),
            TYPE=_name(parameter.dtype),
            QUANTIZED=gradient_scales is not None,
            RESIDUAL=residual_codes is not None,
            FACTOR=step.gradient_factor is not None,
            MAXIMIZE=step.maximize,
            BLOCKS=blocks,
            BLOCK_SIZE=BLOCK_SIZES[step.bits],
            SIGNED_ZERO=zero_code(True, step.bits),
            BITS=step.bits,
            ONE_ROW=one_row,
            enable_fp_fusion=False,
        )


def _launch_many(step: AdamWStep, device: torch.device) -> None:
    addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in tensors] for tensors in step.each]
    first, scalars = step.each[0], astuple(step.scalars)
    # Pointers that are not read still have to be tensors.
    factor = first.exp_avg_scales if step.gradient_factor is None else step.gradient_factor
    for is_aligned in (True, False):
        table, num_programs = _table(step.shapes, addresses, is_aligned, step.bits)
        if not table:
            continue
        with _on_device(first.parameter):
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            _adamw_multi_kernel[(num_programs,)](
                _on_stream(table, device, stream),
                len(table) // 12,
                dynamic_map_tensor(True, device, step.bits),
                dynamic_map_tensor(False, device, step.bits),
                factor,
                *scalars,
                TYPE=_name(first.parameter.dtype),
                BITS_TYPE=tl.int32 if first.parameter.dtype == torch.float32 else tl.int16,
                GRADIENT_TYPE=_GRADIENT_TYPES[first.gradient.dtype],
                QUANTIZED=first.gradient_scales is not None,
                RESIDUAL=first.residual_codes is not None,
                FACTOR=step.gradient_factor is not None,
                MAXIMIZE=step.maximize,
                BLOCKS=_BLOCKS[step.bits],
                BLOCK_SIZE=BLOCK_SIZES[step.bits],
                SIGNED_ZERO=zero_code(True, step.bits),
                BITS=step.bits,
                ALIGNED=is_aligned,
                enable_fp_fusion=False,
            )


_GRADIENT_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.int16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


def _table(
    shapes: list[tuple[int, int]], addresses: list[list[int]], is_aligned: bool, bits: int
) -> tuple[tuple[int, ...], int]:
    """What `_adamw_multi_kernel` reads about its tensors, [12, tensors], and the number of its programs.

    In this order: number of the first program, length of a row, number of blocks, and the nine addresses. Tensors of
    one row and of rows of whole blocks are one row. Empty tensors have no place.

    Args:
        shapes: (rows, length of a row) of each tensor.
        addresses: of the nine tensors of each; 0 where there is none.
        is_aligned: take the tensors whose rows all begin at multiples of 16 bytes in all of their parts; or the others.
        bits: of a code of a moment.
    """
    block_size = BLOCK_SIZES[bits]
    entries: list[tuple[int, ...]] = []
    num_programs = 0
    for (rows, length), parts in zip(shapes, addresses, strict=True):
        if rows * length == 0:
            continue
        row = rows * length if rows == 1 or length % block_size == 0 else length
        if (row * bits % 128 == 0 and not any(address % 16 for address in parts)) is is_aligned:
            num_blocks = rows * -(-length // block_size)
            entries.append((num_programs, row, num_blocks, *parts))
            num_programs += -(-num_blocks // _BLOCKS[bits])
    return tuple(chain.from_iterable(zip(*entries, strict=True))), num_programs


@lru_cache(maxsize=64)
def _on_stream(table: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """The numbers as int64 on a device, copied there on its current stream, which has the address `stream`.

    Found again by all of the numbers alone, so what is found is never out of date. The host does not wait.
    """
    numbers = torch.tensor(table, dtype=torch.int64, device="cpu")
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
