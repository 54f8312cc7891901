"""Training on real text, the sources of Python's standard library: what a contender's loss is after some steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders.training import LEARNING_RATE, Contender, Training, built
from benchmarks.kit.models import causal_model
from laconic.train.config.schema import DataConfig
from laconic.train.data.corpus import TokenCorpus, TokenDataset, prepare

LENGTH = 128
"""Bytes of a training sequence."""

_HELD_OUT = 128


@dataclass(frozen=True)
class Run:
    """A model and the length of its training."""

    hidden: int
    layers: int
    batch_size: int
    steps: int

    @classmethod
    def of(cls, small: bool, smoke: bool) -> Run:
        """A million parameters, or fewer."""
        return cls(32, 1, 4, 4) if smoke else cls(64, 2, 8, 60) if small else cls(128, 5, 8, 200)


def llama(hidden: int, layers: int, vocabulary: int, seed: int = 0) -> nn.Module:
    """A Llama with random weights."""
    head_dim = 64 if hidden >= 256 else 32
    model = causal_model(
        "llama",
        hidden,
        head_dim=head_dim,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        intermediate_size=hidden * 11 // 4,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    for parameter in model.parameters():  # causal_model draws the same in every call
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


@cache
def corpus() -> TokenCorpus:
    """The bytes of the standard library; token files are kept where the trainer keeps them."""
    return prepare(DataConfig())


def byte_pairs(sequences: int, length: int, vocabulary: int) -> Tensor:
    """Real text for a large vocabulary: pairs of bytes as tokens, int64 [sequences, length]."""
    data = TokenDataset(corpus().train, 2 * length)
    pairs = torch.stack([data[number * len(data) // sequences][:-1] for number in range(sequences)])
    return (pairs[:, ::2] * 256 + pairs[:, 1::2]) % vocabulary


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a tenth of the steps to warm up, then half a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + cos(pi * (step - warm_up) / max(1, steps - warm_up)))


def held_out_loss(model: Any) -> float:
    """Loss over held-out text, nats per byte."""
    data = TokenDataset(corpus().validation, LENGTH)
    ids = torch.stack([data[number * len(data) // _HELD_OUT] for number in range(_HELD_OUT)])
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss for part in ids.split(16)]
    return torch.stack(losses).mean().item()


def train(contender: Contender, run: Run, seed: int) -> tuple[float, bool]:
    """Held-out loss after training, and whether training has the same bits as exact training.

    Contenders whose loss and gradients have the bits of exact ones in the first step, and that leave optimizer and
    gradients alone, are not trained: their loss is exact training's (nan is returned).
    """
    model = llama(run.hidden, run.layers, corpus().vocab_size, seed)
    data = TokenDataset(corpus().train, LENGTH)
    ids = list(data.drawn(seed, range(run.steps * run.batch_size)).split(run.batch_size))
    training = built(contender, copy.deepcopy(model).train(), ids[0], LEARNING_RATE)
    if contender.changes and _same_bits(training, Training(model.train()), ids[0]):
        return float("nan"), True
    optimizer = training.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, run.steps))
    for part in ids:
        training.step(part)
        schedule.step()
    return held_out_loss(training.model), False


def _same_bits(training: Training, exact: Training, ids: Tensor) -> bool:
    if training.make_optimizer is not exact.make_optimizer or training.gradients is not None:
        return False
    losses = [one.forward(ids) for one in (training, exact)]
    for loss in losses:
        loss.backward()
    pairs = list(zip(training.model.parameters(), exact.model.parameters(), strict=True))
    same = torch.equal(*losses) and all(torch.equal(a.grad, b.grad) for a, b in pairs)
    training.model.zero_grad()
    return same
