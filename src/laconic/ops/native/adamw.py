"""AdamW with moments in 8 or 4 bits on the CPU: `reference/adamw.py` in C++, the same bits."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from laconic.ops.declarations.adamw import checked_step
from laconic.ops.dynamic_map import dynamic_map_tensor
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["adamw8bit_multi_"]

_CPU = torch.device("cpu")


def adamw8bit_multi_(*arguments: Any, isa: str | None = None) -> None:
    """`reference.adamw8bit_multi_` in C++, the same bits; `isa` overrides the instruction set."""
    step = checked_step(*arguments)
    number, update, factor = ISA_NUMBERS[isa], kernels.adamw8bit, _address(step.gradient_factor)
    scalars = list(astuple(step.scalars))
    signed, unsigned = (dynamic_map_tensor(signed, _CPU, step.bits).data_ptr() for signed in (True, False))
    for tensors, (rows, length) in zip(step.each, step.shapes, strict=True):
        parameter, *moments, gradient, _, _, _ = tensors
        first_codes, first_scales, second_codes, second_scales = map(_address, moments)
        dense = tensors.gradient_scales is None
        update(
            number, torch.get_num_threads(), rows, length, step.bits,
            parameter.data_ptr(), FLOAT_TYPES[parameter.dtype],
            [first_codes, first_scales, signed, second_codes, second_scales, unsigned],
            gradient.data_ptr() if dense else 0, FLOAT_TYPES[gradient.dtype] if dense else 0,
            [0 if dense else gradient.data_ptr(), *map(_address, tensors[6:])], factor, step.maximize, scalars,
        )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
