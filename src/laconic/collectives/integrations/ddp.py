"""DistributedDataParallel's buckets reduced over a codec: a communication hook and its state."""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import api
from laconic.collectives.codec import Codec, check_codec
from laconic.errors import ConfigError

_Hook = Callable[["ZipHookState", GradBucket], torch.futures.Future[Tensor]]


@dataclass(eq=False)
class ZipHookState:
    """State of `zip_hook`."""

    group: dist.ProcessGroup | None
    """The ranks of the DDP model; the default group if None."""
    codec: Codec | str
    """As in `api.all_reduce`."""
    native: bool = False
    """Average as DDP does without a hook, which a model that has one cannot get rid of."""
    model: ref[DistributedDataParallel] | None = None
    """The model, if it is known; see `check_join`."""


def check_join(model: ref[DistributedDataParallel] | None) -> None:
    """Refuse `join(divide_by_initial_world_size=False)`: torch tells no hook how many ranks still have inputs."""
    found = None if model is None else model()
    if found is not None and found._join_config.enable and not getattr(found, "_divide_by_initial_world_size", True):
        raise ConfigError(
            "divide_by_initial_world_size is False in join(), but a communication hook averages over all ranks of the"
            " group, also those without inputs; leave it True, or leave zip_collectives or quantize_reduction out"
        )


def ddp_zip_hook(group: dist.ProcessGroup | None = None, *, codec: Codec | str = "auto") -> tuple[ZipHookState, _Hook]:
    """Make a hook for DDP: `model.register_comm_hook(*ddp_zip_hook())` sends buckets over a codec, as all_reduce.

    Each element is summed in fp32 in the order of ranks, multiplied by fp32(1 / W) and rounded once: the same bits on
    every rank and in every run, whatever the codec and however DDP cuts its buckets. Buckets are sent in the background
    while backward goes on. `group` are the ranks of the DDP model; the default group if None.
    """
    check_codec(codec)
    return ZipHookState(group, codec), zip_hook


def zip_hook(state: ZipHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket's gradients [numel] in place; DDP calls it for each bucket."""
    check_join(state.model)
    buffer = bucket.buffer()
    if state.native:
        group = dist.group.WORLD if state.group is None else state.group
        assert group is not None
        work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])
    return api.all_reduce(buffer, state.group, op="avg", codec=state.codec, async_op=True).get_future()
