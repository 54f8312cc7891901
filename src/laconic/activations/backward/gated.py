"""The product of an activation and another tensor, both packed, with a backward that never stores what it rebuilds.

[Note: gated products] The graph of act(gate) * up has two ways back to gate: through the activation's output, as torch
has it, and through the edge, an output of the activation without memory (`GateInput`). Backward takes the edge: one op
reads codes and the incoming gradient and writes the gradients of gate and up, and the activation's own backward has
nothing left to do but to hand the gradient on. While somebody holds the activation's output, for its gradient or for
anything else, backward takes the way through it, step by step; what has hooks gets no edge at all.

In forward the product reads up, and so does what packs it: `PackedProduct` does both in one pass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.activations.backward.derivatives import derivative
from laconic.activations.host.traceable import direct_apply
from laconic.activations.keep.kept import Kept, Memo, Tensors, attach, in_range
from laconic.activations.keep.witnesses import Witness, saw_gradients, saw_product
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops import gated_backward_blockwise, gated_product_blockwise, multiply_quantize_blockwise
from laconic.ops.derivatives import connected, edge_of


class PackedProduct:
    """Packs one factor of a product and makes the product in the same pass.

    Args:
        other: the other factor.

    Attributes:
        value: the product, without gradients; None before the factor is packed, or where it is packed in another way.
    """

    __slots__ = ("_other", "value")

    def __init__(self, other: Tensor) -> None:
        self._other = other
        self.value: Tensor | None = None

    def __call__(self, x: Tensor, format: BlockFormat) -> BlockTensor | None:
        """`x` in the format; None where the factors are not plain, contiguous and alike, or subnormals are flushed."""
        a = self._other
        is_plain = type(a) is Tensor and type(x) is Tensor and a.is_contiguous() and x.is_contiguous()
        is_alike = is_plain and a.shape == x.shape and a.dtype == x.dtype and a.device == x.device
        if not is_alike or format.is_stochastic or _flushes_subnormals():
            return None
        self.value, codes, scales = multiply_quantize_blockwise(
            a, x, code=format.code, block_size=format.block_size, scale_dtype=format.scale_dtype
        )
        return BlockTensor(codes, scales, format, x.shape, x.dtype)


def _flushes_subnormals() -> bool:
    """Whether this thread's arithmetic flushes them (`torch.set_flush_denormal`); that of the op never does."""
    return sys.float_info.min * 0.5 == 0.0


@dataclass(frozen=True)
class _Product:
    """How activation(gate) * up was made of two factors: `activated` is the number of the one that is activation(gate).

    `output` refers to that factor, which backward has to give a gradient as long as somebody holds it; None in a
    compiled graph, whose tensors nobody holds. `witnesses` are those of gate and up, where there are any.
    """

    activated: int
    output: weakref.ref[Tensor] | None
    activation: str
    forward: Callable[[Tensor], Tensor]
    format: BlockFormat
    shape: torch.Size
    dtype: torch.dtype
    witnesses: tuple[Witness, Witness] | None

    def rebuild(self, codes: Tensors, after: Tensor | None) -> Tensor:
        """The product."""
        product = gated_product_blockwise(
            *codes,
            length=self.shape[-1],
            activation=self.activation,
            code=self.format.code,
            block_size=self.format.block_size,
            dtype=self.dtype,
            after=after,
        )
        if self.witnesses is not None:
            saw_product(product, self.witnesses, codes[1::2], self.activation)
        return product

    def gate_and_up(self, codes: Tensors) -> tuple[Tensor, Tensor]:
        """The two packed tensors."""
        gate_codes, gate_scales, up_codes, up_scales = codes
        gate = BlockTensor(gate_codes, gate_scales, self.format, self.shape, self.dtype)
        up = BlockTensor(up_codes, up_scales, self.format, self.shape, self.dtype)
        values = gate.dequantize(), up.dequantize()
        for witness, value, scales in zip(self.witnesses or (), values, codes[1::2], strict=False):
            witness.saw(value, scales)
        return in_range(values[0]), in_range(values[1])

    def gradients(self, grad: Tensor, codes: Tensors) -> tuple[Tensor, Tensor]:
        """Those of gate and up."""
        of_gate, of_up = gated_backward_blockwise(
            grad, *codes, activation=self.activation, code=self.format.code, block_size=self.format.block_size
        )
        if self.witnesses is not None:
            saw_gradients(grad, of_gate, of_up, self.witnesses, codes[1::2], self.activation)
        return of_gate, of_up


def gated_product(a: Tensor, b: Tensor, kept: tuple[Kept, Kept], value: Tensor | None) -> Tensor | None:
    """a * b, where one of them is an activation whose input is packed like the other one; None where that is not so.

    Args:
        a, b: [..., features].
        kept: what is kept for each.
        value: their product, without gradients, if somebody has made it already.
    """
    for activated, factor in enumerate((a, b)):
        gate, other = kept[activated].gate, kept[1 - activated]
        if gate is None or other.format is None or other.format != gate.kept.format:
            continue
        if a.shape != b.shape or a.dtype != b.dtype or gate.edge.dtype != a.dtype or gate.edge.shape != a.shape:
            continue
        if factor.retains_grad or factor._backward_hooks:
            continue
        is_traced = type(a) is not Tensor and torch.compiler.is_compiling()
        how = _Product(
            activated,
            None if is_traced else weakref.ref(factor),
            gate.activation,
            gate.forward,
            other.format,
            a.shape,
            a.dtype,
            None if gate.kept.witness is None or other.witness is None else (gate.kept.witness, other.witness),
        )
        codes = (*gate.kept.tensors, *other.tensors)
        apply = _GatedProduct.apply if is_traced else _apply_product
        y: Tensor = apply(a, b, gate.edge, how, (value,), *codes)
        attach(y, Kept(codes, Memo(how.rebuild), "mlp"))
        return y
    return None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, edge: Tensor, how: _Product, value: tuple[Tensor | None], *codes: Tensor
    ) -> Tensor:
        ctx.how, ctx.origin = how, "mlp"
        ctx.save_for_backward(edge_of(a), edge_of(b), *codes)
        return a * b if value[0] is None else value[0]

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: _Product = ctx.how
        *edges, gate_codes, gate_scales, up_codes, up_scales = ctx.saved_tensors
        codes: Tensors = (gate_codes, gate_scales, up_codes, up_scales)
        of_output = of_edge = None
        if torch.is_grad_enabled():
            gate, up = how.gate_and_up(codes)
            of_output = grad * connected(up, edges[1 - how.activated])
            of_up = grad * connected(how.forward(gate), edges[how.activated])
        elif how.output is None or how.output() is None:
            of_edge, of_up = how.gradients(grad, codes)
        else:
            gate, up = how.gate_and_up(codes)
            of_output, of_up = grad * up, grad * how.forward(gate)
        factors = (of_output, of_up) if how.activated == 0 else (of_up, of_output)
        return (*factors, of_edge, *[None] * (2 + len(codes)))


_apply_product = direct_apply(_GatedProduct)
