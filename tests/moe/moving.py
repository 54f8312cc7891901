"""Layers whose experts move, and training them, for tests in one process and in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.moe import Dispatcher, Experts, GatedExperts, GptExperts, MoELayer, SoftmaxGate
from laconic.moe.placement.expert_map import Placement
from laconic.optim import AdamW8bit

M, H, E, K = 16, 24, 8, 3

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adamw8bit": lambda p: AdamW8bit(p, lr=1e-2, min_8bit_numel=256),
    "adamw4bit": lambda p: AdamW8bit(p, lr=1e-2, min_8bit_numel=256, bits=4),
}


def build(num_layers: int, rank: int, world: int, dtype: torch.dtype, dispatcher: Dispatcher | None) -> list[MoELayer]:
    """Layers whose local experts are this rank's part of those that a single process has."""
    layers = []
    for number in range(num_layers):
        torch.manual_seed(number)
        gate = SoftmaxGate(E, M, K, dtype=dtype)
        kind: type[Any] = (GatedExperts, GptExperts)[number % 2]
        whole: Experts = kind(E, M, H, dtype=dtype)
        local = E // world
        experts: Experts = kind(local, M, H, dtype=dtype)
        with torch.no_grad():
            for mine, all_of_them in zip(experts.parameters(), whole.parameters(), strict=True):
                mine.copy_(all_of_them[rank * local :][:local])
        layers.append(MoELayer(gate, experts, dispatcher=dispatcher, placement=Placement(E)))
    return layers


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, M, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64).to(dtype)


def forward(layers: list[MoELayer], x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def train_step(layers: list[MoELayer], optimizers: list[torch.optim.Optimizer], x: Tensor) -> None:
    """Gates stay as they are, so that only experts have to agree over ranks."""
    forward(layers, x).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for layer in layers:
        layer.gate.zero_grad()


def experts_of(layers: list[MoELayer]) -> list[Tensor]:
    return [parameter for layer in layers for parameter in layer.experts.parameters()]
