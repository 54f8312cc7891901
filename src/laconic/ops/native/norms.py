"""RMS norms and their gradients on the CPU in C++, one pass over memory each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.native.library import FLOAT_TYPES, isa_number, kernels

__all__ = ["RMS_NORM_DTYPES", "rms_norm", "rms_norm_backward"]

RMS_NORM_DTYPES = frozenset({torch.float32, torch.bfloat16})
"""What x may be; torch's own steps are as fast in float16, which a CPU widens slowly."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, isa: str | None = None) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension.

    Args:
        x: [..., length], on the CPU, one of `RMS_NORM_DTYPES`.
        weight: [length], float32, bfloat16 or float16, or None.
        eps: added to the mean square.
        offset: added to the weight.
        isa: overrides the instruction set.

    Returns:
        [..., length] in the dtype of x, rounded once from fp32.
    """
    y = huge_pages.empty(x.shape, x.dtype)
    _run(x, weight, eps, offset, isa, None, y, None)
    return y


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    needs: tuple[bool, ...] = (True, True),
    isa: str | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `rms_norm` that `needs` asks for: of x in its dtype, of the weight in fp32.

    Args:
        grad: [..., length], in the dtype of x.
        x, weight, eps, offset, isa: as in `rms_norm`.
        needs: of which of x and weight a gradient is wanted; none is of a weight that is None.
    """
    grad_x = huge_pages.empty(x.shape, x.dtype) if needs[0] else None
    grad_weight = x.new_empty(x.shape[-1], dtype=torch.float32) if needs[1] and weight is not None else None
    _run(x, weight, eps, offset, isa, grad.contiguous(), grad_x, grad_weight)
    return grad_x, grad_weight


def _run(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    isa: str | None,
    grad: Tensor | None,
    result: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    kernels().rms_norm(
        isa_number(isa),
        torch.get_num_threads(),
        x.data_ptr(),
        FLOAT_TYPES[x.dtype],
        math.prod(x.shape[:-1]),
        x.shape[-1],
        0 if weight is None else weight.data_ptr(),
        0 if weight is None else FLOAT_TYPES[weight.dtype],
        eps,
        offset,
        0 if grad is None else grad.data_ptr(),
        0 if result is None else result.data_ptr(),
        0 if grad_weight is None else grad_weight.data_ptr(),
    )
