"""Gated products and their gradients from codes in Triton: the same bits as `reference/gated.py`.

One program handles a tile of whole blocks of gate and of up; rebuilt values exist in registers only.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.codebooks import BITS, codebook_tensor
from laconic.ops.declarations.gated import check_gated_backward_blockwise, check_gated_product_blockwise
from laconic.ops.gated_activations import (
    ACTIVATION_LIMIT,
    CURVES,
    EXP_COEFFICIENTS,
    EXP_LIMIT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
)
from laconic.ops.triton.blockwise import (
    _INTERPRETED,
    _ROUNDER,
    _ROUNDER_BITS,
    _bits,
    _levels,
    _name,
    _narrow,
    _on_device,
    _spread,
    _tile,
    _widen,
    _widen_bits,
)
from laconic.ops.triton.kernel_constants import KernelConstant

_TILE = 1024
"""Elements per program; with 4 warps, each thread moves 16 bytes of bf16 in one access."""

_ACTIVATION_LIMIT = KernelConstant(ACTIVATION_LIMIT)
_EXP_LIMIT = KernelConstant(EXP_LIMIT)
_LOG2_E = KernelConstant(LOG2_E)
_LN2_HIGH = KernelConstant(LN2_HIGH)
_LN2_LOW = KernelConstant(LN2_LOW)
_C0, _C1, _C2, _C3, _C4, _C5 = map(KernelConstant, EXP_COEFFICIENTS)


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """NaN stays."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp(z):
    shifted = z * _LOG2_E + _ROUNDER
    k = shifted - _ROUNDER
    f = z - k * _LN2_HIGH
    f = f - k * _LN2_LOW
    polynomial = _C0 * f + _C1
    polynomial = polynomial * f + _C2
    polynomial = polynomial * f + _C3
    polynomial = polynomial * f + _C4
    polynomial = polynomial * f + _C5
    power = ((shifted.to(tl.int32, bitcast=True) - _ROUNDER_BITS + 127) << 23).to(tl.float32, bitcast=True)
    return (polynomial * (f * f) + f + 1.0) * power


