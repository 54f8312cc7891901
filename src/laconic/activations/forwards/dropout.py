"""Dropout that keeps its mask in one bit per value.

Dropout's backward multiplies by the noise of its forward. torch saves that noise as it was drawn: a number of the
input's dtype per value on CPUs, a byte on GPUs. It has two values only, so a bit is enough, and gradients stay exactly
what they were. The module's own code runs and draws; what it saves for backward is taken out of autograd's hands.

If the input can be rebuilt (an activation in front of it, say), so can the output: the rebuilt input times the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.backward.derivatives import derivative
from laconic.activations.forwards.base import SiteForward
from laconic.activations.host.tracker import observe
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import attach, derive, found
from laconic.activations.recognize.sites import Site
from laconic.activations.recognize.trial import ForwardCode
from laconic.ops import pack_bits, unpack_bits


def unpack_mask(bits: Tensor, shape: torch.Size) -> Tensor:
    """The bool mask of this shape that `pack_bits` packed."""
    return unpack_bits(bits, length=shape.numel()).view(shape)


def dropout(x: Tensor, p: float, run: Callable[[], Tensor]) -> Tensor:
    """`run()`, which is dropout of x, with a backward that saves the mask in bits.

    Args:
        x: floating-point tensor of any shape that requires a gradient.
        p: the rate, between 0 and 1 without both.
        run: the code that computes dropout of x, drawing as always.

    Returns:
        The value of `run()`; exactly its own graph if what it saved is not the noise of dropout.
    """
    saved: list[Tensor] = []

    def catch(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(catch, lambda tensor: tensor):
        y = run()
    noise = saved[0] if len(saved) == 1 else None
    if noise is None or noise.shape != x.shape or noise.dtype not in (torch.bool, x.dtype):
        observe(*saved)
        return y
    # The very operation by which torch makes the noise of a value that stays: bits have to be equal.
    factor = torch.ones((), dtype=x.dtype, device=x.device).div_(1 - p) if noise.dtype != torch.bool else 1 / (1 - p)
    bits, kept = pack_bits(noise), found(x)
    dropped: Tensor = _Dropout.apply(x, y.detach(), factor, bits)
    if kept is not None:
        shape = x.shape

        def again(value: Tensor, bits: Tensor) -> Tensor:
            return value * unpack_mask(bits, shape).to(value.dtype).mul_(factor)

        attach(dropped, derive(again, (kept,), (bits,), kept.origin))
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: Tensor | float, bits: Tensor) -> Tensor:
        ctx.factor, ctx.shape, ctx.origin = factor, x.shape, "dropout"
        ctx.save_for_backward(bits)
        return value.detach()

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        mask = unpack_mask(bits, ctx.shape)
        if isinstance(ctx.factor, float):
            return torch.ops.aten.native_dropout_backward(grad, mask, ctx.factor), None, None, None
        return grad * mask.to(grad.dtype).mul_(ctx.factor), None, None, None


class DropoutForward(SiteForward):
    """Runs the module's own dropout and keeps its mask in bits."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.code = ForwardCode(type(module))

    def keeps(self, x: Tensor) -> bool:
        """Whether the call draws a mask that backward needs; compiled graphs have their own dropout."""
        module = self.module
        assert isinstance(module, nn.Dropout)
        drops = module.training and 0 < module.p < 1 and not module.inplace
        return drops and x.requires_grad and not torch.compiler.is_compiling() and self.code.unchanged(module)

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """Dropout of x, saving the mask in bits."""
        assert isinstance(self.module, nn.Dropout)
        y = dropout(x, self.module.p, lambda: self.original(x))
        known = found(x)
        self.origin = None if known is None else known.origin
        return y
