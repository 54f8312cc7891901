"""torch.nn's attention, recurrent and transformer layers keep their packed input and run again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.recognize.sites import find_sites
from laconic.formats import BlockFormat
from tests.grid import few, grid

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

WIDTH = 64


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones; with lengths its sequences are packed."""

    def __init__(self, layer: Callable[..., nn.RNNBase], lengths: bool = False, state: bool = False, **options: Any):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer(WIDTH, 96, batch_first=True, **options)
        self.last = nn.Linear(options.get("proj_size", 96) * (2 if options.get("bidirectional") else 1), 8)
        self.lengths, self.state = lengths, state

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.state:
            shape = (self.layer.num_layers * (2 if self.layer.bidirectional else 1), len(x), 96)
            states = h.mean() * torch.ones(shape)
            return self.last(self.layer(h, (states, states) if isinstance(self.layer, nn.LSTM) else states)[0])
        if not self.lengths:
            return self.last(self.layer(h)[0])
        lengths = torch.arange(len(x)) % 5 + h.shape[1] - 5
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return self.last(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


class Attending(nn.Module):
    """Attention of one sequence to itself, or to another one of another length."""

    def __init__(self, other: int | None = None, named: bool = False, weights: bool = False, **options: Any):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        widths = {} if other is None else {"kdim": WIDTH // 2, "vdim": WIDTH // 2}
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **widths, **options)
        self.narrow = None if other is None else nn.Linear(WIDTH, WIDTH // 2)
        self.other, self.named, self.weights = other, named, weights

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x)
        k = q if self.narrow is None else self.narrow(q[:, : self.other])
        mask = torch.zeros(q.shape[1], k.shape[1]).bool()
        mask[:, -1] = True
        given: dict[str, Any] = {"attn_mask": mask, "need_weights": self.weights}
        if self.named:
            y, weights = self.attention(query=q, key=k, value=k, **given)
        else:
            y, weights = self.attention(q, k, k, **given)
        return self.last(y) if weights is None else self.last(y) + weights.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{layer.__name__: (lambda layer=layer: Recurrent(layer)) for layer in (nn.LSTM, nn.GRU, nn.RNN)},
    "LSTM, all options": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2, proj_size=40),
    "GRU, packed sequences": lambda: Recurrent(nn.GRU, lengths=True, num_layers=2, dropout=0.1),
    "LSTM, given states": lambda: Recurrent(nn.LSTM, state=True, bidirectional=True),
    "GRU, given states": lambda: Recurrent(nn.GRU, state=True),
    "attention": Attending,
    "attention, dropout and weights": lambda: Attending(dropout=0.2, weights=True),
    "attention, another sequence": lambda: Attending(other=20, dropout=0.1),
    "attention, named arguments": lambda: Attending(named=True, add_bias_kv=True, bias=False),
    **{
        f"encoder, {activation}, dropout {dropout}, norm first {first}": (
            lambda activation=activation, dropout=dropout, first=first: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(
                    WIDTH, 4, 128, dropout, activation=activation, batch_first=True, norm_first=first
                ),
                2,
                enable_nested_tensor=False,
            )
        )
        for activation, dropout, first in (("relu", 0.0, False), ("gelu", 0.1, True), ("relu", 0.1, True))
    },
}


def decoder() -> nn.Module:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(WIDTH, 4, 128, batch_first=True)
            self.decoder = nn.TransformerDecoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.decoder(x[:, :20], x[:, 5:])
            return y

    return Decoding()


MODELS["decoder"] = decoder


def gradients(model: nn.Module, x: Tensor, seed: int = 3) -> tuple[Tensor, list[Tensor], int]:
    """Output, gradients of the input and the parameters, and the bytes that were kept."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    with SavedTensorTracker(model) as tracker:
        y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
    return y.detach(), [p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None], tracker.nbytes


@pytest.mark.parametrize(("name", "dtype"), grid(few(MODELS, 6), [torch.float32, torch.bfloat16], strength=1))
def test_a_quarter_of_the_bytes_or_less_is_kept(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    x = torch.randn(6, 32, WIDTH).to(dtype)
    if dtype == torch.bfloat16 and "states" in name:  # ones() of the model
        pytest.skip("the states are fp32")
    value, exact, before = gradients(model, x)
    state = torch.get_rng_state()
    laconic.compress_activations(model)
    gradients(model, x)  # which tries whether the module may run again
    found, packed, after = gradients(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found, value)
    assert before >= 4 * after, (before, after)
    assert len(exact) == len(packed)
    whole = sum(float(g.double().square().sum()) for g in exact) ** 0.5
    for one, other in zip(exact, packed, strict=True):
        assert (one - other).norm() <= 0.15 * max(float(one.norm()), 0.02 * whole)


@pytest.mark.parametrize("name", MODELS)
def test_at_16_bits_nothing_changes(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 17, WIDTH)
    value, exact, before = gradients(model, x)
    laconic.compress_activations(model, bits=16)
    found, same, after = gradients(model, x)
    assert torch.equal(found, value)
    assert before == after
    assert all(torch.equal(one, other) for one, other in zip(exact, same, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_second_run_is_the_first_one(name: str) -> None:
    # With an exact input, which a format that is too coarse for the module leaves, gradients are torch's own.
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(3, 17, WIDTH)
    _, exact, _ = gradients(model, x)
    names = {site.name for site in find_sites(model) if site.kind in ("mixer", "attention")}
    assert names
    format = BlockFormat("int8")
    laconic.compress_activations(model, policy=lambda site: format if site.name in names else None)
    for module_name in names:
        model.get_submodule(module_name).forward.__self__.is_sensitive = True  # type: ignore[attr-defined]
        model.get_submodule(module_name).forward.__self__.repeats = True  # type: ignore[attr-defined]
    _, again, _ = gradients(model, x)
    for one, other in zip(exact, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_evaluation_and_attention_left_exact_are_torchs_own() -> None:
    model = MODELS["encoder, relu, dropout 0.0, norm first False"]()
    x = torch.randn(3, 17, WIDTH)
    expected = model.eval()(x).detach()
    laconic.compress_activations(model, attention="exact")
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-5)
    assert not any(site.name.endswith("out_proj") for site in find_sites(model))


def test_a_batch_that_wants_no_gradient_is_packed_too() -> None:
    x = torch.randn(8, 64, WIDTH)
    model = nn.LSTM(WIDTH, 32, batch_first=True)
    laconic.compress_activations(model)
    model(x)
    with SavedTensorTracker(model) as tracker:
        model(x)
    assert tracker.nbytes < x.nbytes / 3.8
