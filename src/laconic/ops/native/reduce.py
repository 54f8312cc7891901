"""Sums of quantized gradients on the CPU: `reference/reduce.py` in C++, the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.codebooks import codebook_tensor
from laconic.ops.declarations.reduce import check_sum_blockwise
from laconic.ops.native.library import ISA_NUMBERS, kernels

__all__ = ["sum_blockwise", "sum_requantize_blockwise"]


def sum_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    factor: float,
    *,
    isa: str | None = None,
) -> Tensor:
    """`reference.sum_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    _, length, _ = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    values = huge_pages.empty([length], torch.float32)
    _run(isa, codes, scales, residual_codes, residual_scales, factor, values, (None, None, None, None))
    return values


def sum_requantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    factor: float,
    *,
    isa: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.sum_requantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    _, length, num_blocks = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    has_residual = residual_codes is not None
    results = (
        huge_pages.empty([length], torch.uint8),
        torch.empty(num_blocks, dtype=torch.float32, device="cpu"),
        torch.empty((length + 1) // 2 if has_residual else 0, dtype=torch.uint8, device="cpu"),
        torch.empty(num_blocks if has_residual else 0, dtype=torch.float32, device="cpu"),
    )
    _run(isa, codes, scales, residual_codes, residual_scales, factor, None, results)
    return results


def _run(
    isa: str | None,
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    factor: float,
    values: Tensor | None,
    requantized: tuple[Tensor | None, ...],
) -> None:
    # Shards may be rows of a larger buffer, such as a received message.
    inputs = [_rows(codes), _rows(scales), _rows(residual_codes), _rows(residual_scales)]
    kernels.sum_blockwise(
        ISA_NUMBERS[isa], torch.get_num_threads(), codes.shape[0], codes.shape[1],
        [(x.data_ptr(), x.stride(0)) if x is not None else (0, 0) for x in inputs],
        codebook_tensor("int4", torch.device("cpu")).data_ptr(), factor, values.data_ptr() if values is not None else 0,
        [x.data_ptr() if x is not None else 0 for x in requantized],
    )  # fmt: skip


def _rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(1) == 1 else x.contiguous()
