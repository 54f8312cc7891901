"""A relu whose backward reads one bit per value, and no tensor that is made of the bits.

torch's own backward takes a tensor: unpacked for it, a mask is written and read once more, as long as the gradient.
The gradient has the same bits, and it can be differentiated again: masking is linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.activations.host.streams import record_reader
from laconic.activations.host.traceable import direct_apply
from laconic.activations.keep.exact_codes import MemoryLayout
from laconic.ops import pack_bits, select_bits, unpack_bits
from laconic.ops.declarations.bits import MASK_DTYPES
from laconic.ops.derivatives import is_batched


def may_be_masked(x: Tensor, in_place: bool) -> bool:
    """Whether `masked_relu` takes this argument of a relu."""
    if type(x) is not Tensor or not x.requires_grad or x.dtype not in MASK_DTYPES:
        return False
    return not in_place or not (x.is_leaf or x._is_view())


def masked_relu(x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """`torch.relu(x)`, or in place `torch.relu_(x)`, which keeps for backward one bit per value of the result.

    Args:
        x: [...], a floating-point tensor for which `may_be_masked` holds.
        in_place: whether x becomes the result.

    Returns:
        The result, and the bits, uint8 [ceil(numel / 8)], in the order of the result in memory: one where a value is
        positive (or NaN), zero elsewhere.
    """
    bits: list[Tensor] = []
    result: Tensor = _apply_relu(x, in_place, bits)
    return result, bits[0]


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool, bits: list[Tensor]) -> Tensor:
        y = torch.relu_(x) if in_place else torch.relu(x)
        if in_place:
            ctx.mark_dirty(x)
            record_reader(x)
        ctx.layout = MemoryLayout.of(y)
        bits.append(pack_bits(ctx.layout.flatten(y)))  # not a result, which would be a node's in the graph
        ctx.save_for_backward(*bits)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else _masked(grad, ctx.saved_tensors[0], ctx.layout), None, None


_apply_relu = direct_apply(_Relu)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, codes: Tensor, layout: MemoryLayout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(codes)
        return _masked(grad, codes, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _masked(grad, ctx.saved_tensors[0], ctx.layout), None, None


def _masked(grad: Tensor, codes: Tensor, layout: MemoryLayout) -> Tensor:
    """The gradient [...] where the bit of a value is set, whose order in memory is that of `layout`; else zero."""
    if is_batched(grad):  # the operation on bits has no rule for that
        return grad * layout.unflatten(unpack_bits(codes, length=grad.numel()))
    if torch.is_grad_enabled():
        result: Tensor = _Masked.apply(grad, codes, layout)
        return result
    if grad.stride() == layout.stride and grad.dtype in MASK_DTYPES:
        return layout.unflatten(select_bits(layout.flatten(grad), codes))
    mask = layout.unflatten(unpack_bits(codes, length=grad.numel()))
    return torch.where(mask, grad, grad.new_zeros(()))
