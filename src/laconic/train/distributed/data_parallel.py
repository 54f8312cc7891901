"""Data parallelism: wraps a model that was built and compressed before and knows nothing of this file.

DDP keeps a full copy per process and averages gradients in buckets. FSDP2 shards parameters, gradients and optimizer
state over the processes, one unit per decoder layer and one for the rest. One process runs the plain model through the
same calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from laconic.gradients import quantize_reduction
from laconic.moe.huggingface import Parallelized
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World
from laconic.train.model_split import Gap, decoder_stack

__all__ = [
    "accumulate",
    "autocast",
    "clip_gradients",
    "decoder_layers",
    "full_value",
    "gradient_norm",
    "plain_model",
    "wrap_model",
]


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


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """The context of one micro-batch's forward and backward; gradients are final after the `last`.

    DDP reduces once, after the last. FSDP2 reduces each micro-batch, so that gradients are never held in full.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


class _Distributed(Protocol):
    def full_tensor(self) -> torch.Tensor: ...


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients together, 0-dim fp32; under FSDP2 a DTensor, which `full_value` makes plain."""
    return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def full_value(norm: torch.Tensor) -> torch.Tensor:
    """A scalar that may be sharded, as one plain tensor, the same on each process."""
    return cast(_Distributed, norm).full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their 2-norm, `norm` now, is at most `max_norm`; 0 leaves them alone."""
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
