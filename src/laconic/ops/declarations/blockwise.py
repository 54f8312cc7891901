"""Block-wise quantization: the declarations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.codebooks import BITS, scales_per_block
from laconic.ops.declarations.op import (
    DIRECT,
    DTYPES,
    Arguments,
    declare,
    is_direct,
    names,
    random_bytes,
    random_values,
)
from laconic.options import BLOCK_SIZES

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def check_format(code: str, block_size: int, scale_dtype: torch.dtype, scale_field: str = "scale_dtype") -> None:
    """Check what makes up a block-wise format.

    Args:
        code, block_size, scale_dtype: as in `laconic.ops.quantize_blockwise`.
        scale_field: the name an error gives the scale type.

    Raises:
        FormatError: one of them is not known; the message names the field, its value and the values allowed.
    """
    if code not in BITS:
        raise FormatError(f"code is {code!r}, but it must be one of {', '.join(BITS)}")
    if block_size not in BLOCK_SIZES:
        raise FormatError(f"block_size is {block_size!r}, but it must be one of {', '.join(map(str, BLOCK_SIZES))}")
    if scale_dtype not in DTYPES:
        raise FormatError(f"{scale_field} is {scale_dtype}, but it must be one of {names(DTYPES)}")


def check_center(center: Tensor | None, length: int, device: torch.device) -> None:
    """Raise FormatError for a center that does not fit rows of this length."""
    if center is None:
        return
    if center.dtype != torch.float32:
        raise FormatError(f"center.dtype is {center.dtype}, but it must be float32; convert center first")
    if center.dim() != 1 or center.shape[0] != length:
        raise FormatError(f"center has shape {tuple(center.shape)}, but for rows of length {length} it is ({length},)")
    if center.device != device:
        raise FormatError(f"center is on {center.device}, but what it is the center of is on {device}")


def check_quantize_blockwise(
    x: Tensor, code: str, block_size: int, scale_dtype: torch.dtype, center: Tensor | None = None
) -> tuple[int, int, int]:
    """Check the arguments of quantize_blockwise; return (length, codes per row, scales per row) of the last dimension.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_format(code, block_size, scale_dtype)
    if x.dtype not in DTYPES:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {names(DTYPES)}; convert x first")
    length = x.shape[-1] if x.dim() else 1
    check_center(center, length, x.device)
    return length, (length * BITS[code] + 7) // 8, (length + block_size - 1) // block_size * scales_per_block(code)


def check_multiply_quantize_blockwise(a: Tensor, b: Tensor) -> torch.Size:
    """Check that the factors of multiply_quantize_blockwise are alike, and return their shape.

    Its other arguments are quantize_blockwise's.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        raise FormatError(
            f"a is {a.dtype} {tuple(a.shape)} on {a.device}, but it must be like b, {b.dtype} {tuple(b.shape)} on"
            f" {b.device}"
        )
    return b.shape


def check_dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> tuple[int, ...]:
    """Check the arguments of dequantize_blockwise; return the shape of the values.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_format(code, block_size, scales.dtype, "scales.dtype")
    if dtype not in DTYPES:
        raise FormatError(f"dtype is {dtype}, but it must be one of {names(DTYPES)}")
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes.dtype is {codes.dtype}, but it must be uint8, as quantize_blockwise returns it")
    if codes.device != scales.device:
        raise FormatError(f"codes are on {codes.device} and scales on {scales.device}, but both must be on one device")
    if length < 0:
        raise FormatError(f"length is {length}, but it must be at least 0")
    if codes.dim() == 0 or codes.shape[:-1] != scales.shape[:-1] or codes.dim() != scales.dim():
        raise FormatError(
            f"codes have shape {tuple(codes.shape)} and scales {tuple(scales.shape)}, but they must have at least one"
            " dimension and agree in all but the last"
        )
    num_codes = (length * BITS[code] + 7) // 8
    num_scales = (length + block_size - 1) // block_size * scales_per_block(code)
    if codes.shape[-1] != num_codes or scales.shape[-1] != num_scales:
        raise FormatError(
            f"codes end in {codes.shape[-1]} and scales in {scales.shape[-1]}, but length {length} in {code} with"
            f" block_size {block_size} takes {num_codes} and {num_scales}"
        )
    check_center(center, length, codes.device)
    return (*codes.shape[:-1], length)


