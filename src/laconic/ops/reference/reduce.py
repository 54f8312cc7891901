"""Sums of quantized gradients: the specification.

Shards are 8-bit gradients (int8, blocks of 128, fp32 scales) or 12-bit ones (and an int4 code of what int8 lost).
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.reduce import check_sum_blockwise
from laconic.ops.reference.blockwise import dequantize_blockwise, quantize_blockwise

__all__ = ["sum_blockwise", "sum_requantize_blockwise"]

_NAN_BITS = 0x7FC00000


@torch.no_grad()
def sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> Tensor:
    """Dequantize shards and add them up; see `laconic.ops.sum_blockwise`.

    codes uint8 [W, n], scales fp32 [W, ceil(n / 128)], residual codes uint8 [W, ceil(n / 2)] and scales -> fp32 [n].
    """
    num_shards, length, _ = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    values = _dequantize(codes, scales, residual_codes, residual_scales, length)
    total = values[0]
    for shard in range(1, num_shards):
        total = total + values[shard]
    total = total * factor
    total.view(torch.int32).masked_fill_(total.isnan(), _NAN_BITS)
    return total


@torch.no_grad()
def sum_requantize_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize what `sum_blockwise` gives, in the shards' own format; see `laconic.ops.sum_requantize_blockwise`."""
    total = sum_blockwise(codes, scales, residual_codes, residual_scales, factor)
    block = GRADIENT_BLOCK_SIZE
    new_codes, new_scales = quantize_blockwise(total, "int8", block, torch.float32, None)
    if residual_codes is None:
        return new_codes, new_scales, codes.new_empty(0), scales.new_empty(0)
    rest = total - dequantize_blockwise(new_codes, new_scales, "int8", block, len(total), torch.float32)
    return new_codes, new_scales, *quantize_blockwise(rest, "int4", block, torch.float32, None)


def _dequantize(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, length: int
) -> Tensor:
    values = dequantize_blockwise(codes, scales, "int8", GRADIENT_BLOCK_SIZE, length, torch.float32)
    if residual_codes is None or residual_scales is None:
        return values
    return values + dequantize_blockwise(
        residual_codes, residual_scales, "int4", GRADIENT_BLOCK_SIZE, length, torch.float32
    )
