"""Norms computed again on the CPU, and their gradients, in C++.

They are no ops of torch's: who calls them has plain torch (activations/backward/norms.py), which on CUDA calls torch's
own fused kernels in their place, and which compiled graphs are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels

__all__ = ["norm", "norm_backward"]


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    unit_offset: bool,
    isa: str | None = None,
) -> Tensor:
    """Rows over the root of their mean square plus eps, in fp32.

    Args:
        x: [..., features], float32, bfloat16 or float16, not empty. Like all tensors here, one of which `is_memory`.
        weight, bias: [features] in the dtype of x, or None.
        eps: added to the mean square.
        centered: the mean of a row is subtracted first.
        unit_offset: the weight is one more than is stored.
        isa: overrides the instruction set; all give the same bits.

    Returns:
        [..., features] in the dtype of x.
    """
    out = huge_pages.empty(x.shape, x.dtype)
    _run((x, weight, bias, None), (out, None, None), eps, (centered, unit_offset), isa)
    return out


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    needs: tuple[bool, ...],
    *,
    centered: bool,
    unit_offset: bool,
    isa: str | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `norm` by x, weight and bias in their dtype, of those that are needed.

    Those of weight and bias are sums over parts of the rows, the same ones with any number of threads.

    Args:
        grad: [..., features] in the dtype of x.
        x, weight, bias, eps, centered, unit_offset, isa: as in `norm`.
        needs: of which of x, weight and bias a gradient is wanted.
    """
    of_x = huge_pages.empty(x.shape, x.dtype) if needs[0] else None
    of_weight, of_bias = [
        torch.empty_like(p, requires_grad=False) if p is not None and needed else None
        for p, needed in zip((weight, bias), needs[1:], strict=True)
    ]
    _run((x, weight, bias, grad), (of_x, of_weight, of_bias), eps, (centered, unit_offset), isa)
    return of_x, of_weight, of_bias


def _run(
    given: tuple[Tensor | None, ...],
    results: tuple[Tensor | None, ...],
    eps: float,
    which: tuple[bool, bool],
    isa: str | None,
) -> None:
    """Write results for x, weight, bias and a gradient, of the norm that is or is not (centered, with unit offset)."""
    given = tuple([None if tensor is None else tensor.contiguous() for tensor in given])
    x = given[0]
    assert x is not None
    length, (centered, unit_offset) = x.shape[-1], which
    x_address, weight, bias, grad, *addresses = [
        0 if tensor is None else tensor.data_ptr() for tensor in (*given, *results)
    ]
    kernels.norm(
        ISA_NUMBERS[isa], torch.get_num_threads(), x_address, FLOAT_TYPES[x.dtype], x.numel() // length, length,
        weight, bias, unit_offset, centered, eps, grad, *addresses,
    )  # fmt: skip
