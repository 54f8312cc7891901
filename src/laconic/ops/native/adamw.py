"""AdamW with 8-bit moments on the CPU: `reference/adamw.py` in C++, the same bits."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from laconic.ops.adamw_scalars import adamw_scalars
from laconic.ops.dynamic_map import dynamic_map_tensor
from laconic.ops.native.library import FLOAT_TYPES, isa_number, kernels
from laconic.ops.schemas import check_adamw8bit

__all__ = ["adamw8bit_"]

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
    dense = gradient_scales is None
    kernels().adamw8bit(
        isa_number(isa),
        torch.get_num_threads(),
        rows,
        length,
        parameter.data_ptr(),
        FLOAT_TYPES[parameter.dtype],
        [
            exp_avg_codes.data_ptr(),
            exp_avg_scales.data_ptr(),
            dynamic_map_tensor(True, _CPU).data_ptr(),
            exp_avg_sq_codes.data_ptr(),
            exp_avg_sq_scales.data_ptr(),
            dynamic_map_tensor(False, _CPU).data_ptr(),
        ],
        gradient.data_ptr() if dense else 0,
        FLOAT_TYPES[gradient.dtype] if dense else 0,
        [0 if dense else gradient.data_ptr(), *map(_address, (gradient_scales, residual_codes, residual_scales))],
        _address(gradient_factor),
        maximize,
        list(astuple(adamw_scalars(lr, beta1, beta2, eps, weight_decay, step))),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
