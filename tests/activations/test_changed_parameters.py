"""Parameters that change between forward and backward in ways that torch does not see: refused, or right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import ModelError
from tests.activations.models import make_model
from tests.grid import grid


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU()
        self.down, self.last, self.out = nn.Linear(128, 64), nn.RMSNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.last(self.down(self.act(self.up(self.norm(x))))))
        return result


def convolutions() -> nn.Module:
    parts = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(128, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "block": (Block, lambda: torch.randn(32, 64)),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(64, 64), lambda: torch.randn(8, 4, 64)),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0), lambda: torch.randn(8, 4, 64)),
    "llama": (lambda: make_model("llama"), lambda: torch.randint(64, (2, 16))),
    "mixtral": (lambda: make_model("mixtral"), lambda: torch.randint(64, (2, 16))),
}


def another_tensor(p: nn.Parameter) -> None:
    p.data = p.data * 1.5


def twice_another(p: nn.Parameter) -> None:
    another_tensor(p)
    another_tensor(p)


def in_place(p: nn.Parameter) -> None:
    p.data.mul_(1.5)


def by_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] *= 1.5


def _gradients(model: nn.Module, x: Tensor, change: Callable[[nn.Parameter], None] | None) -> list[Tensor | None]:
    y = model(x)
    y = getattr(y, "logits", y)
    y = y[0] if isinstance(y, tuple) else y
    loss = (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))).sum()
    if change is not None:
        for parameter in model.parameters():
            change(parameter)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("model", "mode", "change"),
    grid(list(MODELS), ["sites", "hooks", "combined"], [another_tensor, twice_another, in_place, by_numpy], strength=1),
)
def test_gradients_are_those_of_forward_or_refused(
    model: str, mode: Literal["sites", "hooks", "combined"], change: Callable[[nn.Parameter], None]
) -> None:
    make, inputs = MODELS[model]
    changed = make().train()
    laconic.compress_activations(changed, 8, mode=mode)
    x = inputs()
    expected = _gradients(copy.deepcopy(changed), x, None)
    try:
        found = _gradients(changed, x, change)
    except ModelError as error:
        assert "holds other values in backward than in forward" in str(error)  # noqa: PT017
        return
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_parameter_that_stays_is_no_change() -> None:
    model = Block()
    laconic.compress_activations(model, 8)
    x = torch.randn(32, 64)
    expected = _gradients(copy.deepcopy(model), x, None)

    def other_memory(p: nn.Parameter) -> None:
        p.data = p.data.clone()

    torch.testing.assert_close(_gradients(model, x, other_memory), expected)


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
@pytest.mark.parametrize("model", sorted({*MODELS} - {"mixtral"}))  # torch's grouped product has no float64
def test_models_that_become_float64_compute_exactly(model: str, mode: Literal["sites", "hooks", "combined"]) -> None:
    make, inputs = MODELS[model]
    exact, x = make().train().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    compressed = copy.deepcopy(exact).float()
    laconic.compress_activations(compressed, 8, mode=mode)
    compressed.double().load_state_dict(exact.state_dict())
    expected = _gradients(exact, x, None)
    for got, wanted in zip(_gradients(compressed, x, None), expected, strict=True):
        assert got is not None
        assert wanted is not None
        if mode == "sites" or model != "llama":  # whose norms make float32 of everything, which hooks pack
            torch.testing.assert_close(got, wanted)


def _in_numpy(x: Tensor) -> Tensor:
    """A copy whose values lie in the order of their indices, as in a file."""
    return torch.tensor(x.float().tolist(), dtype=x.dtype) if x.is_floating_point() else x.clone()


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
@pytest.mark.parametrize("model", ["block", "convolutions", "llama"])
def test_hooks_of_a_host_may_give_back_copies_in_another_layout_but_no_other_values(
    model: str, mode: Literal["sites", "hooks", "combined"]
) -> None:
    make, inputs = MODELS[model]
    torch.manual_seed(0)
    exact = make().to(memory_format=torch.channels_last) if model == "convolutions" else make()
    x, converted = inputs(), copy.deepcopy(exact)
    laconic.compress_activations(converted, bits=8, mode=mode)
    expected = _gradients(converted, x, None)
    converted.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(_in_numpy, lambda x: x):
        found = _gradients(converted, x, None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    doubled = torch.autograd.graph.saved_tensors_hooks(_in_numpy, lambda x: 2 * x if x.is_floating_point() else x)
    with doubled, pytest.raises(ModelError, match="or hooks on saved tensors gave back others than they had got"):
        _gradients(converted, x, None)
