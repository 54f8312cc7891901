"""A third task for the trainer: regression on the vectors of an .npz file with x [N, D] and y [N]."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from laconic.train.config.schema import TrainConfig
from laconic.train.data.sampler import sample_id
from laconic.train.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn


class VectorBatch(NamedTuple):
    """fp32 [n, D] and [n]."""

    x: Tensor
    y: Tensor

    def to(self, device: Any) -> VectorBatch:
        return VectorBatch(self.x.to(device), self.y.to(device))


class VectorRegression(Task):
    """A network of two layers; mean squared error."""

    unit = "vector"

    def __init__(self, config: TrainConfig, *_: Any) -> None:
        data = np.load(config.data.paths[0])
        self._x, self._y = data["x"].astype(np.float32), data["y"].astype(np.float32)
        self._seed, self._width = config.seed, config.model.hidden_size
        self.num_validation = len(self._y) // 4
        self.fingerprint = hashlib.sha256(self._x.tobytes() + self._y.tobytes()).hexdigest()

    def build_model(self) -> nn.Module:
        import torch
        from torch import nn

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return nn.Sequential(nn.Linear(self._x.shape[1], self._width), nn.SiLU(), nn.Linear(self._width, 1))

    def example_inputs(self, device: Any) -> dict[str, Any]:
        return {"input": self.training_batch(range(2)).x.to(device)}

    def training_batch(self, indices: range) -> VectorBatch:
        size = len(self._y) - self.num_validation
        return self._batch([self.num_validation + sample_id(self._seed, index, size) for index in indices])

    def validation_batch(self, samples: Sequence[int]) -> VectorBatch:
        return self._batch(list(samples))

    def loss(self, model: nn.Module, batch: VectorBatch) -> Tensor:
        loss: Tensor = (model(batch.x)[:, 0].float() - batch.y).square().mean()
        return loss

    def _batch(self, rows: list[int]) -> VectorBatch:
        import torch

        return VectorBatch(torch.from_numpy(self._x[rows]), torch.from_numpy(self._y[rows]))


TASK = VectorRegression
