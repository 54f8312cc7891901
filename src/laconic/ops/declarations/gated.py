"""The product of a gated feed-forward block, and its gradients, from codes of gate and up: the declarations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.codebooks import AFFINE
from laconic.ops.declarations.blockwise import check_dequantize_blockwise, codes_example
from laconic.ops.declarations.op import DIRECT, DTYPES, Arguments, declare, is_direct, names, random_values
from laconic.ops.gated_activations import CURVES

GATED_ACTIVATIONS = frozenset(CURVES)
"""Activations that the gated ops compute."""

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def check_gated_product_blockwise(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    activation: str,
) -> tuple[int, ...]:
    """Check the arguments of gated_product_blockwise; return the shape of the product.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    shape = check_dequantize_blockwise(gate_codes, gate_scales, code, block_size, length, dtype)
    if code in AFFINE:
        raise FormatError(f"code is {code!r}, but gated products read codes of 4 bits or more; dequantize gate and up")
    pairs = (("codes", gate_codes, up_codes), ("scales", gate_scales, up_scales))
    for name, gate, up in pairs:
        if up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
            raise FormatError(
                f"up_{name} are {up.dtype} {tuple(up.shape)} on {up.device}, but they must be like gate_{name},"
                f" {gate.dtype} {tuple(gate.shape)} on {gate.device}; pack both in one format"
            )
    if activation not in CURVES:
        raise FormatError(f"activation is {activation!r}, but it must be one of {', '.join(CURVES)}")
    return shape


def check_gated_backward_blockwise(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    activation: str,
) -> tuple[int, ...]:
    """Check the arguments of gated_backward_blockwise; return the shape of each gradient.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if grad.dim() == 0 or grad.device != gate_codes.device or grad.shape[:-1] != gate_codes.shape[:-1]:
        raise FormatError(
            f"grad has shape {tuple(grad.shape)} on {grad.device} and gate_codes {tuple(gate_codes.shape)} on"
            f" {gate_codes.device}, but both must be on one device, have at least one dimension and agree in all but"
            " the last"
        )
    if grad.dtype not in DTYPES:
        raise FormatError(f"grad.dtype is {grad.dtype}, but it must be one of {names(DTYPES)}")
    return check_gated_product_blockwise(
        gate_codes, gate_scales, up_codes, up_scales, code, block_size, grad.shape[-1], grad.dtype, activation
    )


def _codes_example(scale_dtype: torch.dtype, code: str) -> Arguments:
    return *codes_example(code, 64, scale_dtype, seed=1), *codes_example(code, 64, scale_dtype, seed=2)


def _product(gate_codes: Tensor, *arguments: Any) -> Tensor:
    return gate_codes.new_empty(check_gated_product_blockwise(gate_codes, *arguments), dtype=arguments[6])


def _gradients(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return grad.new_empty(check_gated_backward_blockwise(grad, *arguments)), grad.new_empty(grad.shape)


_gated_product_blockwise = declare(
    "gated_product_blockwise(Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales, str code,"
    " int block_size, SymInt length, ScalarType dtype, str activation) -> Tensor",
    fake=_product,
    example=lambda scale_dtype, code, dtype, activation: (
        (*_codes_example(scale_dtype, code), code, 64, 1024, dtype, activation)
    ),
    choices_of=lambda gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation: (
        (gate_scales.dtype, code, dtype, activation)
    ),
    examples=[(_BF16, "nf4", _BF16, "silu"), (_FP32, "int8", _FP32, "gelu_tanh")],
)


_gated_product_blockwise_after = declare(
    "gated_product_blockwise_after(Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales, str code,"
    " int block_size, SymInt length, ScalarType dtype, str activation, Tensor after) -> Tensor",
    fake=lambda *a: _product(*a[:-1]),
    composed=lambda *a: _gated_product_blockwise(*a[:-1]),
)


def gated_product_blockwise(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    *,
    length: int,
    activation: str,
    code: str = "nf4",
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    after: Tensor | None = None,
) -> Tensor:
    """activation(gate) * up from what `quantize_blockwise` made of gate and up; neither is written to memory.

    Args:
        gate_codes, up_codes: uint8 [..., ceil(length * bits / 8)].
        gate_scales, up_scales: [..., ceil(length / block_size)], float32, bfloat16 or float16, both alike.
        length: size of the last dimension that was quantized.
        activation: "silu", "quick_gelu" or "gelu_tanh".
        code, block_size: as given to quantize_blockwise.
        dtype: element type of the result: float32, bfloat16 or float16.
        after: as in `dequantize_blockwise`.

    Returns:
        [..., length]: the dequantized gate and up in `dtype` (fp16: within its range), the activation in fp32 rounded
        to `dtype`, and its product with up rounded to `dtype`. A block with scale NaN is all NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if after is not None and torch.compiler.is_compiling():
        return _gated_product_blockwise_after(
            gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation, after
        )
    tensors = gate_codes, gate_scales, up_codes, up_scales
    run = DIRECT["gated_product_blockwise"] if is_direct(*tensors) else _gated_product_blockwise
    product: Tensor = run(*tensors, code, block_size, length, dtype, activation)
    return product


_gated_backward_blockwise = declare(
    "gated_backward_blockwise(Tensor grad, Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales,"
    " str code, int block_size, str activation) -> (Tensor grad_gate, Tensor grad_up)",
    fake=_gradients,
    example=lambda dtype, scale_dtype, code, activation: (
        (random_values(4, 1024, seed=3).to(dtype), *_codes_example(scale_dtype, code), code, 64, activation)
    ),
    choices_of=lambda grad, gate_codes, gate_scales, up_codes, up_scales, code, block_size, activation: (
        (grad.dtype, gate_scales.dtype, code, activation)
    ),
    examples=[(_BF16, _BF16, "nf4", "silu"), (_FP16, _FP32, "int6", "quick_gelu")],
)


def gated_backward_blockwise(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    *,
    activation: str,
    code: str = "nf4",
    block_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, given that of activation(gate) * up: one pass, which rebuilds them in registers.

    Args:
        grad: [..., length], float32, bfloat16 or float16, any strides.
        gate_codes, gate_scales, up_codes, up_scales, activation, code, block_size: as in `gated_product_blockwise`.

    Returns:
        round(round(grad * up) * activation'(gate)) and round(grad * round(activation(gate))), both [..., length] in the
        dtype of grad, to which `round` rounds fp32. Any NaN becomes the quiet NaN without a payload.

    Raises:
        FormatError: an argument is outside of these values.
    """
    tensors = grad, gate_codes, gate_scales, up_codes, up_scales
    run = DIRECT["gated_backward_blockwise"] if is_direct(*tensors) else _gated_backward_blockwise
    grad_gate, grad_up = run(*tensors, code, block_size, activation)
    return grad_gate, grad_up
