"""Schema, argument check and fake (shape-only) implementation of every op, on one screen.

Kernels live elsewhere: `reference/` (plain torch, any device, the specification), `native/` (C++ on CPU), `triton/`
(CUDA). Each of them runs the check of this file first, so a bad argument is refused with the same words everywhere, and
no kernel sees a pointer that does not fit its sizes.

The ops carry no gradient: their outputs never require grad, whatever their inputs do. All are functional but those with
a trailing underscore.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from laconic.errors import FormatError
from laconic.ops.codebooks import AFFINE, BITS, BLOCK_SIZES, GRADIENT_BLOCK_SIZE, scales_per_block
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE
from laconic.ops.gated_activations import CURVES
from laconic.ops.lossless import CODES, HEADER_NBYTES, LAYOUTS, MAX_DIMS, dtype_names, max_nbytes

__all__ = [
    "DTYPES",
    "LIBRARY",
    "MASK_DTYPES",
    "AdamWTensors",
    "check_accumulate_blockwise_",
    "check_adamw8bit",
    "check_adamw8bit_multi",
    "check_dequantize_blockwise",
    "check_format",
    "check_gated_backward_blockwise",
    "check_gated_product_blockwise",
    "check_lossless_decode_",
    "check_lossless_decode_add_",
    "check_lossless_encode",
    "check_multiply_quantize_blockwise",
    "check_pack_bits",
    "check_quantize_blockwise",
    "check_select_bits",
    "check_separate",
    "check_square_sum_blockwise",
    "check_sum_blockwise",
    "check_sum_rows",
    "check_unpack_bits",
    "share_memory",
    "tensors_of_each",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types and scale types of the block-wise ops."""

MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Element types that pack_bits reads and unpack_bits writes."""

LIBRARY = torch.library.Library("laconic", "DEF")

LIBRARY.define(
    "quantize_blockwise(Tensor x, str code, int block_size, ScalarType scale_dtype, int? seed, Tensor? center=None)"
    " -> (Tensor codes, Tensor scales)",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "multiply_quantize_blockwise(Tensor a, Tensor b, str code, int block_size, ScalarType scale_dtype)"
    " -> (Tensor product, Tensor codes, Tensor scales)",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "dequantize_blockwise(Tensor codes, Tensor scales, str code, int block_size, SymInt length, ScalarType dtype,"
    " Tensor? center=None) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "dequantize_blockwise_after(Tensor codes, Tensor scales, str code, int block_size, SymInt length, ScalarType dtype,"
    " Tensor after, Tensor? center=None) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "gated_product_blockwise(Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales, str code,"
    " int block_size, SymInt length, ScalarType dtype, str activation) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "gated_product_blockwise_after(Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales, str code,"
    " int block_size, SymInt length, ScalarType dtype, str activation, Tensor after) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "gated_backward_blockwise(Tensor grad, Tensor gate_codes, Tensor gate_scales, Tensor up_codes, Tensor up_scales,"
    " str code, int block_size, str activation) -> (Tensor grad_gate, Tensor grad_up)",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "sum_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales, float factor)"
    " -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "sum_requantize_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales,"
    " float factor) -> (Tensor codes, Tensor scales, Tensor residual_codes, Tensor residual_scales)",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "accumulate_blockwise_(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? residual_codes,"
    " Tensor(d!)? residual_scales, Tensor gradient, float alpha) -> ()",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "square_sum_blockwise(Tensor codes, Tensor scales, Tensor? residual_codes, Tensor? residual_scales) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "adamw8bit_(Tensor(a!) parameter, Tensor(b!) exp_avg_codes, Tensor(c!) exp_avg_scales, Tensor(d!) exp_avg_sq_codes,"
    " Tensor(e!) exp_avg_sq_scales, Tensor gradient, Tensor? gradient_scales, Tensor? residual_codes,"
    " Tensor? residual_scales, Tensor? gradient_factor, float lr, float beta1, float beta2, float eps,"
    " float weight_decay, int step, bool maximize) -> ()",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "adamw8bit_multi_(Tensor(a!)[] parameters, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales,"
    " Tensor(d!)[] exp_avg_sq_codes, Tensor(e!)[] exp_avg_sq_scales, Tensor[] gradients, Tensor[] gradient_scales,"
    " Tensor[] residual_codes, Tensor[] residual_scales, Tensor? gradient_factor, float lr, float beta1, float beta2,"
    " float eps, float weight_decay, int step, bool maximize) -> ()",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define(
    "lossless_encode(Tensor x, str code, SymInt? capacity_nbytes) -> Tensor", tags=[torch.Tag.pt2_compliant_tag]
)
LIBRARY.define("lossless_decode_(Tensor(a!) out, Tensor message) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.define("lossless_decode_add_(Tensor(a!) total, Tensor message) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.define(
    "sum_rows(Tensor rows, Tensor index, Tensor offsets, Tensor? weights) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define("pack_bits(Tensor x) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
LIBRARY.define(
    "unpack_bits(Tensor codes, SymInt length, ScalarType dtype, float zero, float one) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.define("select_bits(Tensor x, Tensor codes) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
for _name in (
    "quantize_blockwise",
    "multiply_quantize_blockwise",
    "dequantize_blockwise",
    "dequantize_blockwise_after",
    "gated_product_blockwise",
    "gated_product_blockwise_after",
    "gated_backward_blockwise",
    "sum_blockwise",
    "sum_requantize_blockwise",
    "accumulate_blockwise_",
    "square_sum_blockwise",
    "adamw8bit_",
    "adamw8bit_multi_",
    "lossless_encode",
    "lossless_decode_",
    "lossless_decode_add_",
    "sum_rows",
    "pack_bits",
    "unpack_bits",
    "select_bits",
):
    LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


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
        raise FormatError(f"{scale_field} is {scale_dtype}, but it must be one of {_names(DTYPES)}")


def _check_center(center: Tensor | None, length: int, device: torch.device) -> None:
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
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {_names(DTYPES)}; convert x first")
    length = x.shape[-1] if x.dim() else 1
    _check_center(center, length, x.device)
    return length, (length * BITS[code] + 7) // 8, (length + block_size - 1) // block_size * scales_per_block(code)


def check_multiply_quantize_blockwise(a: Tensor, b: Tensor) -> None:
    """Check that the factors of multiply_quantize_blockwise are alike; its other arguments are quantize_blockwise's.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        raise FormatError(
            f"a is {a.dtype} {tuple(a.shape)} on {a.device}, but it must be like b, {b.dtype} {tuple(b.shape)} on"
            f" {b.device}"
        )


def check_dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> None:
    """Check the arguments of dequantize_blockwise.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_format(code, block_size, scales.dtype, "scales.dtype")
    if dtype not in DTYPES:
        raise FormatError(f"dtype is {dtype}, but it must be one of {_names(DTYPES)}")
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
    _check_center(center, length, codes.device)


def check_gated_product_blockwise(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    activation: str,
) -> None:
    """Check the arguments of gated_product_blockwise.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_dequantize_blockwise(gate_codes, gate_scales, code, block_size, length, dtype)
    if code in AFFINE:
        raise FormatError(f"code is {code!r}, but gated products read codes of 4 bits or more; dequantize gate and up")
    pairs = (("codes", gate_codes, up_codes), ("scales", gate_scales, up_scales))
    for name, gate, up in pairs:
        if up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
            raise FormatError(
                f"up_{name} are {up.dtype} {tuple(up.shape)} on {up.device}, but they must be like gate_{name},"
                f" {gate.dtype} {tuple(gate.shape)} on {gate.device}; pack both in one format"
            )
    if activation not in CURVES:
        raise FormatError(f"activation is {activation!r}, but it must be one of {', '.join(CURVES)}")


