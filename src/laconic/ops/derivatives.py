"""Autograd functions whose gradients cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_derivatives"]

Backward = Callable[..., Any]


def first_derivatives(error: type[Exception], reason: str) -> Callable[[Backward], Backward]:
    """A decorator for the backward of an autograd function that serves the first derivative only.

    With `create_graph=True` every gradient stays in the graph, and a backward that reaches it raises `error(reason)`.
    torch's own `once_differentiable` returns constants where the incoming gradient needs none, as that of a sum does:
    a second derivative is then silently incomplete.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            results = results if isinstance(results, tuple) else (results,)
            found = [value.detach().requires_grad_() for value in results if isinstance(value, Tensor)]
            refusing = iter(_Refuse.apply(error, reason, *found))
            return tuple(next(refusing) if isinstance(value, Tensor) else value for value in results)

        return run

    return decorate


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: type[Exception], reason: str, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.error, ctx.reason = error, reason
        return tuple(grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error(ctx.reason)
