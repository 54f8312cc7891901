"""Updates of AdamW with moments in 8 and 4 bits beside the exact ones, along one exact training run.

Losses of two runs part by chance, so what coded moments do to a step is hard to see in them. Here only exact AdamW
moves the weights. Every follower gets the same gradients and keeps moments of its own; its update u' is held against
the exact update u of the same step:

- error: ||u' - u|| / ||u||, random as well as systematic;
- length along u: <u', u> / <u, u>; less than 1 is a learning rate that is too small;
- gain: sum of lr <g', u'>, in nats, with the gradient g' of a batch that no moment has seen, at the same weights: how
  far its loss falls by these steps in first order; and how much less that is than with u. Beside it the standard error
  of this difference, from its spread over the steps.

The model, its batches and its learning rate are those of `benchmarks.quality --size medium` (10 million parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import stdev
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.captured import LENGTH, batch_of_text
from benchmarks.kit.peers import installed
from benchmarks.registry import Options, Table, benchmark, kernels_note
from laconic.optim import AdamW8bit
from laconic.train.config.schema import ModelConfig, OptimizerConfig
from laconic.train.lr_schedule import learning_rate
from laconic.train.model import build_model

_STEPS = 320
_PARTS = 4
_SEQUENCES = 8
_MODEL = ModelConfig(hidden_size=320, intermediate_size=864, num_hidden_layers=8, num_attention_heads=5)
_SMALL_MODEL = ModelConfig()
_RATE = OptimizerConfig(learning_rate=1e-3)
_EVERY = 4
"""Steps from one comparison to the next."""
_UNSEEN = 10_000
"""The first number of batches that are not trained on."""

Update = dict[str, Tensor]


class _Follower:
    """An optimizer whose weights are its last update: they are set to zero before each step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], names: list[str], weights: list[Tensor]) -> None:
        self._names = names
        self._own = [nn.Parameter(torch.zeros_like(weight)) for weight in weights]
        self._optimizer = make(self._own, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> Update:
        """What it takes off the weights at a learning rate of 1."""
        for own, gradient in zip(self._own, gradients, strict=True):
            own.zero_()
            own.grad = gradient
        self._optimizer.step()
        return {name: -own.detach() for name, own in zip(self._names, self._own, strict=True)}


class _Sums:
    """Of products of updates and gradients over weights, by step."""

    def __init__(self) -> None:
        self.wrong = self.along = self.exact = self.gain = 0.0
        self.lost: list[float] = []

    def add(self, found: Update, exact: Update, unseen: Update, rate: float) -> None:
        lost = 0.0
        for name, u in exact.items():
            error = found[name] - u
            self.wrong += _product(error, error)
            self.along += _product(found[name], u)
            self.exact += _product(u, u)
            self.gain += rate * _product(found[name], unseen[name])
            lost -= rate * _product(error, unseen[name])
        self.lost.append(lost)

    def row(self) -> list[str]:
        count = len(self.lost)
        return [
            f"{(self.wrong / self.exact) ** 0.5:.4f}",
            f"{self.along / self.exact:.4f}",
            f"{_EVERY * self.gain:.4f}",
            f"{_EVERY * sum(self.lost):+.4f} ({_EVERY * stdev(self.lost) * count**0.5:.4f})",
        ]


def _product(a: Tensor, b: Tensor) -> float:
    return (a * b).sum(dtype=torch.float64).item()


def _makers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    found: dict[str, Any] = {"AdamW8bit": AdamW8bit, "AdamW8bit, bits=4": partial(AdamW8bit, bits=4)}
    for package in ("bitsandbytes", "torchao"):
        if (theirs := installed(package, "optim")) is not None:
            found[f"{package} AdamW8bit"] = theirs.AdamW8bit
    return found


@benchmark("adamw-updates")
def adamw_updates(options: Options) -> list[Table]:
    """Error, length and gain of updates by part of the run."""
    steps = _PARTS * _EVERY * 3 if options.small else _STEPS
    model = build_model(_SMALL_MODEL if options.small else _MODEL, 257, LENGTH, 0)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    exact = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    follow = partial(_Follower, names=list(matrices), weights=list(matrices.values()))
    followers = {"exact": follow(partial(torch.optim.AdamW, fused=True))}
    followers |= {name: follow(make) for name, make in _makers().items()}

    def gradients_of(number: int) -> tuple[float, list[Tensor]]:
        exact.zero_grad()
        batch = batch_of_text(number)[:_SEQUENCES]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        return loss.item(), [p.grad for p in matrices.values() if p.grad is not None]

    sums: dict[tuple[str, int], _Sums] = {}
    losses = []
    for step in range(steps):
        rate = learning_rate(_RATE, step, steps)
        unseen: Update | None = None
        if step % _EVERY == _EVERY - 1:
            unseen = dict(zip(matrices, gradients_of(_UNSEEN + step)[1], strict=True))
        loss, gradients = gradients_of(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates = {name: follower.step(gradients) for name, follower in followers.items()}
        if unseen is not None:
            for name in updates.keys() - {"exact"}:
                part = sums.setdefault((name, step * _PARTS // steps), _Sums())
                part.add(updates[name], updates["exact"], unseen, rate)
        losses.append(loss)
        for group in exact.param_groups:
            group["lr"] = rate
        exact.step()

    weights = sum(p.numel() for p in matrices.values())
    rows = [
        [name, f"{part * steps // _PARTS + 1} to {(part + 1) * steps // _PARTS}", *sums[name, part].row()]
        for name in followers
        if name != "exact"
        for part in range(_PARTS)
    ]
    note = (
        f"Every {_EVERY}th step is compared, for {_EVERY}. The exact run's loss falls from {losses[0]:.3f} to "
        f"{sum(losses[-10:]) / len(losses[-10:]):.3f} (mean of the last ten). {kernels_note()}"
    )
    columns = ["", "steps", "error", "length along the exact update", "gain, nats", "less than exact"]
    return [Table(f"{weights:,} weights in matrices, beta 0.9 and 0.95", columns, rows, note)]
