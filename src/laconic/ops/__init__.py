"""Every op on quantized bytes: the only part of laconic that talks to torch.library.

`declarations/` says what each op is. Its plain-torch reference runs on every device and is the specification; there are
C++ kernels for CPU and Triton kernels for CUDA. All return the same bits. docs/formats.md has the layout byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from laconic.ops import native, reference, triton
from laconic.ops.codebooks import BITS, bits_of
from laconic.ops.declarations import DIRECT, DTYPES, OPS, implement
from laconic.ops.declarations.accumulate import accumulate_blockwise_, square_sum_blockwise
from laconic.ops.declarations.adamw import adamw8bit_, adamw8bit_multi_
from laconic.ops.declarations.bits import pack_bits, select_bits, unpack_bits
from laconic.ops.declarations.blockwise import dequantize_blockwise, multiply_quantize_blockwise, quantize_blockwise
from laconic.ops.declarations.gated import GATED_ACTIVATIONS, gated_backward_blockwise, gated_product_blockwise
from laconic.ops.declarations.linear import linear_blockwise
from laconic.ops.declarations.lossless import lossless_decode_, lossless_decode_add_, lossless_encode
from laconic.ops.declarations.reduce import sum_blockwise, sum_requantize_blockwise
from laconic.ops.declarations.rows import sum_rows
from laconic.ops.dynamic_map import STATE_BLOCK_SIZE
from laconic.ops.reference.adamw import dequantize_dynamic, quantize_dynamic
from laconic.ops.selection import warn_once
from laconic.ops.self_check import checked
from laconic.options import BLOCK_SIZES

__all__ = [
    "quantize_blockwise",
    "multiply_quantize_blockwise",
    "dequantize_blockwise",
    "gated_product_blockwise",
    "gated_backward_blockwise",
    "linear_blockwise",
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
    "quantize_dynamic",
    "dequantize_dynamic",
    "kernels_in_use",
    "bits_of",
    "BITS",
    "BLOCK_SIZES",
    "DTYPES",
    "GATED_ACTIVATIONS",
    "STATE_BLOCK_SIZE",
]


def _on_cpu(op: str) -> Callable[..., Any]:
    """What computes `op` on the CPU; a family without C++ kernels runs the reference."""
    specification: Callable[..., Any] = getattr(reference, op)
    if native.SELECTION.implementation == "c++":
        kernel = getattr(native, op, None)
        return checked(op, kernel) if kernel else specification

    def call(*arguments: Any) -> Any:
        warn_once("cpu", native.SELECTION.reason)
        return specification(*arguments)

    return call


for _op in OPS.values():
    implement(_op.name, getattr(reference, _op.name), "CompositeExplicitAutograd")
    DIRECT[_op.name] = _on_cpu(_op.name)
    implement(_op.name, DIRECT[_op.name], "CPU")
    triton.implement_on_cuda(_op.name, _op.family)


def kernels_in_use() -> dict[str, dict[str, str]]:
    """For each device type that has kernels: "implementation" ("c++", "triton" or "reference"), "isa", "reason"."""
    return {"cpu": asdict(native.SELECTION), "cuda": asdict(triton.selection())}