def check_gated_backward_blockwise(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    activation: str,
) -> None:
    """Check the arguments of gated_backward_blockwise.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if grad.dim() == 0 or grad.device != gate_codes.device or grad.shape[:-1] != gate_codes.shape[:-1]:
        raise FormatError(
            f"grad has shape {tuple(grad.shape)} on {grad.device} and gate_codes {tuple(gate_codes.shape)} on"
            f" {gate_codes.device}, but both must be on one device, have at least one dimension and agree in all but"
            " the last"
        )
    if grad.dtype not in DTYPES:
        raise FormatError(f"grad.dtype is {grad.dtype}, but it must be one of {_names(DTYPES)}")
    check_gated_product_blockwise(
        gate_codes, gate_scales, up_codes, up_scales, code, block_size, grad.shape[-1], grad.dtype, activation
    )


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


def check_square_sum_blockwise(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> None:
    """Check the parts of a stored gradient.

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
        raise FormatError(f"gradient.dtype is {gradient.dtype}, but it must be one of {_names(DTYPES)}")
    if gradient.numel() != codes.numel():
        raise FormatError(f"gradient has {gradient.numel()} elements, but the store has {codes.numel()}")
    if gradient.device != codes.device:
        raise FormatError(
            f"gradient is on {gradient.device} and codes on {codes.device}, but both must be on one device"
        )
    if not math.isfinite(alpha) or abs(alpha) > torch.finfo(torch.float32).max:
        raise FormatError(f"alpha is {alpha}, but it must be a finite fp32 number")


@torch.library.register_fake("laconic::quantize_blockwise", lib=LIBRARY)
def _quantize_blockwise_fake(
    x: Tensor,
    code: str,
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int | None,
    center: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype, center)
    leading = x.shape[:-1]
    return x.new_empty((*leading, num_codes), dtype=torch.uint8), x.new_empty((*leading, num_scales), dtype=scale_dtype)


@torch.library.register_fake("laconic::multiply_quantize_blockwise", lib=LIBRARY)
def _multiply_quantize_blockwise_fake(
    a: Tensor, b: Tensor, code: str, block_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    check_multiply_quantize_blockwise(a, b)
    return b.new_empty(b.shape), *_quantize_blockwise_fake(b, code, block_size, scale_dtype, None)


@torch.library.register_fake("laconic::dequantize_blockwise", lib=LIBRARY)
def _dequantize_blockwise_fake(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    center: Tensor | None = None,
) -> Tensor:
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype, center)
    return codes.new_empty((*codes.shape[:-1], length), dtype=dtype)


@torch.library.register_fake("laconic::dequantize_blockwise_after", lib=LIBRARY)
def _dequantize_blockwise_after_fake(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    after: Tensor,
    center: Tensor | None = None,
) -> Tensor:
    return _dequantize_blockwise_fake(codes, scales, code, block_size, length, dtype, center)


@torch.library.register_fake("laconic::gated_product_blockwise", lib=LIBRARY)
def _gated_product_blockwise_fake(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    check_gated_product_blockwise(
        gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation
    )
    return gate_codes.new_empty((*gate_codes.shape[:-1], length), dtype=dtype)


@torch.library.register_fake("laconic::gated_product_blockwise_after", lib=LIBRARY)
def _gated_product_blockwise_after_fake(
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    activation: str,
    after: Tensor,
) -> Tensor:
    return _gated_product_blockwise_fake(
        gate_codes, gate_scales, up_codes, up_scales, code, block_size, length, dtype, activation
    )


@torch.library.register_fake("laconic::gated_backward_blockwise", lib=LIBRARY)
def _gated_backward_blockwise_fake(
    grad: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    code: str,
    block_size: int,
    activation: str,
) -> tuple[Tensor, Tensor]:
    check_gated_backward_blockwise(grad, gate_codes, gate_scales, up_codes, up_scales, code, block_size, activation)
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape)


