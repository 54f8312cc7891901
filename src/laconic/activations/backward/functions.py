"""Autograd functions that return the module's own forward value and save only packed tensors for backward.

Each one is given the value that the original code computed, so forward is bit-identical to the unmodified model.
Backward is written out on values rebuilt from the saved tensors (see [Note: kept tensors]): the layer-aware activation
quantization of AGoQ. Layers whose backward torch has take that wherever it serves (saving.py). Everything else that a
gradient needs (inverse root mean square, sigmoid) is recomputed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.activations.backward.derivatives import derivative, take
from laconic.activations.backward.gated import PackedProduct, gated_product
from laconic.activations.backward.norms import NormSpec, norm_again, norm_backward, norm_formula
from laconic.activations.backward.saving import LARGE_NUMEL, Instead
from laconic.activations.host.dtensors import Placed, local_of, on_rows, row_dim
from laconic.activations.host.traceable import as_result, direct_apply, traceable
from laconic.activations.keep.choice import Offload, Packing
from laconic.activations.keep.kept import GateInput, Kept, Memo, attach, derive, found, keep, keep_rows
from laconic.activations.keep.witnesses import check_unchanged, glances
from laconic.ops import GATED_ACTIVATIONS
from laconic.ops.derivatives import edge_of, gradients


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative.

    Attributes:
        forward: x -> f(x).
        backward: (grad, x) -> grad * f'(x).
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(1.702 * x), lambda grad, x: _quick_gelu_backward(grad, x)),
    "relu": Activation(F.relu, lambda grad, x: torch.ops.aten.threshold_backward(grad, x, 0)),
    "relu2": Activation(lambda x: torch.relu(x).square(), lambda grad, x: grad * 2 * torch.relu(x)),
}
"""The activation functions a gated or plain feed-forward site can rebuild, by name."""


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x sigmoid(1.702 x), CLIP's approximation of GELU."""
    gate = torch.sigmoid(1.702 * x)
    return grad * (gate + 1.702 * x * gate * (1 - gate))


