"""Gated products and their gradients from codes on the CPU: `reference/gated.py` in C++, the same bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.codebooks import BITS
from laconic.ops.declarations.gated import check_gated_backward_blockwise, check_gated_product_blockwise
from laconic.ops.gated_activations import CURVES
from laconic.ops.native.blockwise import codebook_address
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["gated_backward_blockwise", "gated_product_blockwise"]


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
    *,
    isa: str | None = None,
) -> Tensor:
    """`reference.gated_product_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    packed = gate_codes, gate_scales, up_codes, up_scales
    check_gated_product_blockwise(*packed, code, block_size, length, dtype, activation)
    product = huge_pages.empty((*gate_codes.shape[:-1], length), dtype)
    _run(packed, code, block_size, activation, isa, None, product, None)
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
    *,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.gated_backward_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    packed = gate_codes, gate_scales, up_codes, up_scales
    check_gated_backward_blockwise(grad, *packed, code, block_size, activation)
    grad_gate, grad_up = (huge_pages.empty(grad.shape, grad.dtype) for _ in range(2))
    _run(packed, code, block_size, activation, isa, grad.contiguous(), grad_gate, grad_up)
    return grad_gate, grad_up


def _run(
    packed: tuple[Tensor, ...],
    code: str,
    block_size: int,
    activation: str,
    isa: str | None,
    grad: Tensor | None,
    first: Tensor,
    second: Tensor | None,
) -> None:
    """Write the product to `first`, or with `grad` the gradients of gate and up to `first` and `second`."""
    gate_codes, gate_scales, up_codes, up_scales = [tensor.contiguous() for tensor in packed]
    kernels.gated_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        (gate_codes.data_ptr(), gate_scales.data_ptr(), up_codes.data_ptr(), up_scales.data_ptr()),
        FLOAT_TYPES[gate_scales.dtype], math.prod(first.shape[:-1]), first.shape[-1], block_size,
        0 if grad is None else grad.data_ptr(), (first.data_ptr(), 0 if second is None else second.data_ptr()),
        FLOAT_TYPES[first.dtype], BITS[code], codebook_address(code), CURVES[activation],
    )  # fmt: skip
