"""Tensors and modes that put code of their own in the place of torch's functions: the original forwards run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import laconic
from laconic.activations import find_sites


def _squared(func: Any, args: Any, kwargs: Any) -> Any:
    if func in (F.linear, F.layer_norm, F.gelu):
        first = args[0].as_subclass(Tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(first * first.detach(), *args[1:], **kwargs)
    return None


class Squaring(Tensor):
    """Replaces the input of some functions by its square, with half of its gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _squared(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {}) if result is None else result


class Mode(TorchFunctionMode):
    """The same, whatever the tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _squared(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def step(model: nn.Module, way: str) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    x = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if way == "mode":
        with Mode():
            y = model(x)
    elif way == "jagged":
        rows = torch.nested.nested_tensor_from_jagged(x.view(36, 64), offsets=torch.tensor([0, 3, 36]))
        y = model(rows).values()
    else:
        y = model(x.as_subclass(Squaring) if way == "input" else x)
    y = y.as_subclass(Tensor)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad.as_subclass(Tensor) for p in model.parameters())]  # type: ignore[list-item, union-attr]


@pytest.mark.parametrize("mode", ["sites", "hooks"])
def test_a_function_mode_of_others_runs_the_original_code(mode: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode=mode)
    assert all(map(torch.equal, step(twin, "mode"), step(model, "mode")))


@pytest.mark.parametrize("mode", ["sites", "combined", "hooks"])
def test_where_hooks_on_saved_tensors_are_forbidden_the_original_code_runs(mode: Any) -> None:
    model = network()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode=mode)
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        assert all(map(torch.equal, step(twin, "plain"), step(model, "plain")))
        weight = torch.randn(9, 64, requires_grad=True)
        laconic.linear_cross_entropy(torch.randn(4, 64), weight, torch.arange(4)).backward()


@pytest.mark.parametrize("way", ["input", "jagged"])
def test_a_tensor_with_functions_of_its_own_is_left_to_them(way: str) -> None:
    model = network()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    expected, got = step(model, way), step(twin, way)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("late", [False, True])
def test_a_weight_with_a_product_of_its_own_has_its_gradient(late: bool) -> None:
    model = network()
    twin = copy.deepcopy(model)
    if late:
        laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        each[3].weight = nn.Parameter(each[3].weight.detach().as_subclass(Squaring))
    if not late:
        laconic.compress_activations(twin, bits=8)
        assert "3" not in [site.name for site in find_sites(twin)]
    expected, got = step(model, ""), step(twin, "")
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert (a - b).norm() < 0.03 * b.norm()
