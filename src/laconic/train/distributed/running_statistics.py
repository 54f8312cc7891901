"""Running statistics of batch normalization, kept the same on all replicas.

Each replica normalizes over its own micro-batch, as DDP does by default, and its running mean and variance follow its
own images. After each step they are averaged, so that evaluations and checkpoints do not depend on the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from laconic.train.distributed.world import World

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """Running mean, variance and number of batches of all batch normalizations of `model`; often there are none.

    Args:
        model: plain or wrapped.
        world, num_replicas: with one replica, nothing is averaged.
    """

    def __init__(self, model: nn.Module, world: World, num_replicas: int) -> None:
        self._world = world
        self._num_replicas = num_replicas
        self._buffers: list[Tensor] = [
            buffer
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
            if buffer is not None
        ]

    def copy(self) -> list[Tensor]:
        """The statistics as they are now."""
        return [buffer.clone() for buffer in self._buffers]

    def restore(self, statistics: list[Tensor]) -> None:
        """Go back to statistics that `copy` returned."""
        for buffer, value in zip(self._buffers, statistics, strict=True):
            buffer.copy_(value)

    def average(self) -> None:
        """Average mean and variance over the replicas; all processes call it together."""
        floating = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        if self._num_replicas == 1 or not floating:
            return
        flat = self._world.sum(torch.cat([buffer.flatten() for buffer in floating]).float()) / self._num_replicas
        for buffer, part in zip(floating, flat.split([buffer.numel() for buffer in floating]), strict=True):
            buffer.copy_(part.view_as(buffer))
