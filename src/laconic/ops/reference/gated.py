"""The product of a gated feed-forward block, and its gradients, from codes of gate and up: the specification.

Every step that separate operations of torch would store is rounded to the values' dtype here too, so the results are
theirs but where exp differs in its last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.declarations.gated import check_gated_backward_blockwise, check_gated_product_blockwise
from laconic.ops.gated_activations import (
    ACTIVATION_LIMIT,
    CURVES,
    EXP_COEFFICIENTS,
    EXP_LIMIT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ROUNDER,
)
from laconic.ops.reference.blockwise import dequantize_blockwise

__all__ = ["gated_backward_blockwise", "gated_product_blockwise"]

_ROUNDER_BITS = 0x4B400000


@torch.no_grad()
def gated_product_blockwise(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """activation(gate) * up [..., length]; see `laconic.ops.gated_product_blockwise`."""
    check_gated_product_blockwise(
        gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation
    )
    gate = _values(gate_codes, gate_scales, code, block_size, length, dtype)
    up = _values(up_codes, up_scales, code, block_size, length, dtype)
    activated, _ = _activation(gate, activation)
    return _rounded(_rounded(activated, dtype).float() * up, dtype)


@torch.no_grad()
def gated_backward_blockwise(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, each [..., length] like grad; see `laconic.ops.gated_backward_blockwise`."""
    check_gated_backward_blockwise(grad, gate_codes, gate_scales, up_codes, up_scales, code, block_size, activation)
    length, dtype = grad.shape[-1], grad.dtype
    gate = _values(gate_codes, gate_scales, code, block_size, length, dtype)
    up = _values(up_codes, up_scales, code, block_size, length, dtype)
    activated, derivative = _activation(gate, activation)
    grad = grad.contiguous().float()
    grad_activated = _rounded(grad * up, dtype).float()
    grad_up = _rounded(grad * _rounded(activated, dtype).float(), dtype)
    return _rounded(grad_activated * derivative, dtype), grad_up


def _values(codes: Tensor, scales: Tensor, code: str, block_size: int, length: int, dtype: torch.dtype) -> Tensor:
    """The dequantized values in fp32, in the range of `dtype` where that is fp16."""
    values = dequantize_blockwise(codes, scales, code, block_size, length, dtype).float()
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        values = _clamped(values, largest)
    return values


def _clamped(x: Tensor, limit: float) -> Tensor:
    """X between -limit and limit; NaN stays."""
    return torch.where(x > limit, limit, torch.where(x < -limit, -limit, x))


def _activation(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of x fp32 and its derivative sigmoid * (1 + x * (1 - sigmoid) * slope), fp32."""
    linear, cubic, three_cubic = CURVES[activation]
    inside = _clamped(x, ACTIVATION_LIMIT)
    square = inside * inside
    sigmoid = 1 / (1 + _exp(-_clamped(inside * (square * cubic + linear), EXP_LIMIT)))
    slope = square * three_cubic + linear
    derivative = sigmoid * ((1 - sigmoid) * slope * inside + 1)
    return torch.where(x < -ACTIVATION_LIMIT, -ACTIVATION_LIMIT, x) * sigmoid, derivative


def _exp(z: Tensor) -> Tensor:
    """exp(z) for z fp32 in [-EXP_LIMIT, EXP_LIMIT]; any number for NaN."""
    shifted = z * LOG2_E + ROUNDER
    k = shifted - ROUNDER
    f = z - k * LN2_HIGH
    f = f - k * LN2_LOW
    first, *rest = EXP_COEFFICIENTS
    polynomial = torch.full_like(f, first)
    for coefficient in rest:
        polynomial = polynomial * f + coefficient
    power = ((shifted.view(torch.int32) - _ROUNDER_BITS + 127) << 23).view(torch.float32)
    return (polynomial * (f * f) + f + 1) * power


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 values in `dtype`, every NaN the quiet one without a payload."""
    result = values.to(dtype, copy=True)
    return result.masked_fill_(values.isnan(), float("nan"))
