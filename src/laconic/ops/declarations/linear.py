"""Rows times a matrix that is held as codes: the declaration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.codebooks import AFFINE
from laconic.ops.declarations.blockwise import check_dequantize_blockwise, codes_example
from laconic.ops.declarations.op import DIRECT, DTYPES, Arguments, declare, is_direct, names, random_values

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def check_linear_blockwise(x: Tensor, codes: Tensor, scales: Tensor, code: str, block_size: int) -> tuple[int, ...]:
    """Check the arguments of linear_blockwise; return the shape of the result.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if x.dtype not in DTYPES:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {names(DTYPES)}; convert x first")
    if x.dim() == 0 or codes.dim() != 2 or x.device != codes.device:
        raise FormatError(
            f"x has shape {tuple(x.shape)} on {x.device} and codes {tuple(codes.shape)} on {codes.device}, but x must"
            " have at least one dimension, codes the two of a matrix, and both must be on one device"
        )
    outputs, _ = check_dequantize_blockwise(codes, scales, code, block_size, x.shape[-1], torch.float32)
    if code in AFFINE:
        raise FormatError(f"code is {code!r}, but products read codes of 4 bits or more; dequantize the matrix")
    return (*x.shape[:-1], outputs)


def _example(dtype: torch.dtype, scale_dtype: torch.dtype, code: str) -> Arguments:
    return random_values(3, 1024, seed=3).to(dtype), *codes_example(code, 64, scale_dtype, seed=1), code, 64


def _products(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(check_linear_blockwise(x, *arguments))


_linear_blockwise = declare(
    "linear_blockwise(Tensor x, Tensor codes, Tensor scales, str code, int block_size) -> Tensor",
    fake=_products,
    example=_example,
    choices_of=lambda x, codes, scales, code, block_size: (x.dtype, scales.dtype, code),
    examples=[(_BF16, _BF16, "nf4"), (_FP32, _BF16, "int8"), (_FP16, _FP32, "int6")],
)


def linear_blockwise(x: Tensor, codes: Tensor, scales: Tensor, *, code: str = "nf4", block_size: int = 64) -> Tensor:
    """x @ matrix.T of what `quantize_blockwise` made of a matrix, which is not written to memory.

    It is for a few rows, whose product takes as long as reading the matrix: codes of 4 bits are a quarter of bfloat16's
    bytes. Products are made in fp32 on vector units, so from a few rows on it is faster to dequantize the matrix.
    The result is not differentiable: it never requires grad.

    Args:
        x: [..., length], float32, bfloat16 or float16, any strides.
        codes: uint8 [outputs, ceil(length * bits / 8)].
        scales: [outputs, ceil(length / block_size)], float32, bfloat16 or float16.
        code, block_size: as given to quantize_blockwise; not "int2".

    Returns:
        [..., outputs] in the dtype of x. Products of x and level * scale, both in fp32, are summed in fp32: product k
        to sum k % 64, in order; then the upper half of the sums is added to the lower until one is left. Any NaN
        becomes the quiet NaN without a payload.

    Raises:
        FormatError: an argument is outside of these values.
    """
    run = DIRECT["linear_blockwise"] if is_direct(x, codes, scales) else _linear_blockwise
    out: Tensor = run(x, codes, scales, code, block_size)
    return out