@torch.library.register_fake("laconic::sum_blockwise", lib=LIBRARY)
def _sum_blockwise_fake(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> Tensor:
    _, length, _ = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    return scales.new_empty(length)


@torch.library.register_fake("laconic::sum_requantize_blockwise", lib=LIBRARY)
def _sum_requantize_blockwise_fake(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, length, num_blocks = check_sum_blockwise(codes, scales, residual_codes, residual_scales)
    num_packed, num_residual_scales = ((length + 1) // 2, num_blocks) if residual_codes is not None else (0, 0)
    return (
        codes.new_empty(length),
        scales.new_empty(num_blocks),
        codes.new_empty(num_packed),
        scales.new_empty(num_residual_scales),
    )


@torch.library.register_fake("laconic::accumulate_blockwise_", lib=LIBRARY)
def _accumulate_blockwise_fake(
    codes: Tensor,
    scales: Tensor,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient: Tensor,
    alpha: float,
) -> None:
    check_accumulate_blockwise_(codes, scales, residual_codes, residual_scales, gradient, alpha)


@torch.library.register_fake("laconic::square_sum_blockwise", lib=LIBRARY)
def _square_sum_blockwise_fake(
    codes: Tensor, scales: Tensor, residual_codes: Tensor | None, residual_scales: Tensor | None
) -> Tensor:
    check_square_sum_blockwise(codes, scales, residual_codes, residual_scales)
    return codes.new_empty((), dtype=torch.float64)


def check_adamw8bit(
    parameter: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient_factor: Tensor | None,
    step: int,
) -> tuple[int, int]:
    """Check the arguments of adamw8bit_; return (rows, length of a row), the shape that blocks run along.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if parameter.dtype not in DTYPES:
        raise FormatError(f"parameter.dtype is {parameter.dtype}, but it must be one of {_names(DTYPES)}")
    if step < 1:
        raise FormatError(f"step is {step}, but it must be at least 1, the number of the first step")

    # 1. Moments: codes like the parameter, scales by row.
    rows = exp_avg_scales.shape[0] if exp_avg_scales.dim() == 2 else 0
    length = parameter.numel() // rows if rows else 0
    scales_shape = (rows, (length + STATE_BLOCK_SIZE - 1) // STATE_BLOCK_SIZE)
    if parameter.numel() != rows * length or (rows and exp_avg_scales.shape[1] != scales_shape[1]):
        raise FormatError(
            f"exp_avg_scales has shape {tuple(exp_avg_scales.shape)}, but for a parameter with {parameter.numel()}"
            f" elements it must be [rows, ceil(elements / rows / {STATE_BLOCK_SIZE})]"
        )
    n = parameter.numel()
    expected: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("exp_avg_codes", exp_avg_codes, tuple(parameter.shape), (torch.uint8,)),
        ("exp_avg_scales", exp_avg_scales, tuple(exp_avg_scales.shape), (torch.float32,)),
        ("exp_avg_sq_codes", exp_avg_sq_codes, tuple(parameter.shape), (torch.uint8,)),
        ("exp_avg_sq_scales", exp_avg_sq_scales, tuple(exp_avg_scales.shape), (torch.float32,)),
    ]

    # 2. The gradient: dense, or flat codes.
    num_scales = (n + GRADIENT_BLOCK_SIZE - 1) // GRADIENT_BLOCK_SIZE
    if gradient_scales is None:
        expected.append(("gradient", gradient, tuple(parameter.shape), DTYPES))
    else:
        expected.append(("gradient", gradient, (n,), (torch.uint8,)))
        expected.append(("gradient_scales", gradient_scales, (num_scales,), (torch.float32,)))
    if (residual_codes is None) != (residual_scales is None):
        raise FormatError("residual_codes and residual_scales belong together, but one of them is None")
    if residual_codes is not None and residual_scales is not None:
        if gradient_scales is None:
            raise FormatError("residual_codes is given for a dense gradient, but only a quantized one has a residual")
        expected.append(("residual_codes", residual_codes, ((n + 1) // 2,), (torch.uint8,)))
        expected.append(("residual_scales", residual_scales, (num_scales,), (torch.float32,)))
    if gradient_factor is not None:
        expected.append(("gradient_factor", gradient_factor, (), (torch.float32,)))

    # 3. Every tensor as the kernels read it.
    for name, tensor, shape, dtypes in expected:
        if tuple(tensor.shape) != shape:
            raise FormatError(f"{name} has shape {tuple(tensor.shape)}, but it must be {shape}")
        if tensor.dtype not in dtypes:
            raise FormatError(f"{name}.dtype is {tensor.dtype}, but it must be {_names(dtypes)}")
    for name, tensor in (("parameter", parameter), *((name, tensor) for name, tensor, *_ in expected)):
        if tensor.device != parameter.device:
            raise FormatError(f"{name} is on {tensor.device}, but it must be on {parameter.device}, as the parameter")
        if not tensor.is_contiguous():
            raise FormatError(
                f"{name} has strides {tensor.stride()}, but it must be contiguous; pass a contiguous copy"
            )
    return rows, length


@torch.library.register_fake("laconic::adamw8bit_", lib=LIBRARY)
def _adamw8bit_fake(
    parameter: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None,
    residual_codes: Tensor | None,
    residual_scales: Tensor | None,
    gradient_factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
) -> None:
    check_adamw8bit(
        parameter,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradient,
        gradient_scales,
        residual_codes,
        residual_scales,
        gradient_factor,
        step,
    )


AdamWTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The tensors of adamw8bit_ in its order, without gradient_factor."""


def tensors_of_each(*lists: list[Tensor]) -> list[AdamWTensors]:
    """The tensors of each parameter, of the nine lists of adamw8bit_multi_; an empty list is None for each."""
    columns: list[list[Tensor] | list[None]] = [tensors or [None] * len(lists[0]) for tensors in lists]
    return cast("list[AdamWTensors]", list(zip(*columns, strict=True)))


def check_adamw8bit_multi(
    parameters: list[Tensor],
    exp_avg_codes: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_codes: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    residual_codes: list[Tensor],
    residual_scales: list[Tensor],
    gradient_factor: Tensor | None,
    step: int,
) -> list[tuple[int, int]]:
    """Check the arguments of adamw8bit_multi_; return (rows, length of a row) of each parameter.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    count = len(parameters)
    lists = [
        ("exp_avg_codes", exp_avg_codes),
        ("exp_avg_scales", exp_avg_scales),
        ("exp_avg_sq_codes", exp_avg_sq_codes),
        ("exp_avg_sq_scales", exp_avg_sq_scales),
        ("gradients", gradients),
        ("gradient_scales", gradient_scales),
        ("residual_codes", residual_codes),
        ("residual_scales", residual_scales),
    ]
    for number, (name, tensors) in enumerate(lists):
        if len(tensors) != count and (tensors or number < 5):
            rule = f"{count}, one for each parameter" + ("" if number < 5 else ", or 0")
            raise FormatError(f"{name} has {len(tensors)} tensors, but it must have {rule}")
    shapes = []
    for index, each in enumerate(tensors_of_each(parameters, *(tensors for _, tensors in lists))):
        try:
            shapes.append(check_adamw8bit(*each, gradient_factor, step))
        except FormatError as error:
            raise FormatError(f"tensor {index}: {error}") from None
        for name, found, first in (
            ("parameter.dtype", each[0].dtype, parameters[0].dtype),
            ("parameter.device", each[0].device, parameters[0].device),
            ("gradient.dtype", each[5].dtype, gradients[0].dtype),
        ):
            if found != first:
                raise FormatError(
                    f"tensor {index}: {name} is {found}, but it must be {first}, as that of tensor 0; make one call"
                    " for each dtype and device"
                )
    return shapes


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether two of the tensors, of any strides, span a common byte; those without memory (meta, fake) share none."""
    spans = []
    for tensor in tensors:
        if (numel := tensor.numel()) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            last = numel - 1
            if not tensor.is_contiguous():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size()))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def check_separate(parameters: list[Tensor]) -> None:
    """Check that no two parameters of adamw8bit_multi_ share memory: a device updates them at the same time.

    Raises:
        FormatError: two do.
    """
    if share_memory(parameters):
        raise FormatError(
            "two of the parameters share memory, but a device updates all at once; make one call for each"
        )


@torch.library.register_fake("laconic::adamw8bit_multi_", lib=LIBRARY)
def _adamw8bit_multi_fake(
    parameters: list[Tensor],
    exp_avg_codes: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_codes: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    gradients: list[Tensor],
    gradient_scales: list[Tensor],
    residual_codes: list[Tensor],
    residual_scales: list[Tensor],
    gradient_factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
) -> None:
    check_adamw8bit_multi(
        parameters,
        exp_avg_codes,
        exp_avg_scales,
        exp_avg_sq_codes,
        exp_avg_sq_scales,
        gradients,
        gradient_scales,
        residual_codes,
        residual_scales,
        gradient_factor,
        step,
    )


def check_lossless_encode(x: Tensor, code: str, capacity_nbytes: int | None) -> int:
    """Check the arguments of lossless_encode; return how many bytes it returns.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if x.layout != torch.strided:
        raise FormatError(f"x.layout is {x.layout}, but it must be strided; encode its parts one by one")
    if x.dtype not in LAYOUTS:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {dtype_names()}; view other types as uint8")
    if code not in CODES:
        raise FormatError(f"code is {code!r}, but it must be one of {', '.join(CODES)}")
    num_dims = x.dim() + x.is_complex()
    if num_dims > MAX_DIMS:
        most = f"{MAX_DIMS - 1} of complex numbers" if x.is_complex() else str(MAX_DIMS)
        raise FormatError(f"x has {x.dim()} dimensions, but a message holds at most {most}; flatten x first")
    if capacity_nbytes is None:
        return max_nbytes(x.numel(), x.dtype)
    if capacity_nbytes < HEADER_NBYTES + 8 * num_dims:
        raise FormatError(
            f"capacity_nbytes is {capacity_nbytes}, but the header of a tensor of {x.dim()} dimensions takes"
            f" {HEADER_NBYTES + 8 * num_dims}; laconic.formats.lossless.max_nbytes is always enough"
        )
    return capacity_nbytes


def check_lossless_decode_(out: Tensor, message: Tensor, field: str = "out") -> None:
    """Check the arguments of lossless_decode_, not the message's bytes.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if out.dtype not in LAYOUTS:
        raise FormatError(f"{field}.dtype is {out.dtype}, but it must be one of {dtype_names()}")
    if out.layout != torch.strided or not out.is_contiguous():
        raise FormatError(f"{field} must be strided and contiguous, but its strides are not; decode into a new tensor")
    if message.dtype != torch.uint8 or message.dim() != 1 or not message.is_contiguous():
        raise FormatError(
            f"message is {message.dtype} with shape {tuple(message.shape)} and strides {message.stride()}, but it must"
            " be contiguous uint8 [nbytes]"
        )
    if message.device != out.device:
        raise FormatError(f"message is on {message.device} and {field} on {out.device}, but both must be on one device")


def check_lossless_decode_add_(total: Tensor, message: Tensor) -> None:
    """Check the arguments of lossless_decode_add_, not the message's bytes.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if total.dtype != torch.float32:
        raise FormatError(f"total.dtype is {total.dtype}, but sums are float32; convert total first")
    check_lossless_decode_(total, message, "total")


@torch.library.register_fake("laconic::lossless_encode", lib=LIBRARY)
def _lossless_encode_fake(x: Tensor, code: str, capacity_nbytes: int | None) -> Tensor:
    return x.new_empty(check_lossless_encode(x, code, capacity_nbytes), dtype=torch.uint8)


@torch.library.register_fake("laconic::lossless_decode_", lib=LIBRARY)
def _lossless_decode_fake(out: Tensor, message: Tensor) -> Tensor:
    check_lossless_decode_(out, message)
    return out.new_empty((), dtype=torch.int32)


@torch.library.register_fake("laconic::lossless_decode_add_", lib=LIBRARY)
def _lossless_decode_add_fake(total: Tensor, message: Tensor) -> Tensor:
    check_lossless_decode_add_(total, message)
    return total.new_empty((), dtype=torch.int32)


def check_sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> int:
    """Check the arguments of sum_rows but the values of index and offsets; return the number of sums.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if rows.dtype not in DTYPES:
        raise FormatError(f"rows.dtype is {rows.dtype}, but it must be one of {_names(DTYPES)}")
    if rows.dim() != 2:
        raise FormatError(f"rows have shape {tuple(rows.shape)}, but it must be [rows, width]")
    expected = [("index", index, torch.int64), ("offsets", offsets, torch.int64)]
    if weights is not None:
        expected.append(("weights", weights, torch.float32))
    for name, tensor, dtype in expected:
        if tensor.dtype != dtype:
            raise FormatError(f"{name}.dtype is {tensor.dtype}, but it must be {dtype}")
        if tensor.dim() != 1:
            raise FormatError(f"{name} have shape {tuple(tensor.shape)}, but it must be a vector")
        if tensor.device != rows.device:
            raise FormatError(f"rows are on {rows.device} and {name} on {tensor.device}, but all must be on one device")
    if not offsets.numel():
        raise FormatError("offsets are empty, but they begin with 0 and have one number more than there are sums")
    if weights is not None and weights.shape != index.shape:
        raise FormatError(f"there are {weights.numel()} weights, but {index.numel()} entries in index; give one each")
    return offsets.shape[0] - 1


@torch.library.register_fake("laconic::sum_rows", lib=LIBRARY)
def _sum_rows_fake(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(check_sum_rows(rows, index, offsets, weights), rows.shape[1])


def check_pack_bits(x: Tensor) -> int:
    """Check the argument of pack_bits; return the number of bytes.

    Raises:
        FormatError: it breaks its rule; the message names field, value and rule.
    """
    if x.layout != torch.strided:
        raise FormatError(f"x.layout is {x.layout}, but it must be strided; make x dense first")
    if x.dtype not in MASK_DTYPES:
        raise FormatError(f"x.dtype is {x.dtype}, but it must be one of {_names(MASK_DTYPES)}; pass x != 0 instead")
    return (x.numel() + 7) // 8


def check_unpack_bits(codes: Tensor, length: int, dtype: torch.dtype) -> None:
    """Check the arguments of unpack_bits.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if dtype not in MASK_DTYPES:
        raise FormatError(f"dtype is {dtype}, but it must be one of {_names(MASK_DTYPES)}")
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes.dtype is {codes.dtype}, but it must be uint8, as pack_bits returns it")
    if length < 0:
        raise FormatError(f"length is {length}, but it must be at least 0")
    if codes.dim() != 1 or codes.shape[0] != (length + 7) // 8:
        raise FormatError(f"codes have shape {tuple(codes.shape)}, but length {length} takes ({(length + 7) // 8},)")


def check_select_bits(x: Tensor, codes: Tensor) -> None:
    """Check the arguments of select_bits.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    check_pack_bits(x)
    check_unpack_bits(codes, x.numel(), x.dtype)
    if codes.device != x.device:
        raise FormatError(f"x is on {x.device} and codes on {codes.device}, but both must be on one device")


@torch.library.register_fake("laconic::pack_bits", lib=LIBRARY)
def _pack_bits_fake(x: Tensor) -> Tensor:
    return x.new_empty(check_pack_bits(x), dtype=torch.uint8)


@torch.library.register_fake("laconic::unpack_bits", lib=LIBRARY)
def _unpack_bits_fake(codes: Tensor, length: int, dtype: torch.dtype, zero: float, one: float) -> Tensor:
    check_unpack_bits(codes, length, dtype)
    return codes.new_empty(length, dtype=dtype)


@torch.library.register_fake("laconic::select_bits", lib=LIBRARY)
def _select_bits_fake(x: Tensor, codes: Tensor) -> Tensor:
    check_select_bits(x, codes)
    return x.new_empty(x.shape)