def _packed(
    x: Tensor, code: str, block_size: int, scale_dtype: torch.dtype, center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales without values."""
    _, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype, center)
    leading = x.shape[:-1]
    return x.new_empty((*leading, num_codes), dtype=torch.uint8), x.new_empty((*leading, num_scales), dtype=scale_dtype)


def _quantize_example(
    dtype: torch.dtype, code: str, block_size: int, scale_dtype: torch.dtype, has_seed: bool, is_centered: bool = False
) -> Arguments:
    center = (random_values(1024, seed=9),) if is_centered else ()
    return random_values(4, 1024).to(dtype), code, block_size, scale_dtype, 7 if has_seed else None, *center


_quantize_blockwise = declare(
    "quantize_blockwise(Tensor x, str code, int block_size, ScalarType scale_dtype, int? seed, Tensor? center=None)"
    " -> (Tensor codes, Tensor scales)",
    fake=lambda x, code, block_size, scale_dtype, seed, *center: _packed(x, code, block_size, scale_dtype, *center),
    example=_quantize_example,
    choices_of=lambda x, code, block_size, scale_dtype, seed, center=None: (
        (x.dtype, code, block_size, scale_dtype, seed is not None, center is not None)
    ),
    examples=[
        *((_BF16, code, 64, _BF16, False) for code in BITS),
        (_FP32, "nf4", 128, _FP32, True),
        (_FP32, "uint2", 256, _BF16, True),
        (_FP16, "int8", 16, _FP16, True),
        (_FP32, "nf4", 64, _BF16, False, True),
    ],
)


def quantize_blockwise(
    x: Tensor,
    *,
    code: str = "nf4",
    block_size: int = 64,
    scale_dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its last dimension, each with one scale.

    The result is not differentiable: neither output requires grad.

    Args:
        x: [..., L], float32, bfloat16 or float16, any strides; a 0-d tensor counts as [1].
        code: one of `BITS`, "nf4" or "int8", say; docs/formats.md has the levels and the bytes.
        block_size: 16, 32, 64, 128 or 256. Blocks never cross rows; the last block of a row may be shorter.
        scale_dtype: float32, bfloat16 or float16.
        seed: None rounds to nearest. An integer rounds stochastically, unbiased, with random numbers that depend on the
            seed and the element's linear index in x and on nothing else.
        center: fp32 [L], or None for zeros. What is quantized is fp32(x - center), in the same pass, so that values far
            from zero keep what tells them apart.

    Returns:
        Codes uint8 [..., ceil(L * bits / 8)] and scales [..., ceil(L / block_size)]; of uint2 twice as many, each
        block's step and minimum. A block that holds NaN or infinity, or whose scale overflows scale_dtype, gets scale
        NaN; a block whose scale is below 2**-126 gets scale 0.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise FormatError(f"seed is {seed}, but it must be None or fit in 64 bits, signed")
    run = DIRECT["quantize_blockwise"] if is_direct(x, center) else _quantize_blockwise
    codes, scales = run(x, code, block_size, scale_dtype, seed, center)
    return codes, scales


_multiply_quantize_blockwise = declare(
    "multiply_quantize_blockwise(Tensor a, Tensor b, str code, int block_size, ScalarType scale_dtype)"
    " -> (Tensor product, Tensor codes, Tensor scales)",
    fake=lambda a, b, *format: (b.new_empty(check_multiply_quantize_blockwise(a, b)), *_packed(b, *format)),
    example=lambda dtype, *format: (
        random_values(4, 1024, seed=8).to(dtype),
        random_values(4, 1024).to(dtype),
        *format,
    ),
    choices_of=lambda a, b, *format: (a.dtype, *format),
    examples=[*((_BF16, code, 64, _BF16) for code in BITS), (_FP32, "nf4", 128, _FP32), (_FP16, "int8", 16, _FP16)],
)


def multiply_quantize_blockwise(
    a: Tensor, b: Tensor, *, code: str = "nf4", block_size: int = 64, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """a * b, and `quantize_blockwise(b)` to nearest, in one pass that reads b once. No result requires grad.

    Args:
        a, b: [..., L], alike in shape, dtype and device; float32, bfloat16 or float16, any strides.
        code, block_size, scale_dtype: as in `quantize_blockwise`.

    Returns:
        The product [..., L] in the dtype of a and b, contiguous, with torch's own bits but for NaN, which is always the
        quiet one without a payload; codes and scales of b.

    Raises:
        FormatError: an argument is outside of these values.
    """
    run = DIRECT["multiply_quantize_blockwise"] if is_direct(a, b) else _multiply_quantize_blockwise
    product, codes, scales = run(a, b, code, block_size, scale_dtype)
    return product, codes, scales


def codes_example(code: str, block_size: int, scale_dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes and scales of 4 rows of 1024 values."""
    check_format(code, block_size, scale_dtype)
    num_scales = 1024 // block_size * scales_per_block(code)
    codes = random_bytes(4, 1024 * BITS[code] // 8, seed=seed)
    return codes, random_values(4, num_scales, seed=seed).to(scale_dtype)


def _dequantize_example(
    scale_dtype: torch.dtype, code: str, block_size: int, dtype: torch.dtype, is_centered: bool = False
) -> Arguments:
    center = (random_values(1024, seed=9),) if is_centered else ()
    return *codes_example(code, block_size, scale_dtype), code, block_size, 1024, dtype, *center


def _values(codes: Tensor, *arguments: Any) -> Tensor:
    """Values without values: what dequantize_blockwise returns, of the right shape."""
    return codes.new_empty(check_dequantize_blockwise(codes, *arguments), dtype=arguments[4])


_dequantize_blockwise = declare(
    "dequantize_blockwise(Tensor codes, Tensor scales, str code, int block_size, SymInt length, ScalarType dtype,"
    " Tensor? center=None) -> Tensor",
    fake=_values,
    example=_dequantize_example,
    choices_of=lambda codes, scales, code, block_size, length, dtype, center=None: (
        (scales.dtype, code, block_size, dtype, center is not None)
    ),
    examples=[
        *((_BF16, code, 64, _BF16) for code in BITS),
        (_FP32, "int8", 128, _FP32),
        (_BF16, "nf4", 64, _FP32, True),
    ],
)


_dequantize_blockwise_after = declare(
    "dequantize_blockwise_after(Tensor codes, Tensor scales, str code, int block_size, SymInt length, ScalarType dtype,"
    " Tensor after, Tensor? center=None) -> Tensor",
    fake=lambda *a: _values(*a[:6], *a[7:]),  # without `after`
    composed=lambda *a: _dequantize_blockwise(*a[:6], *a[7:]),
)


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    *,
    length: int,
    code: str = "nf4",
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    after: Tensor | None = None,
    center: Tensor | None = None,
) -> Tensor:
    """Turn codes and scales of `quantize_blockwise` back into values.

    Args:
        codes: uint8 [..., ceil(length * bits / 8)].
        scales: [..., ceil(length / block_size)], of uint2 twice as many; float32, bfloat16 or float16.
        length: size of the last dimension that was quantized.
        code, block_size: as given to quantize_blockwise.
        dtype: element type of the result: float32, bfloat16 or float16.
        after: any tensor. A graph traced by torch.compile computes the values after this tensor, never before: given
            the incoming gradient, backward rebuilds them when it gets there, and forward cannot save them instead of
            the codes. Outside of compilation it changes nothing.
        center: fp32 [length], or None for zeros; as given to quantize_blockwise.

    Returns:
        [..., length]: fp32(fp32(level * scale) + center), of uint2 fp32(fp32(minimum + fp32(code * step)) + center),
        rounded to nearest even to `dtype`. A block with scale NaN is all NaN.

    Raises:
        FormatError: an argument is outside of these values.
    """
    if after is not None and torch.compiler.is_compiling():
        return _dequantize_blockwise_after(codes, scales, code, block_size, length, dtype, after, center)
    run = DIRECT["dequantize_blockwise"] if is_direct(codes, scales, center) else _dequantize_blockwise
    values: Tensor = run(codes, scales, code, block_size, length, dtype, center)
    return values
