"""Optimizer state and gradients in fewer bytes: laconic beside bitsandbytes, torchao and low-rank optimizers.

Every peer runs with what its documentation says: GaLore and APOLLO train at a rate of 0.01 and project attention and
feed-forward weights to a quarter of the hidden size (APOLLO-Mini: to 1), with a new projection every 200 steps;
torch's Adafactor has a rate of 0.01 by default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import laconic
from benchmarks.contenders.training import EXACT, LEARNING_RATE, Change, Contender, Training

_DOCUMENTED = 0.01 / LEARNING_RATE
"""The rate of GaLore, APOLLO and Adafactor, over AdamW's."""


def optimizer(make: Callable[[Any, float], torch.optim.Optimizer]) -> Change:
    """Another optimizer."""

    def change(training: Training, ids: Tensor) -> None:
        training.make_optimizer = make

    return change


def adamw8bit() -> Change:
    """laconic.AdamW8bit."""
    return optimizer(lambda model, lr: laconic.AdamW8bit(model.parameters(), lr=lr, weight_decay=0.0))


def adamw4bit() -> Change:
    """laconic.optim.AdamW4bit."""
    return optimizer(lambda model, lr: laconic.optim.AdamW4bit(model.parameters(), lr=lr, weight_decay=0.0))


def in_backward(optimizer_class: Callable[..., Any]) -> Change:
    """An optimizer of laconic that updates each weight in backward."""

    def make(model: Any, lr: float) -> torch.optim.Optimizer:
        made = optimizer_class(model.parameters(), lr=lr, weight_decay=0.0)
        made.update_in_backward()
        return made

    return optimizer(make)


def peer_adamw(module: str, name: str) -> Change:
    """An optimizer of another package with the arguments of AdamW."""

    def make(model: Any, lr: float) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), name)(model.parameters(), lr=lr, weight_decay=0.0)

    return optimizer(make)


def coded_gradients(bits: int) -> Change:
    """laconic.compress_gradients."""

    def change(training: Training, ids: Tensor) -> None:
        training.gradients = laconic.compress_gradients(training.model, bits=bits)

    return change


def _low_rank(module: str, name: str, **how: Any) -> Change:
    def make(model: Any, lr: float) -> torch.optim.Optimizer:
        projected = [p for key, p in model.named_parameters() if p.dim() == 2 and ".layers." in key]
        chosen = {id(p) for p in projected}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        fields = {"rank": model.config.hidden_size // 4, "update_proj_gap": 200, "proj_type": "std"} | how
        extra = {"no_deprecation_warning": True} if name.endswith("AdamW") else {}
        groups = [{"params": rest}, {"params": projected, **fields}]
        return getattr(importlib.import_module(module), name)(groups, lr=_DOCUMENTED * lr, weight_decay=0.0, **extra)

    return optimizer(make)


_APOLLO_LICENCE = "its licence (CC BY-NC) keeps it out of laconic[bench]"
_Q_GALORE = {"quant": True, "quant_group_size": 256, "quant_n_bit": 4, "cos_threshold": 0.4, "gamma_proj": 2,
             "queue_size": 5, "scale": 0.25}  # fmt: skip


def contenders() -> list[Contender]:
    """The rows of the table."""
    channel = {"proj": "random", "scale_type": "channel", "scale": 1}
    tensor = {"proj": "random", "scale_type": "tensor", "scale": 128, "rank": 1}
    return [
        Contender(EXACT),
        Contender("laconic, AdamW8bit", [adamw8bit()]),
        Contender("laconic, AdamW8bit, gradients in 8 bits", [adamw8bit(), coded_gradients(8)], own_weights=True),
        Contender("laconic, AdamW8bit, gradients in 12 bits", [adamw8bit(), coded_gradients(12)], own_weights=True),
        Contender("laconic, AdamW8bit, updates in backward", [in_backward(laconic.AdamW8bit)], own_weights=True),
        Contender("laconic, AdamW4bit", [adamw4bit()]),
        Contender("laconic, AdamW4bit, updates in backward", [in_backward(laconic.optim.AdamW4bit)], own_weights=True),
        Contender("bitsandbytes, AdamW8bit", [peer_adamw("bitsandbytes.optim", "AdamW8bit")], package="bitsandbytes"),
        Contender("torchao, AdamW8bit", [peer_adamw("torchao.optim", "AdamW8bit")], package="torchao"),
        Contender("torchao, AdamW4bit", [peer_adamw("torchao.optim", "AdamW4bit")], package="torchao"),
        Contender("torchao, AdamWFp8", [peer_adamw("torchao.optim", "AdamWFp8")], package="torchao"),
        Contender("GaLore, AdamW", [_low_rank("galore_torch", "GaLoreAdamW", scale=0.25)], package="galore_torch"),
        Contender("GaLore, AdamW8bit", [_low_rank("galore_torch", "GaLoreAdamW8bit", scale=0.25)],
                  package="galore_torch", cannot="needs a GPU: it waits for a CUDA stream in each step"),
        Contender("Q-GaLore, AdamW8bit", [_low_rank("q_galore_torch", "QGaLoreAdamW8bit", **_Q_GALORE)],
                  package="q_galore_torch", cannot="needs a GPU and an older bitsandbytes"),
        Contender("APOLLO", [_low_rank("apollo_torch", "APOLLOAdamW", **channel)], package="apollo_torch",
                  optional=_APOLLO_LICENCE),
        Contender("APOLLO-Mini", [_low_rank("apollo_torch", "APOLLOAdamW", **tensor)], package="apollo_torch",
                  optional=_APOLLO_LICENCE),
        Contender("torch, Adafactor",
                  [optimizer(lambda model, lr: torch.optim.Adafactor(model.parameters(), lr=_DOCUMENTED * lr))]),
    ]  # fmt: skip
