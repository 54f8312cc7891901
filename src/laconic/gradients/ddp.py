"""DistributedDataParallel's buckets reduced in 8 bits: a communication hook and its state."""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.engine.layouts import TwoLevel
from laconic.collectives.integrations.ddp import check_join
from laconic.gradients.reduce import NATIVE_BELOW_NBYTES, all_reduce_q8

_Hook = Callable[["Q8HookState", GradBucket], torch.futures.Future[Tensor]]


@dataclass(eq=False)
class Q8HookState:
    """State of `q8_hook`; the arguments are those of `ddp_q8_hook`."""

    group: dist.ProcessGroup | TwoLevel | None
    error_feedback: bool
    min_nbytes: int
    model: ref[DistributedDataParallel] | None = None
    """The model, if it is known; see `check_join`."""
    # By parameter and not by bucket: DDP cuts its buckets anew after the first step.
    errors: dict[Tensor, Tensor] = field(default_factory=dict)
    """With error feedback: what this rank's codes of each parameter's gradient have lost, fp32 [numel]."""


def ddp_q8_hook(
    group: dist.ProcessGroup | TwoLevel | None = None,
    *,
    error_feedback: bool = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
) -> tuple[Q8HookState, _Hook]:
    """Make a hook for DDP: `model.register_comm_hook(*ddp_q8_hook())` averages gradients in 8 bits.

    Buckets are sent in the background while backward goes on. Gradients must be fp32, bf16 or fp16.

    Args:
        group: the ranks of the DDP model; the default group if None; `TwoLevel` reduces inside each node first.
        error_feedback: add what a rank's codes lost to its next gradient, for 4 bytes per parameter. Not with TwoLevel.
        min_nbytes: a bucket of fewer bytes is averaged by the native all-reduce.

    Returns:
        The arguments of `register_comm_hook`.
    """
    return Q8HookState(group, error_feedback, min_nbytes), q8_hook


def q8_hook(state: Q8HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket's gradients [numel] in place by `all_reduce_q8`; DDP calls it for each bucket."""
    check_join(state.model)
    buffer = bucket.buffer()
    if not state.error_feedback:
        return all_reduce_q8(buffer, state.group, async_op=True, min_nbytes=state.min_nbytes).get_future()
    parameters = bucket.parameters()
    for parameter in parameters:
        if parameter not in state.errors:
            state.errors[parameter] = torch.zeros(parameter.numel(), device=buffer.device, dtype=torch.float32)
    each = [state.errors[parameter] for parameter in parameters]
    error = torch.cat(each)
    work = all_reduce_q8(buffer, state.group, async_op=True, min_nbytes=state.min_nbytes, error=error)

    def keep(reduced: Tensor) -> Tensor:
        for kept, new in zip(each, error.split([kept.numel() for kept in each]), strict=True):
            kept.copy_(new)
        return reduced

    # Where the reduction runs, which holds `error` as long as the device reads it; a callback of the future would not.
    return work.map(keep).get_future()
