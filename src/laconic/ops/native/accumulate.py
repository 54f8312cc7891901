"""The gradient store on the CPU: `reference/accumulate.py` in C++, the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.declarations.accumulate import check_accumulate_blockwise_, check_square_sum_blockwise
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["accumulate_blockwise_", "square_sum_blockwise"]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient: Tensor,
    alpha: float,
    *,
    isa: str | None = None,
) -> None:
    """`reference.accumulate_blockwise_` in C++, the same bits; `isa` overrides the instruction set."""
    check_accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)
    gradient = gradient.contiguous()
    kernels.accumulate_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        codes.numel(), codes.data_ptr(), scales.data_ptr(), _address(residual_codes), _address(residual_scales),
        gradient.data_ptr(), FLOAT_TYPES[gradient.dtype], alpha,
    )  # fmt: skip


def square_sum_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    *,
    isa: str | None = None,
) -> Tensor:
    """`reference.square_sum_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    check_square_sum_blockwise(codes, scales, residual_codes, residual_scales)
    total = kernels.square_sum_blockwise(
        ISA_NUMBERS[isa],
        torch.get_num_threads(),
        codes.numel(),
        codes.data_ptr(),
        scales.data_ptr(),
        _address(residual_codes),
        _address(residual_scales),
    )
    return torch.tensor(total, dtype=torch.float64, device="cpu")
