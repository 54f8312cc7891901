"""AdamW with 8-bit moments on the CPU: `reference/adamw.py` in C++, the same bits."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from laconic.ops.adamw_scalars import adamw_scalars
from laconic.ops.dynamic_map import dynamic_map_tensor
from laconic.ops.native.library import FLOAT_TYPES, isa_number, kernels
from laconic.ops.schemas import check_adamw8bit, check_adamw8bit_multi, check_separate, tensors_of_each

__all__ = ["adamw8bit_", "adamw8bit_multi_"]

_CPU = torch.device("cpu")


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
    *,
    isa: str | None = None,
) -> None:
    """`reference.adamw8bit_` in C++, the same bits; `isa` overrides the instruction set."""
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
    moments = (exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales)
    quantized = (gradient_scales, residual_codes, residual_scales)
    scalars = list(astuple(adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)))
    _update(isa_number(isa), rows, length, parameter, moments, gradient, quantized, gradient_factor, maximize, scalars)


def adamw8bit_multi_(
    parameters: list[Tensor],
    exp_avg_codes: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_codes: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    residual_codes: list[Tensor],
    residual_scales: list[Tensor],
    gradient_factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    *,
    isa: str | None = None,
) -> None:
    """`reference.adamw8bit_multi_` in C++, the same bits; `isa` overrides the instruction set."""
    shapes = check_adamw8bit_multi(
        parameters,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradients,
        gradient_scales,
        residual_codes,
        residual_scales,
        gradient_factor,
        step,
    )
    check_separate(parameters)
    number = isa_number(isa)
    scalars = list(astuple(adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)))
    each = tensors_of_each(
        parameters,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradients,
        gradient_scales,
        residual_codes,
        residual_scales,
    )
    for (rows, length), tensors in zip(shapes, each, strict=True):
        moments, gradient, quantized = tensors[1:5], tensors[5], tensors[6:]
        _update(number, rows, length, tensors[0], moments, gradient, quantized, gradient_factor, maximize, scalars)


def _update(
    isa: int,
    rows: int,
    length: int,
    parameter: Tensor,
    moments: tuple[Tensor, ...],
    gradient: Tensor,
    quantized: tuple[Tensor | None, ...],
    gradient_factor: Tensor | None,
    maximize: bool,
    scalars: list[float],
) -> None:
    dense = quantized[0] is None
    first_codes, first_scales, second_codes, second_scales = (moment.data_ptr() for moment in moments)
    signed, unsigned = (dynamic_map_tensor(signed, _CPU).data_ptr() for signed in (True, False))
    kernels().adamw8bit(
        isa,
        torch.get_num_threads(),
        rows,
        length,
        parameter.data_ptr(),
        FLOAT_TYPES[parameter.dtype],
        [first_codes, first_scales, signed, second_codes, second_scales, unsigned],
        gradient.data_ptr() if dense else 0,
        FLOAT_TYPES[gradient.dtype] if dense else 0,
        [0 if dense else gradient.data_ptr(), *map(_address, quantized)],
        _address(gradient_factor),
        maximize,
        scalars,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