@traceable
def norm(
    x: Tensor,
    value: Tensor,
    spec: NormSpec,
    format: Packing,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`value`, the norm of x, with a backward that saves x packed; the result can be rebuilt from that too.

    Args:
        x: [..., features].
        value: [..., features], the module's output for x, without gradients.
        spec: which normalization.
        format: how x is packed if it is not saved already.
        weight, bias: [features] or None.
    """
    kept = keep_rows(x, format, has_mean=spec.kind == "layer")
    y: Tensor
    if type(x) is Tensor:
        y = Instead(x, kept).around(_apply_norm, x, weight, bias, kept, spec, (value,))
    else:
        y = _Norm.apply(x, weight, bias, kept, spec, (value,), *kept.tensors)
    parameters = tuple([p for p in (weight, bias) if p is not None])
    again = partial(on_rows, partial(norm_again, spec=spec, dtype=y.dtype))
    attach(y, derive(again, (kept,), parameters, "norm"))
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kept: Kept,
        spec: NormSpec,
        value: tuple[Tensor],
        *saved: Tensor,
    ) -> Tensor:
        ctx.origin, ctx.spec, ctx.dtype = kept.origin, spec, x.dtype
        ctx.memo = kept.memo if saved else None
        if saved:
            kept.memo.announce()
            ctx.save_for_backward(edge_of(x), weight, bias, *saved)
            ctx.glances = glances((weight, bias))
        else:
            ctx.save_for_backward(x, weight, bias)
        return as_result(value[0])

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *saved = ctx.saved_tensors
        if ctx.memo is not None:
            check_unchanged(ctx.glances, (weight, bias))
            x = take(ctx.memo, tuple(saved), x, after=grad)
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            formula = partial(norm_formula, spec=ctx.spec, dtype=grad.dtype)
            dx, dweight, dbias = gradients(formula, (x, weight, bias), grad, needs)
        else:
            dx, dweight, dbias = _norm_backward(grad, x, weight, bias, ctx.spec, needs)
        return (
            None if dx is None else dx.to(ctx.dtype),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            *[None] * (3 + len(saved)),
        )


_apply_norm = direct_apply(_Norm)


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """`norm_backward`; of DTensors on the rows that this rank holds, where torch's fused kernels can be used."""
    if not isinstance(x, DTensor):
        return norm_backward(grad, x, weight, bias, spec, needs)
    place = Placed.of(x)
    assert isinstance(grad, DTensor)
    grad = grad.redistribute(placements=place.placements)
    weight, bias = (None if p is None else local_of(p) for p in (weight, bias))
    dx, *sums = norm_backward(local_of(grad), local_of(x), weight, bias, spec, needs)
    return (None if dx is None else place(dx), *(None if dp is None else place.reduced(dp) for dp in sums))


@traceable
def linear(
    x: Tensor, weight: Tensor, value: Tensor, transposed: bool, format: Packing, *, bias: Tensor | None = None
) -> Tensor:
    """`value`, the output of a linear layer, with a backward that saves what rebuilds x.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], or [in_features, out_features] if `transposed` (GPT-2's Conv1D).
        value: [..., out_features], the module's output for x, without gradients.
        transposed: see `weight`.
        format: how x is packed if it has to be packed.
        bias: [out_features] or None.
    """
    kept = keep(x, format, "linear")
    apply = _Linear.apply if torch.compiler.is_compiling() else _apply_linear
    y: Tensor = apply(x, weight, bias, kept, transposed, (value,), *kept.tensors)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Kept,
        transposed: bool,
        value: tuple[Tensor],
        *saved: Tensor,
    ) -> Tensor:
        kept.memo.announce()
        ctx.memo, ctx.origin, ctx.transposed = kept.memo, kept.origin, transposed
        ctx.dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(edge_of(x), weight, *saved)
        ctx.glances = glances((weight,))
        return as_result(value[0])

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge, weight, *saved = ctx.saved_tensors
        check_unchanged(ctx.glances, (weight,))
        dim = row_dim(grad)
        if torch.is_grad_enabled():  # batched gradients have no rule for flatten
            rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
        else:
            rows = grad.movedim(dim, 0).flatten(0, -2) if grad.dim() > 1 else grad.unsqueeze(0)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            # Under autocast the product was made in the gradient's dtype, so its backward is too.
            factor = weight.to(grad.dtype)
            dx = (grad @ (factor.t() if ctx.transposed else factor)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            x = take(ctx.memo, tuple(saved), edge, after=grad).to(grad.dtype)
            x = x.movedim(dim, 0).reshape(-1, weight.shape[0 if ctx.transposed else 1])
            dweight = (_product(x, rows) if ctx.transposed else _product(rows, x)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0).to(ctx.bias_dtype)
        return (dx, dweight, dbias, *[None] * (3 + len(saved)))


_apply_linear = direct_apply(_Linear)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a.T @ b, a [tokens, m], b [tokens, n] -> [m, n].

    On the CPU torch holds an fp32 copy of the whole result while it multiplies 16-bit matrices: at the output
    projection that is the peak of a step. So the result is made some rows at a time; the bits are the same.
    """
    m, n = a.shape[1], b.shape[1]
    is_whole = a.device.type != "cpu" or a.element_size() > 2 or m * n <= LARGE_NUMEL or type(a) is not Tensor
    if is_whole or torch.is_grad_enabled():
        return a.t() @ b
    result = a.new_empty(m, n)
    for rows, part in zip(a.t().split(max(1, LARGE_NUMEL // n)), result.split(max(1, LARGE_NUMEL // n)), strict=True):
        torch.mm(rows, b, out=part)
    return result


@traceable
def cast(x: Tensor, y: Tensor) -> Tensor:
    """`y`, which is x in another dtype, with a note how to rebuild it if x can be rebuilt."""
    kept = found(x)
    if kept is not None:
        dtype = y.dtype
        attach(y, derive(lambda value: value.to(dtype), (kept,), (), kept.origin))
    return y


@traceable
def activate(x: Tensor, value: Tensor, activation: str, format: Packing) -> Tensor:
    """`value`, an activation of x, with a backward that saves x packed; the result can be rebuilt from that too.

    Args:
        x: [..., features].
        value: [..., features], the module's output for x.
        activation: a name in `ACTIVATIONS`.
        format: how x is packed if it is not saved already.
    """
    kept = keep(x, format, "mlp")
    forward = ACTIVATIONS[activation].forward
    again = derive(forward, (kept,), (), "mlp")
    has_edge = kept.format is not None and activation in GATED_ACTIVATIONS and x.dim() > 0
    if type(x) is Tensor:
        results = Instead(x, kept).around(_apply_activation, x, kept, activation, (value,), has_edge)
    else:
        results = _Activate.apply(x, kept, activation, (value,), has_edge, *kept.tensors)
    if not has_edge:
        y: Tensor = results
        attach(y, again)
        return y
    y, edge = results
    again.gate = GateInput(kept, activation, forward, edge)
    attach(y, again)
    return y


class _Activate(torch.autograd.Function):
    """The activation; with `has_edge` also an output without memory whose gradient is that of x (see `GateInput`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kept: Kept, activation: str, value: tuple[Tensor], has_edge: bool, *saved: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.memo, ctx.origin, ctx.activation = kept.memo, kept.origin, ACTIVATIONS[activation]
        ctx.saves_codes = bool(saved)
        if saved:
            kept.memo.announce()
        ctx.save_for_backward(edge_of(x) if saved else x, *saved)
        if not has_edge:
            return as_result(value[0])
        ctx.set_materialize_grads(False)
        return as_result(value[0]), torch.empty_strided(x.shape, [0] * x.dim(), dtype=x.dtype, device=x.device)

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor | None, of_edge: Tensor | None = None) -> tuple[Tensor | None, ...]:
        dx, num_saved = of_edge, len(ctx.needs_input_grad) - 5
        if grad is None:
            ctx.memo.leave()
        else:
            x, *saved = ctx.saved_tensors
            if ctx.saves_codes:
                x = take(ctx.memo, tuple(saved), x, after=grad)
            if torch.is_grad_enabled():
                (dx,) = gradients(ctx.activation.forward, (x,), grad, (True,))
            else:
                dx = ctx.activation.backward(grad, x)
            dx = dx if of_edge is None or dx is None else dx + of_edge
        return (dx, *[None] * (4 + num_saved))


_apply_activation = direct_apply(_Activate)


@traceable
def multiply(a: Tensor, b: Tensor, format: Packing) -> Tensor:
    """a * b, with a backward that saves what rebuilds the two if one can be rebuilt; then the product can be too.

    The other one is packed in the pass that multiplies, where that is possible.

    Args:
        a, b: [..., features], alike in shape and dtype.
        format: how the other one is packed.
    """
    packs_a = found(a) is None
    if packs_a and found(b) is None:
        return a * b
    packed = PackedProduct(b if packs_a else a)
    quantize = None if isinstance(format, Offload) else packed
    kept = keep(a, format, "mlp", quantize if packs_a else None), keep(b, format, "mlp", None if packs_a else quantize)
    product = gated_product(a, b, kept, packed.value)
    if product is not None:
        return product
    saved = [tensor for part in kept for tensor in part.tensors]
    apply = _Multiply.apply if torch.compiler.is_compiling() else _apply_product
    y: Tensor = apply(a, b, kept, (packed.value,), *saved)
    attach(y, derive(torch.mul, kept, (), "mlp"))
    return y


def square(x: Tensor, value: Tensor, format: Packing) -> Tensor:
    """`value`, the square of x, with a backward that saves what rebuilds x; then the square can be rebuilt too.

    Args:
        x: [..., features], of which something else keeps what rebuilds it (`found`).
        value: of the same shape, without gradients.
        format: in which x is packed if what is kept of it has fewer bits.
    """
    kept = keep(x, format, "mlp")
    y: Tensor = _Square.apply(x, value, kept.memo, *kept.tensors)
    attach(y, derive(torch.square, (kept,), (), "mlp"))
    return y


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, memo: Memo, *saved: Tensor) -> Tensor:
        memo.announce()
        ctx.memo = memo
        ctx.save_for_backward(edge_of(x), *saved)
        return as_result(value)

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge, *saved = ctx.saved_tensors
        x = take(ctx.memo, tuple(saved), edge, after=grad)
        return (grad * x * 2, None, None, *[None] * len(saved))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, kept: tuple[Kept, Kept], value: tuple[Tensor | None], *saved: Tensor
    ) -> Tensor:
        for part in kept:
            part.memo.announce()
        ctx.memos = tuple(part.memo for part in kept)
        ctx.count = len(kept[0].tensors)  # of what is saved for a
        ctx.save_for_backward(edge_of(a), edge_of(b), *saved)
        return a * b if value[0] is None else value[0]

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge_a, edge_b, *saved = ctx.saved_tensors
        a = take(ctx.memos[0], tuple(saved[: ctx.count]), edge_a, after=grad)
        b = take(ctx.memos[1], tuple(saved[ctx.count :]), edge_b, after=grad)
        return (grad * b, grad * a, None, None, *[None] * len(saved))


_apply_product = direct_apply(_Multiply)
