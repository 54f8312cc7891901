"""Code that runs again in backward, in graphs of torch.compile.

[Note: run again in a compiled graph] In eager mode an autograd function runs such code (attention, experts) in its
backward. In a graph it is enough to state the dependencies: the code is traced twice, once on the exact tensors without
gradients (the value), once on tensors rebuilt from packed ones (the second run), and the value is given the gradient of
the second run. Nothing in forward needs the second run, so the partitioner moves it to backward, and the smallest thing
that carries it there is codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.activations.host.traceable import as_result, traceable
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import attach, held, keep, pack


@traceable
def rebuilt(x: Tensor, format: Packing, origin: str, share: bool) -> Tensor:
    """The tensor that backward has in place of `x`, with the gradient of x.

    Args:
        x: floating-point tensor of any shape.
        format: how it is packed.
        origin: kind of the site that asks.
        share: whether tensors that are saved for x already, or held by its producer, are used instead.
    """
    kept = keep(x, format, origin) if share else pack(x, format, origin)
    kept.memo.announce()
    y: Tensor = _PassOn.apply(x, (kept.memo.take(kept.tensors),))
    return y


@traceable
def graft(value: Tensor, again: Tensor, origin: str) -> Tensor:
    """`value` with the gradient of `again`; a function that saves the value for backward saves `again` instead."""
    y: Tensor = _PassOn.apply(again, (value,))
    attach(y, held(again.detach(), origin))
    return y


class _PassOn(torch.autograd.Function):
    """The second argument's value, the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: tuple[Tensor]) -> Tensor:
        return as_result(value[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
