"""The gradient store: the declarations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.op import DTYPES, declare, names, random_bytes, random_values


def check_square_sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> tuple[()]:
    """Check the parts of a stored gradient; return the shape of a sum over it.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if (residual_codes is None) != (residual_scales is None):
        raise FormatError("residual_codes and residual_scales must both be given (12 bits) or both be None (8 bits)")
    length = codes.numel()
    num_blocks = -(-length // GRADIENT_BLOCK_SIZE)
    parts = [("codes", codes, torch.uint8, length), ("scales", scales, torch.float32, num_blocks)]
    if residual_codes is not None and residual_scales is not None:
        parts.append(("residual_codes", residual_codes, torch.uint8, (length + 1) // 2))
        parts.append(("residual_scales", residual_scales, torch.float32, num_blocks))
    for name, part, dtype, numel in parts:
        if part.dtype != dtype:
            raise FormatError(f"{name}.dtype is {part.dtype}, but it must be {dtype}")
        if part.dim() != 1 or part.shape[0] != numel or not part.is_contiguous():
            raise FormatError(
                f"{name} have shape {tuple(part.shape)} and strides {part.stride()}, but {length} elements in blocks of"
                f" {GRADIENT_BLOCK_SIZE} take a contiguous ({numel},)"
            )
        if part.device != codes.device:
            raise FormatError(f"{name} are on {part.device} and codes on {codes.device}, but all must be on one device")
    return ()


def check_accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient: Tensor,
    alpha: float,
) -> None:
    """Check the arguments of accumulate_blockwise_.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_square_sum_blockwise(codes, scales, residual_codes, residual_scales)
    if gradient.layout != torch.strided:
        raise FormatError(
            f"gradient.layout is {gradient.layout}, but it must be strided; use sparse=False where it is made"
        )
    if gradient.dtype not in DTYPES:
        raise FormatError(f"gradient.dtype is {gradient.dtype}, but it must be one of {names(DTYPES)}")
    if gradient.numel() != codes.numel():
        raise FormatError(f"gradient has {gradient.numel()} elements, but the store has {codes.numel()}")
    if gradient.device != codes.device:
        raise FormatError(
            f"gradient is on {gradient.device} and codes on {codes.device}, but both must be on one device"
        )
    if not math.isfinite(alpha) or abs(alpha) > torch.finfo(torch.float32).max:
        raise FormatError(f"alpha is {alpha}, but it must be a finite fp32 number")


def store_example(n: int, has_residual: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A stored gradient of n elements, in 8 or 12 bits."""
    num_blocks = -(-n // GRADIENT_BLOCK_SIZE)
    codes, scales = random_bytes(n), random_values(num_blocks, seed=1).abs()
    if not has_residual:
        return codes, scales, None, None
    return codes, scales, random_bytes(n // 2, seed=2), random_values(num_blocks, seed=3).abs() * 0.01


_accumulate_blockwise_ = declare(
    "accumulate_blockwise_(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? residual_codes,"
    " Tensor(d!)? residual_scales, Tensor gradient, float alpha) -> ()",
    fake=check_accumulate_blockwise_,
    example=lambda has_residual, dtype: (
        (*store_example(4096, has_residual), random_values(4096, seed=4).to(dtype), 0.5)
    ),
    choices_of=lambda codes, scales, residual_codes, residual_scales, gradient, alpha: (
        (residual_codes is not None, gradient.dtype)
    ),
    examples=[(False, torch.bfloat16), (True, torch.float32)],
)


def accumulate_blockwise_(
    codes: Tensor,
    scales: Tensor,
    gradient: Tensor,
    *,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    alpha: float = 1.0,
) -> None:
    """Add alpha * gradient to a gradient stored in 8 or 12 bits, in place and in one pass.

    In fp32: value = code * scale + residual code * residual scale + alpha * gradient, each operation rounded, is
    quantized to int8 in blocks of 128; at 12 bits what is left of value is quantized to int4 in blocks of 128. A block
    that met NaN or infinity has scale NaN from then on.

    Args:
        codes: uint8 [n], int8 in two's complement. Zeros are the empty store.
        scales: fp32 [ceil(n / 128)].
        gradient: n elements of any shape and strides, taken in contiguous order; float32, bfloat16 or float16.
        residual_codes: uint8 [ceil(n / 2)], int4; None at 8 bits.
        residual_scales: fp32 [ceil(n / 128)]; None at 8 bits.
        alpha: a finite fp32 number.

    Raises:
        FormatError: an argument is outside of these values.
    """
    _accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)


_square_sum_blockwise = declare(
    "square_sum_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales) -> Tensor",
    fake=lambda *a: a[0].new_empty(check_square_sum_blockwise(*a), dtype=torch.float64),
    example=lambda has_residual: store_example(4096, has_residual),
    choices_of=lambda codes, scales, residual_codes, residual_scales: (residual_codes is not None,),
    examples=[(False,), (True,)],
)


def square_sum_blockwise(
    codes: Tensor, scales: Tensor, *, residual_codes: Tensor | None = None, residual_scales: Tensor | None = None
) -> Tensor:
    """The sum of squares of a gradient stored in 8 or 12 bits, without its values in memory.

    Sums within a block are exact integers; blocks are added in fp64 as a binary tree over neighbours, so that the
    result has the same bits for any number of threads and on every device. Arguments are those of
    `accumulate_blockwise_`.

    Returns:
        A 0-d fp64 tensor on the same device; NaN where a scale is NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    return _square_sum_blockwise(codes, scales, residual_codes, residual_scales)
