"""A relu that keeps bits: torch's gradients bit for bit, of any order, in place and in any memory format."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.keep.masked_relu import masked_relu
from laconic.ops.declarations.bits import MASK_DTYPES
from tests.grid import grid

SHAPE = (3, 8, 11, 7)


def values(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40]).to(dtype)
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def same(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize(
    ("dtype", "in_place", "channels_last", "grad_is_channels_last"),
    grid([dtype for dtype in MASK_DTYPES if dtype.is_floating_point], [False, True], [False, True], [False, True]),
)
def test_value_and_gradient_have_torchs_bits(
    dtype: torch.dtype, in_place: bool, channels_last: bool, grad_is_channels_last: bool
) -> None:
    found = []
    for function in (lambda x, in_place: masked_relu(x, in_place)[0], lambda x, in_place: F.relu(x, in_place)):
        leaf = values(dtype, channels_last).requires_grad_()
        x = leaf * 1
        y = function(x, in_place)
        assert (y is x) == in_place
        incoming = values(dtype, grad_is_channels_last).flip(0)
        incoming = incoming.contiguous(memory_format=torch.channels_last) if grad_is_channels_last else incoming
        found.append((y.detach(), *torch.autograd.grad(y, x if not in_place else leaf, incoming)))
    for got, expected in zip(*found, strict=True):
        assert same(got, expected)


def test_derivatives_of_all_orders() -> None:
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: masked_relu(x * 1, False)[0].pow(3), x)
    assert torch.autograd.gradgradcheck(lambda x: masked_relu(x * 1, False)[0].pow(3), x)
    found = []
    for function in (lambda x: masked_relu(x, False)[0], torch.relu):
        y = x
        for _ in range(3):
            (y,) = torch.autograd.grad(function(y).pow(4).sum(), x, create_graph=True)
        found.append(y)
    assert torch.equal(*found)


class Calls(nn.Module):
    """A function between two products, in a model that is packed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale) * self.scale


def of_a_view(x: Tensor) -> Tensor:
    F.relu_(x[1:])
    return x


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": torch.relu,
    "functional": F.relu,
    "functional in place": lambda x: F.relu(x, True),
    "by name in place": lambda x: F.relu(input=x, inplace=True),
    "method in place": lambda x: x.relu_(),
    "in place on a view": of_a_view,
    "in place, then again": lambda x: torch.relu_(torch.relu_(x) - 0.5),
    "of a view": lambda x: torch.relu(x[:, 1:]),
    "of an expanded tensor": lambda x: torch.relu(x[:1].expand(3, -1, -1, -1)),
    "of a transposed tensor": lambda x: torch.relu(x.transpose(1, 3)),
    "twice of one": lambda x: torch.relu(x) + torch.relu(x.neg()),
    "in a checkpointed region": lambda x: checkpoint(lambda x: torch.relu(x) * 2, x, use_reentrant=False),
    "under other hooks": lambda x: on_host(x),
    "of what has no gradient": lambda x: torch.relu(x.detach()) + x,
    "of a number each": lambda x: torch.relu(x.sum((1, 2, 3))),
}


def on_host(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.relu(x)


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_a_packed_model(name: str) -> None:
    model = Calls(CALLS[name])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode="hooks", example_inputs={"x": x})
    found = []
    for each in (model, twin):
        y = each(x)
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)))
        assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], found[-1][1])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_what_is_kept_is_a_bit_per_value() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2))
    x = torch.randn(2, 3, 20, 20)
    laconic.compress_activations(model, example_inputs={"input": x})
    with SavedTensorTracker(model) as tracker:
        y = model(x)
    assert tracker.by_module["1"] == 2 * 8 * 18 * 18 // 8
    assert y.grad_fn is not None
    assert "Relu" in str(y.grad_fn.next_functions[0][0])


def test_a_leaf_in_place_is_refused_as_ever() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True))
    laconic.compress_activations(model, example_inputs={"input": torch.randn(64, 64)})
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model(torch.randn(64, 64, requires_grad=True))
