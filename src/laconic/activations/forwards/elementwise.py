"""Activation modules outside of a recognized feed-forward block.

The activation between two linear layers is often a child of something larger (an encoder layer, an intermediate module,
`nn.Sequential`) that follows no formula. The activation itself does: it packs its input, and the linear layer behind it
rebuilds its own input from those codes.

A relu keeps the sign of its input as well, in one bit per value: codes round small values to zero, which would stop
their gradients, and models with many of them would feel it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations.backward import functions
from laconic.activations.backward.derivatives import derivative
from laconic.activations.forwards.base import SiteForward
from laconic.activations.forwards.checkpoint import is_plain
from laconic.activations.forwards.dropout import unpack_mask
from laconic.activations.forwards.leaves import run_packed
from laconic.activations.keep.choice import Packing, block_format_of
from laconic.activations.keep.kept import attach, derive, found, is_linear, keep
from laconic.activations.recognize.sites import ActivationSpec, Site
from laconic.activations.recognize.trial import PlainAttributes
from laconic.ops import pack_bits


def is_worth_packing(x: Tensor, activation: str) -> bool:
    """Whether the input of an activation is better kept packed.

    torch's relu saves its output, which the layer behind saves as well, so packing the input helps only in front of a
    layer that can be rebuilt: one that computes over the last dimension, like the linear layer that made the input.
    Pictures [batch, channels, height, width] are the business of convolutions.
    """
    if found(x) is not None or is_linear(x):
        return True
    return activation not in ("relu", "relu2") and x.dim() <= 3


def activation(x: Tensor, value: Tensor, name: str, format: Packing) -> Tensor:
    """`value`, an activation of x, with a backward that saves x packed, or its signs: of a relu, if x is no DTensor.

    Args:
        x: [..., features].
        value: [..., features], the activation of x, without gradients.
        name: a key of `ACTIVATIONS`.
        format: how x is packed if it is not saved already.
    """
    if name != "relu" or isinstance(x, DTensor):  # whose signs, in bits, would have no placements
        return functions.activate(x, value, name, format)
    kept, signs = keep(x, format, "mlp"), pack_bits(value)  # a NaN passes on, as in torch
    y: Tensor = _Relu.apply(x, value, signs)
    # An input that is right on average gives such an output with the signs of the exact one.
    is_unbiased = block_format_of(format).is_stochastic
    attach(
        y, derive(_where_positive, (kept,), (signs,), "mlp") if is_unbiased else derive(torch.relu, (kept,), (), "mlp")
    )
    return y


def _where_positive(x: Tensor, signs: Tensor) -> Tensor:
    return x.masked_fill(~unpack_mask(signs, x.shape), 0)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, bits: Tensor) -> Tensor:
        ctx.origin = "mlp"
        ctx.save_for_backward(bits)
        return value.detach()

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (bits,) = ctx.saved_tensors
        return _where_positive(grad, bits), None, None


class ElementwiseForward(SiteForward):
    """Saves the packed input of an activation; its output is rebuilt from that."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        assert isinstance(site.spec, ActivationSpec)
        self.activation = site.spec.activation
        self.attributes = PlainAttributes(module)

    def keeps(self, x: Tensor) -> bool:
        """Whether a gradient is wanted and the module still computes what was recognized; not in compiled graphs."""
        if torch.compiler.is_compiling():
            return False
        return x.requires_grad and self.attributes.unchanged(self.module) and is_worth_packing(x, self.activation)

    def left(self, *args: Any, **kwargs: Any) -> Any:
        """Of a picture, say: what torch's own function saves is packed; see leaves.py."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        return run_packed(self, self.format, is_plain(), *args, **kwargs)

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The activation of x, saving x packed."""
        y = activation(x, self.value(x, is_traced), self.activation, self.format)
        return self._noting_origin(y, is_traced)
