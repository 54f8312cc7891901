"""Edges hold no memory of what they stand for, and a backward that refuses a second derivative does so on every way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.ops.derivatives import connected, differentiable, edge_of, first_derivatives, gradients


class Cubes(torch.autograd.Function):
    """x^3 * w: backward has no input but what it saved, here a detached copy in the place of codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(edge_of(x), x.detach().clone(), w)
        return x**3 * w

    @staticmethod
    @differentiable(TypeError, "unused")
    def backward(ctx: Any, grad: Tensor) -> Any:
        edge, x, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients(lambda x, w: x**3 * w, (connected(x, edge), w), grad, ctx.needs_input_grad)
        return 3 * x**2 * w * grad, x**3 * grad


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(edge_of(x), x.detach().clone(), edge_of(w), w.detach().clone())
        return x * w

    @staticmethod
    @first_derivatives(TypeError, "there is no second one")
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, x, _, w = ctx.saved_tensors
        return grad * w, grad * x


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    return x, w


@pytest.mark.parametrize("is_leaf", [True, False])
def test_all_derivatives_are_right(is_leaf: bool) -> None:
    x, w = leaves()

    def function(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Cubes.apply(x if is_leaf else x * 2, w)
        return y

    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))
    first = torch.autograd.grad(function(x, w).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(third, 6 * w * (1 if is_leaf else 8))


@pytest.mark.parametrize("wanted", [("x",), ("w",), ("x", "w"), ("before",), ("scale",), None])
@pytest.mark.parametrize("of", ["x", "w", "before"])
@pytest.mark.parametrize("outer", ["sum", "square"])
def test_a_refusal_lies_on_every_way(wanted: tuple[str, ...] | None, of: str, outer: str) -> None:
    x, w = leaves()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    before = x * scale
    y = Refusing.apply(before, w)
    named = {"x": x, "w": w, "before": before, "scale": scale}
    value = y.sum() if outer == "sum" else y.square().sum()
    (first,) = torch.autograd.grad(value, named[of], create_graph=True)  # which alone is no offence
    inputs = None if wanted is None else [named[name] for name in wanted]
    with pytest.raises(TypeError, match="no second one"):
        first.sum().backward(inputs=inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_an_edge_has_the_place_of_a_tensor_and_none_of_its_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    leaf = torch.randn(shape).to(dtype).requires_grad_()
    x = leaf * 2
    storage = weakref.ref(x.untyped_storage())
    with torch.no_grad():
        edge = edge_of(x)
    assert edge is not None
    assert edge.numel() == 0
    del x
    assert storage() is None
    y = connected(torch.ones(shape, dtype=dtype), edge)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaf)[0], torch.full(shape, 2, dtype=dtype))
    assert edge_of(torch.ones(3)) is None


class Owned:
    pass


def test_no_node_holds_itself() -> None:
    gc.collect()
    gc.disable()
    try:
        x, w = leaves()
        y = Cubes.apply(x * 2, w)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        owned = [Owned(), Owned()]  # by a node, which cannot be referred to weakly itself
        y.grad_fn.metadata["owned"], first.grad_fn.metadata["owned"] = owned
        ends = list(map(weakref.ref, owned))
        del y, first, owned
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_a_long_chain_of_edges_ends_without_a_stack_overflow() -> None:
    x, w = leaves()
    y = x
    for _ in range(20_000):
        y = Refusing.apply(y, w)
    del y