@triton.jit
def _slope(square, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    """square * CUBIC + LINEAR, of a finite square; of a NaN, whatever: what it is multiplied by is NaN as well."""
    if CUBIC == 0.0:
        slope = tl.full(square.shape, LINEAR, tl.float32)
    else:
        slope = square * CUBIC + LINEAR
    return slope


@triton.jit
def _sigmoid(inside, square, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    # Times -1, for Triton negates by subtracting from 0.
    exponential = _exp(_clamped(inside * _slope(square, LINEAR, CUBIC), _EXP_LIMIT) * -1.0)
    return tl.div_rn(tl.full(exponential.shape, 1.0, tl.float32), exponential + 1.0)


@triton.jit
def _rounded(value, TYPE: tl.constexpr):
    """fp32 -> the nearest number of a type, in fp32; of NaNs any."""
    if TYPE == "bfloat16" and not _INTERPRETED:
        value = value.to(tl.bfloat16).to(tl.float32)
    else:
        value = _widen_bits(_narrow(value, TYPE), TYPE)
    return value


@triton.jit
def _rebuilt(
    codes_ptr, scales_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
    BITS: tl.constexpr, TYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    """The values of a tile in fp32, rounded to TYPE; those of fp16 within its range."""
    block = tl.arange(0, BLOCKS)
    block_exists = block < num_blocks - tl.program_id(0).to(num_blocks.dtype) * BLOCKS
    scales_ptr += tl.program_id(0).to(tl.int64) * BLOCKS
    scale = _widen(tl.load(scales_ptr + block, mask=block_exists, other=0))
    levels = _levels(
        codes_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, False, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    value = _rounded(levels * _spread(scale, BLOCKS, BLOCK_SIZE), TYPE)
    if TYPE == "float16":
        value = _clamped(value, 65504.0)
    return value


@triton.jit
def _activated(gate, sigmoid, TYPE: tl.constexpr):
    return _rounded(tl.maximum(gate, -_ACTIVATION_LIMIT, propagate_nan=tl.PropagateNan.ALL) * sigmoid, TYPE)


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_product_kernel(
    gate_codes_ptr, gate_scales_ptr, up_codes_ptr, up_scales_ptr, codes_per_row, length, num_blocks, blocks_per_row,
    product_ptr, table_ptr,
    LINEAR: tl.constexpr, CUBIC: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    row, column, exists = _tile(num_blocks, blocks_per_row, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    gate = _rebuilt(
        gate_codes_ptr, gate_scales_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, TYPE, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    up = _rebuilt(
        up_codes_ptr, up_scales_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, TYPE, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    inside = _clamped(gate, _ACTIVATION_LIMIT)
    sigmoid = _sigmoid(inside, inside * inside, LINEAR, CUBIC)
    activated = _activated(gate, sigmoid, TYPE)
    tl.store(product_ptr + row * length + column, _narrow(activated * up, TYPE), mask=exists)


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_backward_kernel(
    grad_ptr, gate_codes_ptr, gate_scales_ptr, up_codes_ptr, up_scales_ptr, codes_per_row, length, num_blocks,
    blocks_per_row, grad_gate_ptr, grad_up_ptr, table_ptr,
    LINEAR: tl.constexpr, CUBIC: tl.constexpr, THREE_CUBIC: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    row, column, exists = _tile(num_blocks, blocks_per_row, length, BLOCKS, BLOCK_SIZE, ONE_ROW)
    grad = _widen_bits(tl.load(grad_ptr + row * length + column, mask=exists, other=0), TYPE)
    gate = _rebuilt(
        gate_codes_ptr, gate_scales_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, TYPE, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    up = _rebuilt(
        up_codes_ptr, up_scales_ptr, codes_per_row, table_ptr, num_blocks, blocks_per_row, length,
        BITS, TYPE, BLOCK_SIZE, BLOCKS, ONE_ROW,
    )  # fmt: skip
    inside = _clamped(gate, _ACTIVATION_LIMIT)
    square = inside * inside
    sigmoid = _sigmoid(inside, square, LINEAR, CUBIC)
    activated = _activated(gate, sigmoid, TYPE)
    derivative = sigmoid * ((1.0 - sigmoid) * _slope(square, LINEAR, THREE_CUBIC) * inside + 1.0)
    grad_gate = _narrow(_rounded(grad * up, TYPE) * derivative, TYPE)
    tl.store(grad_gate_ptr + row * length + column, grad_gate, mask=exists)
    tl.store(grad_up_ptr + row * length + column, _narrow(grad * activated, TYPE), mask=exists)


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
    """`reference.gated_product_blockwise` in Triton, the same bits."""
    packed = gate_codes, gate_scales, up_codes, up_scales
    check_gated_product_blockwise(*packed, code, block_size, length, dtype, activation)
    product = gate_codes.new_empty((*gate_codes.shape[:-1], length), dtype=dtype)
    linear, cubic, _ = CURVES[activation]
    blocks, one_row = _TILE // block_size, length % block_size == 0
    if gate_scales.numel():
        with _on_device(gate_codes):
            _gated_product_kernel[(-(-gate_scales.numel() // blocks),)](
                *_pointers(packed), _TILE * BITS[code] // 8 if one_row else gate_codes.shape[-1],
                _TILE if one_row else length, gate_scales.numel(), 1 if one_row else -(-length // block_size),
                _bits(product), codebook_tensor(code, gate_codes.device),
                LINEAR=linear, CUBIC=cubic, BITS=BITS[code], TYPE=_name(dtype), BLOCK_SIZE=block_size, BLOCKS=blocks,
                ONE_ROW=one_row, enable_fp_fusion=False,
            )  # fmt: skip
    return product


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
    """`reference.gated_backward_blockwise` in Triton, the same bits."""
    packed = gate_codes, gate_scales, up_codes, up_scales
    check_gated_backward_blockwise(grad, *packed, code, block_size, activation)
    grad, length = grad.contiguous(), grad.shape[-1]
    grad_gate, grad_up = grad.new_empty(grad.shape), grad.new_empty(grad.shape)
    linear, cubic, three_cubic = CURVES[activation]
    blocks, one_row = _TILE // block_size, length % block_size == 0
    if gate_scales.numel():
        with _on_device(grad):
            _gated_backward_kernel[(-(-gate_scales.numel() // blocks),)](
                _bits(grad), *_pointers(packed), _TILE * BITS[code] // 8 if one_row else gate_codes.shape[-1],
                _TILE if one_row else length, gate_scales.numel(), 1 if one_row else -(-length // block_size),
                _bits(grad_gate), _bits(grad_up), codebook_tensor(code, grad.device),
                LINEAR=linear, CUBIC=cubic, THREE_CUBIC=three_cubic, BITS=BITS[code], TYPE=_name(grad.dtype),
                BLOCK_SIZE=block_size, BLOCKS=blocks, ONE_ROW=one_row, enable_fp_fusion=False,
            )  # fmt: skip
    return grad_gate, grad_up


def _pointers(packed: tuple[Tensor, ...]) -> list[Tensor]:
    """Codes and scales as kernels take them: contiguous, bf16 as its bits."""
    tensors = [tensor.contiguous() for tensor in packed]
    return [_bits(tensor) if tensor.dtype == torch.bfloat16 else tensor for tensor in tensors]
