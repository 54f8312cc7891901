"""Tiny runs: a corpus, a configuration that trains in a second, and what their metrics say."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.activations import decompress_activations
from laconic.train.config.recipes import RECIPES
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.distributed.world import World
from laconic.train.report.metrics import read_metrics
from laconic.train.run import run
from laconic.train.signals import StopRequest
from laconic.train.tasks.language_modeling import LanguageModeling
from laconic.train.trainer import Trainer

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))

_TINY: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "data.validation_fraction": 0.1,
    "optimizer.warmup_steps": 2,
    "steps": 6,
    "batch_size": 4,
    "sequence_length": 32,
    "eval_every": 3,
    "eval_sequences": 6,
    "nproc": 1,
    "zip": "off",  # tests of --zip switch it on; the others count bytes
    "audit": False,  # a fifth of such a run; tests/audit and test_audited_runs.py switch it on
}


AGOQ: dict[str, Any] = {
    f"{table}.{name}": value for table, values in RECIPES["agoq"].items() for name, value in values.items()
}
"""Everything compressed."""


def write_corpus(folder: Path) -> Path:
    """Ten files of made-up words; the same text each time."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(10):
        (folder / f"{index}.txt").write_text(" ".join(rng.choices(words, k=400)), encoding="utf-8")
    return folder


def tiny_config(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """A run of six steps in `folder`/`name` on the corpus in `folder`/corpus, with dotted `changes`.

    With model.path among these the model is that directory's, otherwise of sizes.
    """
    corpus = folder / "corpus"
    if not corpus.is_dir():
        write_corpus(corpus)
    paths = {"run_dir": str(folder / name), "data.paths": (str(corpus),), "data.cache_dir": str(folder / "cache")}
    tiny = {name: value for name, value in _TINY.items() if "model.path" not in (changes or {}) or "model." not in name}
    return load_config(None, {**tiny, **paths, **(changes or {})})


class StopAfter(StopRequest):
    """A request to stop that comes during step number `steps` of the process."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left <= 0


def train_alone(config: TrainConfig, stop_after: int | None = None) -> int:
    """Run `config` in this process, up to `stop_after` steps."""
    return run(config, ALONE, StopRequest() if stop_after is None else StopAfter(stop_after))


def trained_model(config: TrainConfig) -> nn.Module:
    """The model as it is in memory after `config` was run."""
    models: list[nn.Module] = []
    original = Trainer.evaluate

    def evaluate(self: Trainer) -> float | None:
        models.append(self.model)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", evaluate)
        train_alone(config)
    return decompress_activations(models[-1])


@contextmanager
def spoilt(steps: set[int], here: bool = True, gradients: bool = False) -> Iterator[None]:
    """Make the training loss NaN in these steps (0-based), if `here`; with `gradients` these alone are NaN."""
    step, loss = Trainer.step, LanguageModeling.loss
    current = {"step": 0}

    def counted_step(self: Trainer, number: int, *args: Any) -> Any:
        current["step"] = number
        return step(self, number, *args)

    def spoilt_loss(self: LanguageModeling, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value = loss(self, model, batch)
        if not (here and model.training and current["step"] in steps):
            return value
        if gradients:
            value.register_hook(lambda grad: grad * float("nan"))
        return value if gradients else value * float("nan")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", counted_step)
        patch.setattr(LanguageModeling, "loss", spoilt_loss)
        yield


def resumed(config: TrainConfig) -> TrainConfig:
    """`config` continued from its run directory."""
    return replace(config, resume=True)


def losses(run_dir: str | Path | None) -> dict[int, float]:
    """Loss after each step of a run."""
    assert run_dir is not None
    return {row["step"]: row["loss"] for row in read_metrics(run_dir) if "loss" in row}


def exact_metrics(run_dir: str | Path | None) -> list[tuple[str, ...]]:
    """All that a run's metrics say about numbers, as hex floats: equal means equal bit for bit."""
    assert run_dir is not None
    names = ("loss", "grad_norm", "learning_rate", "validation_loss")
    return [
        (str(row["step"]), *(float(row[name]).hex() for name in names if name in row)) for row in read_metrics(run_dir)
    ]
