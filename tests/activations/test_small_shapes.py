"""No site keeps more than the unmodified model, however few features there are and however coarse a format's scales."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.errors import ModelError
from tests.activations.models import Gated
from tests.grid import few, grid


class Functions(nn.Module):
    """Functions of torch between linear layers; some keep their own output, which the next layer reads."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(width, out), nn.Linear(out, width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.layer_norm(self.first(x), (self.first.out_features,)))
        h = self.second(F.relu(h))
        h = self.third(h.softmax(-1))
        return self.second(torch.tanh(h)) + self.second(h.sigmoid()) + self.second((-h.abs()).exp())


class Attention(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unsqueeze(1) for layer in (self.q, self.k, self.v))
        y: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return y


class Own(nn.Module):
    """A layer of torch's that runs again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)[0]
        return y


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda width, out: nn.Sequential(nn.Linear(width, out)),
    "two linears": lambda width, out: nn.Sequential(nn.Linear(width, out), nn.Linear(out, width)),
    "norms": lambda width, out: nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, out), nn.RMSNorm(out, eps=1e-6), nn.Linear(out, width)
    ),
    "activations": lambda width, out: nn.Sequential(
        nn.Linear(width, out),
        nn.ReLU(),
        nn.Linear(out, width),
        nn.GELU(),
        nn.Linear(width, out),
        nn.Tanh(),
        nn.Linear(out, 1),
    ),
    "dropout": lambda width, out: nn.Sequential(
        nn.Linear(width, out), nn.Dropout(0.5), nn.ReLU(), nn.Linear(out, width)
    ),
    "gated": Gated,
    "functions": Functions,
    "attention": Attention,
    "torch's attention": lambda width, out: Own(nn.MultiheadAttention(width, 1, batch_first=True)),
    "recurrent": lambda width, out: Own(nn.GRU(width, out, batch_first=True)),
    "convolutions": lambda width, out: nn.Sequential(
        nn.Conv1d(5, width, 1),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Conv1d(width, out, 1),
        nn.GELU(),
        nn.Conv1d(out, 5, 1),
    ),
}


def kept(model: nn.Module, x: Tensor) -> int:
    torch.manual_seed(0)
    with SavedTensorTracker(model) as tracker:
        model(x)
    return tracker.nbytes


def options(draw: random.Random) -> dict[str, Any]:
    bits = draw.choice([2, 4, 4, 5, 6, 8])
    format = draw.choice(["nf4", "e2m1", "int4"]) if bits == 4 else None
    scale = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    mode = draw.choice(["sites", "sites", "combined"])
    return {
        "bits": bits,
        "format": format,
        "block_size": draw.choice([16, 32, 64, 128, 256]),
        "scale_dtype": scale,
        "mode": mode,
    }


@pytest.mark.parametrize(
    ("name", "dtype"), grid(few(MODELS, 5), [torch.float32, torch.bfloat16, torch.float16], strength=1)
)
def test_no_shape_keeps_more_than_exact(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(f"{name} {dtype}")
    for width in (*range(1, 17), *draw.sample(range(17, 71), 8)):
        out, tokens = draw.choice([1, 2, 3, 5, 17, 33, 64, 70]), draw.choice([1, 2, 7, 64])
        model = MODELS[name](width, out).to(dtype)
        x = torch.randn(draw.choice([1, 3]), tokens, width).to(dtype).requires_grad_(draw.random() < 0.5)
        if name == "convolutions":
            x = torch.randn(2, 5, tokens).to(dtype)
        before = kept(model, x)
        chosen = options(draw)
        laconic.compress_activations(model, **chosen)
        model(x)  # where layers try whether they may run again
        after = kept(model, x)
        assert after <= before, (width, out, tokens, tuple(x.shape), x.requires_grad, chosen, before, after)


@pytest.mark.parametrize(
    ("width", "dtype", "bits"), grid([1, 2, 3, 5, 9, 17, 33, 64, 70], [torch.float32, torch.bfloat16], [2, 4, 8])
)
def test_few_features_take_the_bits_of_many(width: int, dtype: torch.dtype, bits: int) -> None:
    model = nn.Sequential(nn.Linear(width, 1)).to(dtype)
    x = torch.randn(64, 50, width).to(dtype)
    block = 256 if bits == 2 else 64
    laconic.compress_activations(model, bits=bits, block_size=block)
    per_value = 8 * kept(model, x) / x.numel()
    expected = bits + (32 if bits == 2 else 16) / block
    assert per_value <= 1.13 * expected


@pytest.mark.parametrize("width", [1, 2, 3, 7, 70])
def test_gradients_of_few_features_are_within_rounding(width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    x = torch.randn(300, width)
    model(x).square().sum().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    laconic.compress_activations(model, bits=8)
    model(x).square().sum().backward()
    for p, grad in zip(model.parameters(), exact, strict=True):
        assert p.grad is not None
        assert (p.grad - grad).norm() <= 0.02 * grad.norm()


def test_a_model_that_cannot_become_smaller_is_refused_or_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(1, 1)).bfloat16()
    try:
        laconic.compress_activations(model)
    except ModelError:
        return
    x = torch.randn(1, 1).bfloat16()
    assert kept(model, x) <= x.nbytes
