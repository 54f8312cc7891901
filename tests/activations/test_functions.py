"""Hand-written backwards: every gradient that is asked for and no other, on plain tensors and on DTensors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from laconic.activations.backward.functions import linear, norm, square
from laconic.activations.backward.norms import NormSpec
from laconic.activations.keep.kept import Kept, Memo, attach
from laconic.formats import BlockFormat

INT8 = BlockFormat("int8")
NEEDS = [needs for needs in itertools.product([True, False], repeat=3) if any(needs)]


def draw(*shape: int, seed: int, needed: bool) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(needed)


def assert_near(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_layer_has_the_gradients_that_are_asked_for(needs: tuple[bool, ...], transposed: bool) -> None:
    shapes = ((3, 5, 64), (64, 32) if transposed else (32, 64), (32,))
    x, weight, bias = (draw(*shape, seed=i, needed=needs[i]) for i, shape in enumerate(shapes))
    exact = F.linear(x, weight.t() if transposed else weight, bias)
    y = linear(x, weight, exact.detach(), transposed, INT8, bias=bias)
    wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
    grad = draw(*y.shape, seed=7, needed=False)
    assert_near(torch.autograd.grad(y, wanted, grad), torch.autograd.grad(exact, wanted, grad))


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_norm_of_dtensors_has_the_gradients_that_are_asked_for(
    needs: tuple[bool, ...], placement: Replicate | Shard, mesh: DeviceMesh
) -> None:
    plain = [draw(*shape, seed=i, needed=needs[i]) for i, shape in enumerate(((3, 5, 64), (64,), (64,)))]
    exact = F.layer_norm(plain[0], (64,), plain[1], plain[2], 1e-5)
    x, weight, bias = (
        DTensor.from_local(tensor.detach() * 1, mesh, [placement if i == 0 else Replicate()]).requires_grad_(needs[i])
        for i, tensor in enumerate(plain)
    )
    value = DTensor.from_local(exact.detach(), mesh, [placement])
    y = norm(x, value, NormSpec("layer", 1e-5), INT8, weight=weight, bias=bias)
    grad = draw(*exact.shape, seed=7, needed=False)
    got = torch.autograd.grad(
        y, [tensor for tensor in (x, weight, bias) if tensor.requires_grad], DTensor.from_local(grad, mesh, [placement])
    )
    expected = torch.autograd.grad(exact, [tensor for tensor in plain if tensor.requires_grad], grad)
    assert_near(tuple(part.full_tensor() for part in got), expected)  # type: ignore[attr-defined]


def test_a_square_of_what_is_kept_has_its_gradient() -> None:
    source = draw(3, 5, 64, seed=0, needed=True)
    x = source * 1
    attach(x, Kept((x.detach(),), Memo(lambda tensors, after: tensors[0].clone()), "test"))
    grad = draw(*x.shape, seed=7, needed=False)
    (got,) = torch.autograd.grad(square(x, x.detach().square(), INT8), source, grad)
    assert torch.equal(got, grad * source.detach() * 2)
