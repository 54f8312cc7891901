"""Attention over levels as its definition is written, and networks small enough to run in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.vision import AFI, AFIResNetConfig, AFIResNetForImageClassification


def averages(features: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    """A_1 ... A_n: each a sum over all levels so far, weighted by the softmax of their scores."""
    found = []
    for n in range(1, len(features) + 1):
        weights = torch.softmax(torch.stack(list(scores[:n])), 0)
        found.append(sum((w[..., None, None] * f for w, f in zip(weights, features, strict=False)), torch.zeros(())))
    return found


def with_opinions(model: nn.Module, scale: float = 3.0) -> nn.Module:
    """The model, with attention that is far from even: W_2 does not stay at zero."""
    for module in model.modules():
        if isinstance(module, AFI):
            nn.init.normal_(module.expand.weight, std=scale)
            nn.init.normal_(module.squeeze.weight)
    return model


def tiny_config(**changes: Any) -> AFIResNetConfig:
    """Stages of one, two and three blocks; 40 channels are not divisible by 32."""
    fields: dict[str, Any] = {
        "num_labels": 5,
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 40],
        "depths": [1, 2, 3],
        "layer_type": "basic",
        "small_inputs": True,
    }
    return AFIResNetConfig(**(fields | changes))


def tiny(**changes: Any) -> AFIResNetForImageClassification:
    model = AFIResNetForImageClassification(tiny_config(**changes))
    with_opinions(model)
    return model


def images(batch: int = 3, size: int = 12, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)
