"""Sums of quantized gradients: the declarations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.accumulate import store_example
from laconic.ops.declarations.op import Arguments, declare


def check_sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> tuple[int, int, int]:
    """Check the arguments of sum_blockwise; return (number of shards, length, blocks per shard).

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if codes.dim() != 2 or codes.shape[0] == 0:
        raise FormatError(
            f"codes have shape {tuple(codes.shape)}, but it must be [shards, length] with a shard at least"
        )
    num_shards, length = codes.shape
    num_blocks = (length + GRADIENT_BLOCK_SIZE - 1) // GRADIENT_BLOCK_SIZE
    expected = [("codes", codes, torch.uint8, length), ("scales", scales, torch.float32, num_blocks)]
    if (residual_codes is None) != (residual_scales is None):
        missing = "residual_codes" if residual_codes is None else "residual_scales"
        raise FormatError(f"{missing} is None, but a residual is both codes and scales; pass both or neither")
    if residual_codes is not None and residual_scales is not None:
        expected.append(("residual_codes", residual_codes, torch.uint8, (length + 1) // 2))
        expected.append(("residual_scales", residual_scales, torch.float32, num_blocks))
    for name, tensor, dtype, columns in expected:
        if tensor.dtype != dtype:
            raise FormatError(f"{name}.dtype is {tensor.dtype}, but it must be {str(dtype).removeprefix('torch.')}")
        if tensor.device != codes.device:
            raise FormatError(
                f"codes are on {codes.device} and {name} on {tensor.device}, but all must be on one device"
            )
        if tensor.dim() != 2 or tensor.shape[0] != num_shards or tensor.shape[1] != columns:
            raise FormatError(
                f"{name} have shape {tuple(tensor.shape)}, but {num_shards} shards of {length} elements in blocks of"
                f" {GRADIENT_BLOCK_SIZE} take {(num_shards, columns)}"
            )
    return num_shards, length, num_blocks


def _example(has_residual: bool) -> Arguments:
    shards = [None if part is None else torch.stack([part, part.flip(0)]) for part in store_example(4096, has_residual)]
    return *shards, 0.5


def _requantized(codes: Tensor, scales: Tensor, *residual_and_factor: Any) -> tuple[Tensor, ...]:
    _, length, num_blocks = check_sum_blockwise(codes, scales, *residual_and_factor[:2])
    has_residual = residual_and_factor[0] is not None
    num_packed, num_residual_scales = ((length + 1) // 2, num_blocks) if has_residual else (0, 0)
    return (
        codes.new_empty(length),
        scales.new_empty(num_blocks),
        codes.new_empty(num_packed),
        scales.new_empty(num_residual_scales),
    )


_sum_blockwise = declare(
    "sum_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales, float factor)"
    " -> Tensor",
    fake=lambda *a: a[1].new_empty(check_sum_blockwise(*a[:4])[1]),
    example=_example,
    choices_of=lambda codes, scales, residual_codes, residual_scales, factor: (residual_codes is not None,),
    examples=[(False,), (True,)],
)


def sum_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    factor: float = 1.0,
) -> Tensor:
    """Dequantize W shards of a gradient and add them up in fp32, first to last, in one pass.

    Args:
        codes: uint8 [W, n], int8 codes in blocks of 128 along n; rows may lie apart.
        scales: fp32 [W, ceil(n / 128)].
        residual_codes, residual_scales: None at 8 bits; at 12 uint8 [W, ceil(n / 2)], int4 codes of what int8 lost, and
            fp32 [W, ceil(n / 128)].
        factor: what the sum is multiplied by, as fp32: 1 / W makes it the mean, exactly so when W is a power of two.

    Returns:
        fp32 [n]: fp32((v0 + v1 + ... ) * factor), every addition rounded to fp32, where v is fp32(code * scale), plus
        fp32(residual code * residual scale) at 12 bits. NaN where the scale of any shard is NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _sum_blockwise(codes, scales, residual_codes, residual_scales, factor)


_sum_requantize_blockwise = declare(
    "sum_requantize_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales,"
    " float factor) -> (Tensor codes, Tensor scales, Tensor residual_codes, Tensor residual_scales)",
    fake=_requantized,
    example=_example,
    choices_of=lambda codes, scales, residual_codes, residual_scales, factor: (residual_codes is not None,),
    examples=[(False,), (True,)],
)


def sum_requantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sum shards as `sum_blockwise` does and quantize the sum in their format, in one pass over the processor's cache.

    Arguments and errors are those of `sum_blockwise`.

    Returns:
        Codes uint8 [n], scales fp32 [ceil(n / 128)], and with a residual its codes uint8 [ceil(n / 2)] and scales fp32
        [ceil(n / 128)], else None twice.
    """
    *results, rest_codes, rest_scales = _sum_requantize_blockwise(
        codes, scales, residual_codes, residual_scales, factor
    )
    if residual_codes is None:
        return results[0], results[1], None, None
    return results[0], results[1], rest_codes, rest_scales
