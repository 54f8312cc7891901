"""Compressed communication of a run (`--zip`): which messages go over which codec, and the lines that report it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import api
from laconic.collectives.codec import Codec, Lossless
from laconic.collectives.integrations.zip import zip_collectives
from laconic.collectives.policy.microbench import Ranks, gaussian
from laconic.collectives.policy.selector import choose, prepare
from laconic.collectives.runtime import torch_compat
from laconic.cost.comm.seconds import MIN_CODED_NBYTES, MIN_GAIN, NOT_PREPARED, RAW, TOO_SMALL
from laconic.errors import ModelError
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World

STATE_FILE = "collectives.json"
"""What `zip_model`'s state is called in a checkpoint."""

_MEASURED_NBYTES = 1 << 20
"""Of gradients, at most, in which DDP's sums are compared at the start."""
_REPEATS = 3


def zip_codec(config: TrainConfig) -> Codec | str | None:
    """The codec of all collectives of a run; None for torch's own collectives."""
    if config.zip == "off":
        return None
    return "auto" if config.zip == "auto" else Lossless()


def zip_model(
    modules: Sequence[nn.Module],
    config: TrainConfig,
    world: World,
    parallel_state: ParallelState,
    saved: str | None = None,
) -> tuple[list[str], str | None]:
    """Send the messages of the wrapped `modules` over the run's codec; all processes call it together.

    Messages that cannot go over a codec stay as they are, and the lines say why. With "auto" so do DDP's buckets unless
    a measurement at the start shows that a codec makes them faster: the hook sends every rank its part directly and
    adds in the order of ranks, while torch may send less between nodes and does not wait for Python.

    Args:
        saved: the state of the run that continues here, from its checkpoint.

    Returns:
        Lines that say what was attached and what was not, and the state that a checkpoint has to keep (`STATE_FILE`),
        so that a continued run makes the same sums.
    """
    codec = zip_codec(config)
    if codec is None or parallel_state.stage_group is None:
        return [], None
    state = None
    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if codec == "auto" and ddp and config.reduce != "q8":
        kept = None if saved is None else _Sums(**json.loads(saved))
        if kept is None or kept.num_replicas != parallel_state.num_replicas:
            # Stages may differ; they all do as the first process does, whose answer is saved.
            coded, reason = world.gather(_sums_of_ddp(ddp, parallel_state.stage_group, world.device))[0]
            kept = _Sums(parallel_state.num_replicas, coded, reason)
        state = json.dumps(asdict(kept))
        if not kept.coded:
            return [f"DDP: all_reduce left to torch, {kept.reason}"], state
    lines = []
    for module in modules:
        try:
            prefetch = world.device.type == "cpu" and isinstance(module, FSDPModule)
            lines += str(zip_collectives(module, codec=codec, prefetch=prefetch)).splitlines()
        except ModelError as error:
            lines.append(f"nothing is shortened losslessly: {error}")
    return list(dict.fromkeys(lines)), state


@dataclass(frozen=True)
class _Sums:
    num_replicas: int
    coded: bool
    reason: str


def _sums_of_ddp(
    modules: Sequence[DistributedDataParallel], group: dist.ProcessGroup, device: torch.device
) -> tuple[bool, str]:
    """Whether buckets should go over the codec, and why; the same on all ranks of the group."""
    numels: dict[torch.dtype, int] = {}
    for module in modules:
        for name, parameter in module.module.named_parameters():
            if parameter.requires_grad and name not in module.parameters_to_ignore:
                numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(numels, key=lambda dtype: numels[dtype] * dtype.itemsize)
    nbytes = min(numels[dtype] * dtype.itemsize, _MEASURED_NBYTES)
    if nbytes < MIN_CODED_NBYTES:
        return False, TOO_SMALL
    torchs, ours = seconds_of_sums(nbytes // dtype.itemsize, dtype, group, device)
    took = f"for {nbytes / 1e6:.2f} MB torch's took {1e3 * torchs:.1f} ms, that over a codec {1e3 * ours:.1f} ms"
    return ours < (1 - MIN_GAIN) * torchs, took


def seconds_of_sums(
    numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> tuple[float, float]:
    """Seconds of an all-reduce by torch and of one over the faster codec, the same on all ranks of `group`."""
    x, ranks = gaussian(numel, dtype, device), Ranks(group, device)

    def ours() -> None:
        api.all_reduce(x.clone(), group, op="avg", codec="auto")

    def torchs() -> None:
        torch_compat.all_reduce(x.clone(), group).wait()

    # What is not counted comes first, and may have to ask what link and codec can do.
    for_torch, for_us = zip(*ranks.in_turn([torchs, ours], _REPEATS), strict=True)
    return median(for_torch), median(for_us)


def stage_codec(config: TrainConfig, hidden: Tensor, group: dist.ProcessGroup | None) -> tuple[Lossless | None, str]:
    """The codec between the stages of a run's pipeline, and a line that says why.

    The decision is made once: both ends of a message have to know it.

    Args:
        hidden: stands for the stages' messages, on any device.
    """
    if config.zip == "off":
        return None, "between stages: left as it is"
    assert group is not None, "a pipeline has at least two stages"
    backend = dist.get_backend(group)
    if backend != "gloo":
        return None, f"between stages: left to {backend}; only gloo delivers messages whose length is not known before"
    if config.zip == "on":
        return Lossless(), "between stages: shortened losslessly"
    choice = choose("send", hidden.numel(), hidden.dtype, group)
    if choice.reason == NOT_PREPARED:  # large enough to ask what link and codec can do
        prepare(group)
        choice = choose("send", hidden.numel(), hidden.dtype, group)
    if choice.codec == RAW:
        return None, f"between stages: left as it is, {choice.reason}"
    return Lossless(choice.codec), f"between stages: shortened losslessly ({choice.codec}), {choice.reason}"
