"""Modules that are nothing but attention, as torchtitan's: packed query, key and value, the module's own code again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.forwards.inner_attention import InnerAttentionForward
from laconic.activations.forwards.replacement import replacements_of


class Inner(nn.Module):
    """[batch, sequence, heads, size], as torchtitan's modules take and give it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo, self.inner = nn.Linear(64, 192), nn.Linear(64, 64), Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).view(*x.shape[:2], 3, 4, 16).unbind(2)
        return self.wo(self.inner(q, k, v=v, scale=0.3).flatten(2))


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int]:
    with SavedTensorTracker(model) as tracker:
        y = model(x)
    nbytes = tracker.nbytes
    found = torch.autograd.grad(y.square().mean(), list(model.parameters()))
    return y.detach(), torch.cat([gradient.flatten() for gradient in found]), nbytes


@pytest.mark.parametrize("attention", ["int8", "nf4"])
def test_outputs_keep_their_bits_and_less_is_kept(attention: str) -> None:
    model, x = Attention(), torch.randn(2, 96, 64)
    packed = copy.deepcopy(model)
    laconic.compress_activations(packed, bits=4, attention=attention)
    assert [type(replacement) for replacement in replacements_of(packed.inner)] == [InnerAttentionForward]
    expected, exact, whole = gradients(model, x)
    for _ in range(2):  # the first call may prove what later ones rely on
        y, found, nbytes = gradients(packed, x)
    assert torch.equal(y, expected)
    assert F.cosine_similarity(found, exact, 0) > (0.995 if attention == "int8" else 0.98)
    assert 2.5 * nbytes < whole
    laconic.decompress_activations(packed)
    assert torch.equal(gradients(packed, x)[1], exact)


def test_exact_attention_has_exact_gradients() -> None:
    model, x = Attention(), torch.randn(2, 32, 64)
    packed = copy.deepcopy(model)
    laconic.compress_activations(packed, bits=16, attention="recompute")
    torch.testing.assert_close(gradients(packed, x)[1], gradients(model, x)[1])
