"""Rows times a matrix that is held as codes: the specification.

Sums run in lanes, so that every kernel can add whole vectors and still make the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops.declarations.linear import check_linear_blockwise
from laconic.ops.reference.blockwise import dequantize_blockwise

__all__ = ["linear_blockwise"]

SUMS = 64


@torch.no_grad()
def linear_blockwise(x: Tensor, codes: Tensor, scales: Tensor, code: str, block_size: int) -> Tensor:
    """x @ matrix.T [..., outputs]; see `laconic.ops.linear_blockwise`."""
    shape, length = check_linear_blockwise(x, codes, scales, code, block_size), x.shape[-1]
    matrix = dequantize_blockwise(codes, scales, code, block_size, length, torch.float32)
    rows = x.reshape(math.prod(shape[:-1]), 1, length).float()
    sums = matrix.new_zeros(len(rows), len(matrix), SUMS)
    for start in range(0, length, SUMS):
        products = rows[..., start : start + SUMS] * matrix[:, start : start + SUMS]
        sums[..., : products.shape[-1]] += products
    while sums.shape[-1] > 1:
        lower, upper = sums.chunk(2, dim=-1)
        sums = lower + upper
    result = sums.to(x.dtype).masked_fill_(sums.isnan(), float("nan"))
    return result.view(shape)
