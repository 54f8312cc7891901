"""CUDA: the Triton kernels, imported at the first call that needs them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from laconic.ops import reference
from laconic.ops.schemas import LIBRARY
from laconic.ops.selection import Selection, reference_is_forced, say_once

__all__ = ["selection"]


@cache
def selection() -> Selection:
    """What runs on CUDA tensors in this process."""
    if reference_is_forced():
        return Selection("reference", "", "LACONIC_KERNELS asks for it")
    if find_spec("triton") is None:
        return Selection("reference", "", "the package triton is not installed")
    return Selection("triton", "", "the package triton is installed")


@cache
def _kernels() -> ModuleType:
    chosen = selection()
    if chosen.implementation == "reference":
        say_once("cuda", chosen.reason)
        return reference
    from laconic.ops.triton import blockwise

    return blockwise


def _quantize_blockwise(
    x: Tensor, code: str, block_size: int, scale_dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _kernels().quantize_blockwise(x, code, block_size, scale_dtype, seed)
    return result


def _dequantize_blockwise(
    codes: Tensor, scales: Tensor, code: str, block_size: int, length: int, dtype: torch.dtype
) -> Tensor:
    result: Tensor = _kernels().dequantize_blockwise(codes, scales, code, block_size, length, dtype)
    return result


LIBRARY.impl("quantize_blockwise", _quantize_blockwise, "CUDA")
LIBRARY.impl("dequantize_blockwise", _dequantize_blockwise, "CUDA")
