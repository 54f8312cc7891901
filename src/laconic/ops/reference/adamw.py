"""AdamW with moments in 8 or 4 bits: the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.ops.adamw_scalars import LARGEST_GRADIENT
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE, MIN_SCALE
from laconic.ops.declarations.adamw import AdamWStep, AdamWTensors, checked_step
from laconic.ops.dynamic_map import dynamic_map_tensor, has_signed_scale, zero_code
from laconic.ops.reference.blockwise import dequantize_blockwise
from laconic.options import MOMENT_BLOCK_SIZES

__all__ = ["adamw8bit_multi_", "dequantize_dynamic", "quantize_dynamic"]

_INFINITY_BITS = 0x7F800000
_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_BITS_DTYPE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@torch.no_grad()
def adamw8bit_multi_(*arguments: Any) -> None:
    """One step of AdamW of each parameter, in place, one after the other; see `laconic.ops.adamw8bit_multi_`."""
    step = checked_step(*arguments)
    for tensors, (rows, length) in zip(step.each, step.shapes, strict=True):
        if tensors.parameter.numel():
            _update(tensors, rows, length, step)


def _update(tensors: AdamWTensors, rows: int, length: int, step: AdamWStep) -> None:
    a = step.scalars
    parameter, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales = tensors[:5]

    # 1. The gradient in fp32.
    g = _gradient(*tensors[5:]).view(rows, length)
    if step.gradient_factor is not None:
        g = g * step.gradient_factor
    if step.maximize:
        g = -g
    # A finite gradient makes no infinite square; infinity and NaN go on to where they are seen.
    g = torch.where(g.isinf(), g, g.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT))

    # 2. The moments, in this order of operations.
    def moment_of(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
        return dequantize_dynamic(codes.view(rows, -1), scales, signed=signed, bits=step.bits, length=length)

    m, v = moment_of(exp_avg_codes, exp_avg_scales, True), moment_of(exp_avg_sq_codes, exp_avg_sq_scales, False)
    m = m * a.beta1 + g * a.one_minus_beta1
    v = v * a.beta2 + (g * g) * a.one_minus_beta2
    # torch's fp32 square root may be one bit off (MKL's is); the one of fp64, rounded, is the IEEE one.
    root = v.double().sqrt().float()

    # 3. No |m| beyond what Adam's could be; comparisons with NaN leave m alone.
    limit = root * a.ratio_max
    m = torch.where(limit < m, limit, m)
    m = torch.where(-limit > m, -limit, m)

    # 4. The weights.
    change = m / (root * a.inverse_correction2 + a.eps)
    p = parameter.view(rows, length).float() * a.decay - change * a.step_size
    written = p.to(parameter.dtype)
    written.view(_BITS_DTYPE[parameter.dtype]).masked_fill_(p.isnan(), _NAN_BITS[parameter.dtype])
    parameter.copy_(written.view_as(parameter))

    # 5. The moments again in codes.
    for moment, codes, scales, signed in (
        (m, exp_avg_codes, exp_avg_scales, True),
        (v, exp_avg_sq_codes, exp_avg_sq_scales, False),
    ):
        new_codes, new_scales = quantize_dynamic(moment, signed=signed, bits=step.bits)
        codes.copy_(new_codes.view_as(codes))
        scales.copy_(new_scales)


def quantize_dynamic(x: Tensor, *, signed: bool, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Codes and scales fp32 [rows, ceil(L / B)] of x, fp32 [rows, L], in blocks of B elements along rows.

    In 8 bits B is 256 and codes are uint8 [rows, L]; in 4 bits B is 128 and codes are uint8 [rows, ceil(L / 2)], the
    first of two in the low half of a byte. A block with NaN or infinity gets scale NaN; one whose largest magnitude is
    below 2**-126, scale 0 and zeros. In 4 bits the scale of a signed block is the number of largest magnitude itself.
    """
    rows, length = x.shape
    block_size, zero = MOMENT_BLOCK_SIZES[bits], zero_code(signed, bits)
    num_blocks = -(-length // block_size)
    padding = num_blocks * block_size - length
    blocks = torch.nn.functional.pad(x, (0, padding)).view(rows, num_blocks, block_size)

    magnitude_bits = blocks.abs().view(torch.int32).amax(-1)
    scales = magnitude_bits.view(torch.float32).clone()
    broken = magnitude_bits >= _INFINITY_BITS
    vanished = ~broken & (scales < MIN_SCALE)
    if has_signed_scale(signed, bits):
        scales = torch.where(blocks.amax(-1) == scales, scales, -scales)
    scales = scales.masked_fill(vanished, 0.0).masked_fill(broken, float("nan"))

    ordinary = ~(broken | vanished)
    inverse = torch.where(ordinary, scales, 1.0).reciprocal()
    n = torch.where(ordinary.unsqueeze(-1), blocks * inverse.unsqueeze(-1), 0.0)
    number = level_numbers(n.abs(), signed=signed, bits=bits)
    codes = torch.where(n < 0, zero - number.clamp(max=zero), zero + number)
    codes = codes.to(torch.uint8).view(rows, num_blocks * block_size)[:, :length].contiguous()
    return codes if bits == 8 else _pack_pairs(codes), scales


def level_numbers(magnitude: Tensor, *, signed: bool, bits: int) -> Tensor:
    """The number of the level, int32 [...], that each normalized magnitude, fp32 [...], takes: 0 is zero."""
    tables = dynamic_map_tensor(signed, magnitude.device, bits)
    borders, slopes, offsets, last = (tables[256 + 8 * i : 264 + 8 * i] for i in range(4))
    zero_border, top = tables[288], tables[289]
    decade = torch.bucketize(magnitude, borders)  # how many lie strictly below
    number = (magnitude * slopes[decade] + offsets[decade]).int()
    number = torch.minimum(number, last[decade].int()) + (magnitude > top)
    return number.masked_fill(magnitude <= zero_border, 0)


def dequantize_dynamic(
    codes: Tensor, scales: Tensor, *, signed: bool, bits: int = 8, length: int | None = None
) -> Tensor:
    """The values, fp32 [rows, L], of what `quantize_dynamic` returns.

    `length` is L; None means as many as there are codes, of which in 4 bits the last may be none of the row's.
    """
    if bits == 4:
        codes = _unpack_pairs(codes)
    codes = codes[:, :length]
    levels = dynamic_map_tensor(signed, codes.device, bits)[:256][codes.int()]
    return levels * scales.repeat_interleave(MOMENT_BLOCK_SIZES[bits], dim=-1)[:, : codes.shape[-1]]


def _pack_pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits uint8 [rows, L], two in a byte: uint8 [rows, ceil(L / 2)]."""
    low, high = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def _unpack_pairs(pairs: Tensor) -> Tensor:
    """Codes of 4 bits uint8 [rows, 2 * bytes] of pairs uint8 [rows, bytes]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def _gradient(
    gradient: Tensor, scales: Tensor | None, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> Tensor:
    """The gradient, flat fp32: a dense tensor, or int8 codes with or without an int4 residual."""
    if scales is None:
        return gradient.flatten().float()
    n, size = gradient.numel(), GRADIENT_BLOCK_SIZE
    value = dequantize_blockwise(gradient.view(n), scales, "int8", size, n, torch.float32)
    if residual_codes is not None and residual_scales is not None:
        value = value + dequantize_blockwise(residual_codes, residual_scales, "int4", size, n, torch.float32)
    return value
