"""What a reduction must return, from the reference ops and no process group."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.formats import QuantizedGradient
from laconic.ops import reference
from tests.ops.shards import shards_of


def mean_by_reference(shards: Tensor, bits: int, factor: float) -> tuple[Tensor, ...]:
    """shards [W, n] -> codes and scales (and residual) of their sum times factor; cutting into chunks cannot matter."""
    return reference.sum_requantize_blockwise(*shards_of(shards, bits), factor)


def value_of(parts: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes and scales, and at 12 bits those of the residual, as values [n]."""
    length = parts[0].numel()
    value = reference.dequantize_blockwise(parts[0], parts[1], "int8", 128, length, dtype)
    if parts[2].numel():
        value = value + reference.dequantize_blockwise(parts[2], parts[3], "int4", 128, length, dtype)
    return value


def gradient_of(x: Tensor, bits: int) -> QuantizedGradient:
    """x [...] as a stored gradient."""
    parts = [part if part is None else part[0] for part in shards_of(x.reshape(1, -1), bits)]
    return QuantizedGradient(x.shape, *parts)


def block_max(x: Tensor) -> Tensor:
    """For each element of x [W, n] the largest magnitude of its block of 128."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    largest = padded.view(len(x), -1, 128).abs().amax(-1, keepdim=True)
    return largest.expand(-1, -1, 128).reshape(len(x), -1)[:, : x.shape[1]]


def error_bound(shards: Tensor, *, gathered: bool, bits: int = 8) -> Tensor:
    """The bound of docs/gradients.md on the error of the mean of shards [W, n], per element [n], in fp64.

    `gathered`: whether the sum is quantized once more, as an all-reduce does.
    """
    exact = shards.double()
    world = len(exact)
    # Half a level, and what fp32 arithmetic adds, of a block's largest magnitude.
    step = ((0.5 if bits == 8 else 0.5 / 14) + 128 * 2.0**-23) / 127
    largest = block_max(exact).sum(0)
    rounding = (world + 2) * 2.0**-24 * largest * 1.01
    quantized = step * largest
    if gathered:
        quantized = quantized + step * (block_max(exact.sum(0, keepdim=True))[0] + quantized.max() + rounding)
    return (quantized + rounding) / world
