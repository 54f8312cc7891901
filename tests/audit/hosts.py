"""Healthy trainings that faults are planted into: each makes all that an audit looks at, and audits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import checkpoint
from laconic.auditing import AuditReport
from laconic.moe import GatedExperts, MoELayer, SoftmaxGate
from tests.activations.models import make_ids, make_model

Plant = Callable[[], None]
"""Called when all is set up, just before the audit."""


def language(
    plant: Plant, family: str = "llama", *, gradients: int = 0, model: dict[str, Any] | None = None, **options: Any
) -> AuditReport:
    """A model of transformers' with AdamW8bit."""
    made = make_model(family, **(model or {})).train()
    laconic.compress_activations(made, **options)
    if gradients:
        laconic.compress_gradients(made, bits=gradients)
    optimizer = laconic.AdamW8bit(made.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-6)
    ids = make_ids(4, 24)
    plant()
    return laconic.audit(made, {"input_ids": ids, "labels": ids}, optimizer=optimizer)


class Moving(nn.Module):
    """A norm whose output is changed in place before a linear reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x).mul_(2))
        return result


class WrittenUnseen(nn.Module):
    """As `Moving`, but torch does not count the write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y.data.mul_(2)
        result: Tensor = self.linear(y)
        return result


class Choosing(nn.Module):
    """Two regions that run again in backward, each of which passes the two best of four parts of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gates = nn.ModuleList(nn.Linear(64, 4) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = x + checkpoint(self._region, x, gate=gate, layer=layer)
        return x

    @staticmethod
    def _region(x: Tensor, gate: nn.Module, layer: nn.Module) -> Tensor:
        scores = gate(x).softmax(-1)
        values, places = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, places, values)
        y: Tensor = (layer(x).unflatten(-1, (4, 16)) * weights.unsqueeze(-1)).flatten(-2)
        return y


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean((2, 3)))
        return result


class Perceptron(nn.Module):
    """Dropout and a plain activation between linears."""

    def __init__(self, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 128), act(), nn.Dropout(0.25), nn.Linear(128, 64), nn.LayerNorm(64)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x + self.body(x))
        return result


def plain(plant: Plant, model: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> AuditReport:
    """A model of torch's own layers under a cross entropy."""
    torch.manual_seed(0)
    made, x = model().train(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    laconic.compress_activations(made, example_inputs={"x": x}, **options)
    labels = torch.arange(len(x)) % 5
    plant()
    return laconic.audit(
        made, x, loss_of=lambda y: F.cross_entropy(y[..., :8].reshape(-1, 8)[: len(y)], labels[: len(y)])
    )


def experts(plant: Plant) -> AuditReport:
    """A layer of experts of laconic.moe, exact."""
    torch.manual_seed(0)
    layer = MoELayer(SoftmaxGate(4, 16, 2), GatedExperts(4, 16, 24))
    plant()
    return laconic.audit(layer, torch.randn(12, 16))
