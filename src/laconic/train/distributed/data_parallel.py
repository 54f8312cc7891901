"""Data parallelism: wraps a model that was built and compressed before and knows nothing of this file.

DDP keeps a full copy per process and averages gradients in buckets. FSDP2 shards parameters, gradients and optimizer
state over the processes, one unit per decoder layer and one for the rest. One process runs the plain model through the
same calls.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from laconic.gradients import quantize_reduction
from laconic.moe.huggingface import Parallelized
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World
from laconic.train.model_split import Gap, decoder_stack


def wrap_model(
    model: nn.Module,
    config: TrainConfig,
    world: World,
    parallel_state: ParallelState,
    experts: Parallelized | None = None,
) -> nn.Module:
    """`model`, already on `world.device` and the same on every replica, made data parallel; unchanged for one replica.

    Unchanged also where gradients are stored and reduced in codes, overlap backward of expert layers or stay each
    process's own (local steps), which needs no wrapper. With FSDP2 and bf16 the layers compute and are gathered in
    bf16, while shards, gradients and their reduction stay fp32. `experts` says which parameters are not the same
    everywhere: DDP leaves them alone, FSDP2 shards them over the processes that have them.
    """
    bare = config.gradients.bits < 32 or config.moe.overlap_grad_reduce or config.local_steps
    if parallel_state.stage_group is None or (config.parallel == "ddp" and bare):
        return model
    spread = None if experts is None or experts.grid is None else experts
    wrapped = _wrapped(model, parallel_state.stage_group, config, world, spread)
    if config.reduce == "q8":
        quantize_reduction(wrapped)
    return wrapped


def _wrapped(
    model: nn.Module, group: dist.ProcessGroup, config: TrainConfig, world: World, spread: Parallelized | None
) -> nn.Module:
    if config.parallel == "ddp":
        # Nothing here changes buffers in forward, so they need no broadcast. torch 2.13 renamed the switch.
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters
        no_broadcast: dict[str, Any] = {
            "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False
        }
        return DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            **no_broadcast,
        )
    policy = MixedPrecisionPolicy()
    if config.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if spread is not None:
        spread.fully_shard(decoder_layers(model), mp_policy=policy, reshard_after_forward=True)
        return model
    mesh = DeviceMesh.from_group(group, world.device.type)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def plain_model(model: nn.Module) -> nn.Module:
    """The module inside a DDP wrapper, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of `decoder_stack` that `model` has."""
    stack = decoder_stack(model)
    return [] if stack is None else [layer for layer in stack if not isinstance(layer, Gap)]


def autocast(
    model: nn.Module, device: torch.device, precision: Literal["fp32", "bf16"]
) -> AbstractContextManager[object]:
    """The context a forward runs in: bf16 autocast, or nothing for fp32 and for FSDP2, which casts by itself."""
    if precision == "bf16" and not isinstance(model, FSDPModule):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class RunningStatistics:
    """Running mean, variance and number of batches of all batch normalizations of `model`; often there are none.

    Each replica normalizes over its own micro-batch, as DDP does by default, and its statistics follow its own images.
    After each step they are averaged, so that evaluations and checkpoints do not depend on the rank.

    Args:
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
