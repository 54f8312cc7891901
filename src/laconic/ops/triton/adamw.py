"""AdamW with 8-bit moments in Triton; `blockwise.py` explains why bits are equal."""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import astuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.adamw_scalars import adamw_scalars
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE, dynamic_map_tensor
from laconic.ops.schemas import check_adamw8bit
from laconic.ops.triton.blockwise import _bits, _name, _narrow, _on_device, _place, _widen, _widen_bits

__all__ = ["adamw8bit_"]

_BLOCKS = 4
"""Blocks of 256 elements per program."""

_BLOCK_SIZE = tl.constexpr(STATE_BLOCK_SIZE)
_GRADIENT_BLOCK = tl.constexpr(GRADIENT_BLOCK_SIZE)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)

# Where each table starts in a map.
_BORDERS = tl.constexpr(256)
_SLOPES = tl.constexpr(264)
_OFFSETS = tl.constexpr(272)
_LAST = tl.constexpr(280)
_ZERO_BORDER = tl.constexpr(288)
_TOP = tl.constexpr(289)


@triton.jit
def _dequantize(codes_ptr, scales_ptr, map_ptr, at, exists, block, block_exists, ZERO: tl.constexpr):
    """Codes -> fp32 [BLOCKS, 256]."""
    codes = tl.load(codes_ptr + at, mask=exists, other=ZERO).to(tl.int32)
    return tl.load(map_ptr + codes) * tl.load(scales_ptr + block, mask=block_exists, other=0.0)[:, None]


@triton.jit
def _quantize(
    x, codes_ptr, scales_ptr, map_ptr, at, exists, block, block_exists, ZERO: tl.constexpr, BLOCKS: tl.constexpr
):
    """fp32 [BLOCKS, 256], zeros outside the tensor -> codes and scales, stored."""
    magnitude_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = magnitude_bits.to(tl.float32, bitcast=True)
    broken = magnitude_bits >= _INFINITY_BITS
    vanished = magnitude_bits < _SMALLEST_NORMAL_BITS
    scale = tl.where(broken, float("nan"), tl.where(vanished, 0.0, largest))
    tl.store(scales_ptr + block, scale, mask=block_exists)

    ordinary = (broken | vanished) == 0
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), tl.where(ordinary, largest, 1.0))
    n = tl.where(ordinary[:, None], x * inverse[:, None], 0.0)
    magnitude = tl.abs(n)
    decade = tl.zeros_like(magnitude).to(tl.int32)
    for d in tl.static_range(6):
        decade += tl.where(magnitude > tl.load(map_ptr + (_BORDERS + d)), 1, 0)
    line = magnitude * tl.load(map_ptr + _SLOPES + decade) + tl.load(map_ptr + _OFFSETS + decade)
    number = tl.minimum(line.to(tl.int32), tl.load(map_ptr + _LAST + decade).to(tl.int32))
    number += tl.where(magnitude > tl.load(map_ptr + _TOP), 1, 0)
    number = tl.where(magnitude > tl.load(map_ptr + _ZERO_BORDER), number, 0)
    codes = tl.where(n < 0, ZERO - tl.minimum(number, 127), ZERO + number)
    tl.store(codes_ptr + at, codes.to(tl.uint8), mask=exists)


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
    ONE_ROW: tl.constexpr,
):
    block, row, first_column, block_exists = _place(num_blocks, length, BLOCKS, _BLOCK_SIZE, ONE_ROW)
    column = first_column[:, None] + tl.arange(0, _BLOCK_SIZE)[None, :]
    exists = block_exists[:, None] & (column < length)
    at = row[:, None] * length + column

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

    # 2. The moments.
    m = _dequantize(exp_avg_codes_ptr, exp_avg_scales_ptr, signed_map_ptr, at, exists, block, block_exists, 127)
    v = _dequantize(exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr, unsigned_map_ptr, at, exists, block, block_exists, 0)
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

    # 5. The moments again in 8 bits.
    m = tl.where(exists, m, 0.0)
    v = tl.where(exists, v, 0.0)
    _quantize(m, exp_avg_codes_ptr, exp_avg_scales_ptr, signed_map_ptr, at, exists, block, block_exists, 127, BLOCKS)
    _quantize(
        v, exp_avg_sq_codes_ptr, exp_avg_sq_scales_ptr, unsigned_map_ptr, at, exists, block, block_exists, 0, BLOCKS
    )


def adamw8bit_(
    parameter: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient_factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
) -> None:
    """`reference.adamw8bit_` in Triton, the same bits."""
    rows, length = check_adamw8bit(
        parameter,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradient,
        gradient_scales,
        residual_codes,
        residual_scales,
        gradient_factor,
        step,
    )
    num_blocks = exp_avg_scales.numel()
    if parameter.numel() == 0:
        return
    one_row = rows == 1 or length % STATE_BLOCK_SIZE == 0
    # Pointers that are not read still have to be tensors.
    unused = exp_avg_scales
    with _on_device(parameter):
        _adamw_kernel[(triton.cdiv(num_blocks, _BLOCKS),)](
            _bits(parameter.detach()),
            exp_avg_codes,
            exp_avg_scales,
            exp_avg_sq_codes,
            exp_avg_sq_scales,
            dynamic_map_tensor(True, parameter.device),
            dynamic_map_tensor(False, parameter.device),
            _bits(gradient.detach()) if gradient.dtype == torch.bfloat16 else gradient.detach(),
            unused if gradient_scales is None else gradient_scales,
            unused if residual_codes is None else residual_codes,
            unused if residual_scales is None else residual_scales,
            unused if gradient_factor is None else gradient_factor,
            parameter.numel() if one_row else length,
            num_blocks,
            *astuple(adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)),
            TYPE=_name(parameter.dtype),
            QUANTIZED=gradient_scales is not None,
            RESIDUAL=residual_codes is not None,
            FACTOR=gradient_factor is not None,
            MAXIMIZE=maximize,
            BLOCKS=_BLOCKS,
            ONE_ROW=one_row,
            enable_fp_fusion=False,
        )
