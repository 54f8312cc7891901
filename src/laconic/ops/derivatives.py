"""Backwards written by hand that can be differentiated again, and others that refuse it.

[Note: edges] The gradient of a gradient flows to the tensors that forward read, and a backward that rebuilds its input
from codes no longer has these. It saves an edge instead: a tensor without elements whose place in the graph is that of
the input. Where a graph is asked for (`create_graph=True`), the value that backward rebuilds is given that place, and
what backward computes of it has every derivative. A backward that cannot be differentiated names all its edges as
inputs of a node that refuses: torch runs only what lies on a way to the tensors it is asked for, and each way to the
input of such a backward has that node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Backward = Callable[..., Any]
Refusal = Callable[[Any, tuple[Any, ...], Any], tuple[Any, ...]]

_is_subclass: Callable[[object], bool] = is_traceable_wrapper_subclass
_unsafe_view = torch.ops.aten._unsafe_view.default


def edge_of(x: Tensor) -> Tensor | None:
    """A tensor that has the place of `x` in the graph and no elements, to be saved for backward.

    None where x wants no gradient, and in a graph of torch.compile, of which torch refuses second derivatives itself.
    """
    if not x.requires_grad or (type(x) is not Tensor and torch.compiler.is_compiling()):
        return None
    before = torch.is_grad_enabled()  # which the forward of an autograd function disables
    torch._C._set_grad_enabled(True)
    try:
        if type(x) is not Tensor and _is_subclass(x):  # a DTensor, say, whose second derivatives are refused
            refused: Tensor = _Place.apply(x)
            return refused
        # Either is a node of its own that saves nothing, and no view; the first one takes a third of the time.
        edge: Tensor = x.unsafe_split_with_sizes(x.shape[:1])[0] if x.dim() else _unsafe_view(x, x.shape)
        # It lets go of the memory.
        edge.data = _no_elements(x.dtype, x.device) if type(x) is Tensor else x.new_empty(0)
    finally:
        torch._C._set_grad_enabled(before)
    return edge


@functools.cache
def _no_elements(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or autograd could not save it
        return torch.empty(0, dtype=dtype, device=device)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("an edge of a tensor subclass is for a refusal")


def connected(value: Tensor, edge: Tensor | None) -> Tensor:
    """`value`, which stands for the tensor that `edge_of` was given, in that tensor's place in the graph.

    Of another dtype than the tensor it may be; its gradient is cast.
    """
    if edge is None:
        return value.detach()
    result: Tensor = _Connected.apply(edge, (value,))
    return result


class _Connected(torch.autograd.Function):
    generate_vmap_rule = True  # for gradients of this graph under torch.func.vmap

    @staticmethod
    def forward(edge: Tensor, value: tuple[Tensor]) -> Tensor:
        return value[0].detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor, needs: Iterable[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of `function(*inputs)`, of those that need one, by torch's own backward and with a graph.

    Args:
        function: differentiable by torch.
        inputs: its arguments, in their places in the graph.
        grad: of its result.
        needs: of which inputs a gradient is wanted.
    """
    # Views, since hooks of a parameter are for the sum of its gradients and not for this part.
    own = [x if x is None else x.view_as(x) for x in inputs]
    wanted = [x if x is not None and needed and x.requires_grad else None for x, needed in zip(own, needs, strict=True)]
    given = [x for x in wanted if x is not None]
    if not given:
        return tuple(wanted)
    found = iter(torch.autograd.grad(function(*own), given, grad, create_graph=True, allow_unused=True))
    return tuple(None if x is None else next(found) for x in wanted)


def differentiable(error: type[Exception], reason: str) -> Callable[[Backward], Backward]:
    """A decorator for the backward of an autograd function that torch can differentiate where gradients are enabled.

    There, backward has to compute with operations that have derivatives, on `connected` tensors. So it does for batched
    gradients (`is_grads_batched`), for which torch's operations have rules. Second derivatives of tensor subclasses
    (DTensors) raise `error(reason)`.
    """
    refuse = refusal(error, reason)

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            has_graph = torch.is_grad_enabled()
            # Dynamo, which traces backwards between the graphs it breaks, has no words for the questions below.
            if torch.compiler.is_compiling() or (not has_graph and not any(map(is_batched, grads))):
                return backward(ctx, *grads)
            if any(map(_is_subclass, grads)):
                with torch.no_grad():
                    results = backward(ctx, *grads)
                return refuse(ctx, grads, results) if has_graph else results
            device = next((grad.device.type for grad in grads if grad is not None), "cpu")
            with torch.enable_grad(), torch.autocast(device, enabled=False):
                results = backward(ctx, *grads)
            if has_graph:
                return results
            results = results if isinstance(results, tuple) else (results,)
            # Without the graph, as detach does, for which batches have no rule.
            return tuple(value.view_as(value) if isinstance(value, Tensor) else value for value in results)

        return run

    return decorate


def is_batched(grad: Any) -> bool:
    """Whether a gradient is several at once, as `is_grads_batched` and vmap make them."""
    return isinstance(grad, Tensor) and (
        torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def first_derivatives(error: type[Exception], reason: str) -> Callable[[Backward], Backward]:
    """A decorator for the backward of an autograd function that serves the first derivative only.

    With `create_graph=True` every gradient stays in the graph, and whatever differentiates one, for whichever tensors,
    raises `error(reason)`. The function has to save `edge_of` each input that wants a gradient, or the input itself.
    torch's own `once_differentiable` returns constants where the incoming gradient needs none, as that of a sum does:
    a second derivative is then silently incomplete.
    """
    refuse = refusal(error, reason)

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            return refuse(ctx, grads, results) if torch.is_grad_enabled() else results

        return run

    return decorate


def refusal(error: type[Exception], reason: str) -> Refusal:
    """A function that puts the results of a backward, from its context and its gradients, behind a node that refuses.

    Differentiating one of them raises `error(reason)`, whichever tensors it is done for.
    """

    def refuse(ctx: Any, grads: tuple[Any, ...], results: Any) -> tuple[Any, ...]:
        results = results if isinstance(results, tuple) else (results,)
        ways = [x for x in (*grads, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        found = [value.detach() for value in results if isinstance(value, Tensor)]
        refusing = iter(_Refuse.apply(error, reason, tuple(found), *ways) if ways and found else found)
        return tuple(next(refusing) if isinstance(value, Tensor) else value for value in results)

    return refuse


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, error: type[Exception], reason: str, results: tuple[Tensor, ...], *ways: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.error, ctx.reason = error, reason
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error(ctx.reason)
