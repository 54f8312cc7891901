"""Block-wise quantization: the only part of laconic that talks to torch.library.

Two ops, each with a plain-torch reference that runs on every device and is the specification, C++ kernels for CPU and
Triton kernels for CUDA. All return the same bits. docs/formats.md has the layout byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import native, reference, triton
from laconic.ops.codebooks import BITS, BLOCK_SIZES, bits_of
from laconic.ops.schemas import DTYPES, LIBRARY
from laconic.ops.selection import say_once

__all__ = [
    "quantize_blockwise",
    "dequantize_blockwise",
    "kernels_in_use",
    "bits_of",
    "BITS",
    "BLOCK_SIZES",
    "DTYPES",
]


def _by_reference(op: str) -> Callable[..., Any]:
    """Plain torch for CPU tensors, saying so at the first call."""

    def call(*args: Any) -> Any:
        say_once("cpu", native.SELECTION.reason)
        return getattr(reference, op)(*args)

    return call


_on_cpu = native.SELECTION.implementation
# Each op by family: plain torch for any device, C++ for CPU, Triton for CUDA.
_FAMILIES = {
    "blockwise": ("quantize_blockwise", "dequantize_blockwise"),
}
for _family, _ops in _FAMILIES.items():
    for _op in _ops:
        LIBRARY.impl(_op, getattr(reference, _op), "CompositeExplicitAutograd")
        LIBRARY.impl(_op, getattr(native, _op) if _on_cpu == "c++" else _by_reference(_op), "CPU")
        triton.implement(_op, _family)

_quantize_blockwise = torch.ops.laconic.quantize_blockwise.default
_dequantize_blockwise = torch.ops.laconic.dequantize_blockwise.default


def quantize_blockwise(
    x: Tensor,
    *,
    code: str = "nf4",
    block_size: int = 64,
    scale_dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` in blocks along its last dimension, each with one scale.

    Arguments:
        x: [..., L], float32, bfloat16 or float16, any strides; a 0-d tensor counts as [1].
        code: "nf4", "e2m1", "int4" (two codes per byte, the even element in the low half) or "int8".
        block_size: 16, 32, 64, 128 or 256. Blocks never cross rows; the last block of a row may be shorter.
        scale_dtype: float32, bfloat16 or float16.
        seed: None rounds to nearest. An integer rounds stochastically, unbiased, with random numbers that depend on the
            seed and the element's linear index in x and on nothing else.

    Returns codes uint8 [..., ceil(L * bits / 8)] and scales [..., ceil(L / block_size)]. A block that holds NaN or
    infinity, or whose scale overflows scale_dtype, gets scale NaN; a block whose scale is below 2**-126 gets scale 0.
    Not differentiable: neither output requires grad.

    Raises FormatError for an argument outside these.
    """
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise FormatError(f"seed is {seed}, but it must be None or fit in 64 bits, signed")
    return _quantize_blockwise(x, code, block_size, scale_dtype, seed)


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    *,
    length: int,
    code: str = "nf4",
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Turn codes and scales of `quantize_blockwise` back into values.

    Arguments:
        codes: uint8 [..., ceil(length * bits / 8)].
        scales: [..., ceil(length / block_size)], float32, bfloat16 or float16.
        length: size of the last dimension that was quantized.
        code, block_size: as given to quantize_blockwise.
        dtype: element type of the result: float32, bfloat16 or float16.

    Returns [..., length]: fp32(level * scale), rounded to nearest even to `dtype`. A block with scale NaN is all NaN.

    Raises FormatError for an argument outside these.
    """
    return _dequantize_blockwise(codes, scales, code, block_size, length, dtype)


def kernels_in_use() -> dict[str, dict[str, str]]:
    """For each device type that has kernels: "implementation" ("c++", "triton" or "reference"), "isa", "reason"."""
    return {"cpu": asdict(native.SELECTION), "cuda": asdict(triton.selection())}
