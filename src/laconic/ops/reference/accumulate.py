"""The gradient store: the specification.

A gradient of n elements is flat: int8 codes in blocks of 128 with fp32 scales and, in 12 bits, int4 codes in blocks of
128 with fp32 scales of what int8 lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.accumulate import check_accumulate_blockwise_, check_square_sum_blockwise
from laconic.ops.reference.blockwise import dequantize_blockwise, quantize_blockwise

__all__ = ["accumulate_blockwise_", "square_sum_blockwise"]


@torch.no_grad()
def accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient: Tensor,
    alpha: float,
) -> None:
    """Add alpha * gradient to the store, in place; see `laconic.ops.accumulate_blockwise_`."""
    check_accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)
    length = codes.numel()
    value = dequantize_blockwise(codes, scales, "int8", GRADIENT_BLOCK_SIZE, length, torch.float32)
    if residual_codes is not None and residual_scales is not None:
        value += dequantize_blockwise(
            residual_codes, residual_scales, "int4", GRADIENT_BLOCK_SIZE, length, torch.float32
        )
    value += gradient.reshape(length).float() * torch.tensor(alpha, dtype=torch.float32, device="cpu")

    new_codes, new_scales = quantize_blockwise(value, "int8", GRADIENT_BLOCK_SIZE, torch.float32, None)
    codes.copy_(new_codes)
    scales.copy_(new_scales)
    if residual_codes is not None and residual_scales is not None:
        value -= dequantize_blockwise(codes, scales, "int8", GRADIENT_BLOCK_SIZE, length, torch.float32)
        new_codes, new_scales = quantize_blockwise(value, "int4", GRADIENT_BLOCK_SIZE, torch.float32, None)
        residual_codes.copy_(new_codes)
        residual_scales.copy_(new_scales)


@torch.no_grad()
def square_sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> Tensor:
    """The sum of squares of a stored gradient, fp64; see `laconic.ops.square_sum_blockwise`."""
    check_square_sum_blockwise(codes, scales, residual_codes, residual_scales)
    # 1. Whole numbers within a block: at most 128 * 128**2, so neither int32 nor fp64 rounds them.
    main = _blocks(codes.view(torch.int8))
    scale = scales.double()
    squares = scale * scale * (main * main).sum(-1)
    # 2. (m * s + r * t)**2 = s*s * m*m + 2*s*t * m*r + t*t * r*r, again with whole numbers inside.
    if residual_codes is not None and residual_scales is not None:
        pairs = torch.stack((residual_codes & 15, residual_codes >> 4), dim=-1).flatten()[: codes.numel()].int()
        rest = _blocks(torch.where(pairs < 8, pairs, pairs - 16))
        rest_scale = residual_scales.double()
        squares = squares + 2.0 * scale * rest_scale * (main * rest).sum(-1)
        squares = squares + rest_scale * rest_scale * (rest * rest).sum(-1)
    return _tree_sum(squares)


def _tree_sum(values: Tensor) -> Tensor:
    """The sum of `values` [n] as a binary tree over neighbours: the same bits however the work is divided."""
    if values.numel() == 0:
        return values.new_zeros(())
    while values.numel() > 1:
        values = torch.nn.functional.pad(values, (0, values.numel() % 2))
        values = values[0::2] + values[1::2]
    return values.view(())


def _blocks(integers: Tensor) -> Tensor:
    """[n] -> int32 [ceil(n / 128), 128], filled up with zeros."""
    padding = -integers.numel() % GRADIENT_BLOCK_SIZE
    return torch.nn.functional.pad(integers.int(), (0, padding)).view(-1, GRADIENT_BLOCK_SIZE)
