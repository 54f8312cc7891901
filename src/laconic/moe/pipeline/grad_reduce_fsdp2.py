"""FSDP2's reduce-scatters in gradient reduction slots.

FSDP2 reduces a unit's gradients as soon as its backward has ended and leaves the result in place: the gradients of its
sharded parameters are views of it. So the reduction may come later, in slices, as long as nobody reads those gradients
before `DenseGradients.finish`. Whatever would read them at once (a cast, a division, an accumulation, an all-reduce
behind it, a hook) is refused.

The reductions run in the thread of the link between nodes, while FSDP2 gathers parameters in the caller's. Therefore
they have process groups of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.collectives.integrations.fsdp2 import ReduceScatter, num_shards, param_groups, replicates
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.errors import ModelError, ScheduleError
from laconic.moe.layer import moe_layers
from laconic.moe.pipeline.grad_reduce import DenseGradients


def reduce_in_slots(model: nn.Module, gradients: DenseGradients) -> int:
    """Let the FSDP2 units of a model, apart from those in experts, reduce in slots of `gradients`.

    A unit keeps its reduction: torch's own reduce-scatter, that of `zip_collectives`, or the quantized one of
    `quantize_reduction`. All ranks call it together, after fully_shard and those. Micro-batches but the last must not
    reduce (`set_requires_gradient_sync(False)`), and gradients must be None before each backward that does.

    Returns:
        The number of groups of parameters that reduce in slots; those on one rank have nothing to reduce.

    Raises:
        ModelError: a unit's result is needed at once (over a 2-D mesh (HSDP), with an all-reduce hook, a divide factor,
            or offloaded to the host), or it reduces in slots already.
    """
    of_experts = {id(one) for layer in moe_layers(model).values() for one in layer.experts.modules()}
    own_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    number = 0
    for name, unit in model.named_modules():
        if not isinstance(unit, FSDPModule) or id(unit) in of_experts:
            continue
        for group in param_groups(unit):
            if isinstance(group._reduce_scatter_comm, _Deferred):
                raise ModelError(f"unit {name or type(model).__name__!r} reduces in slots already; call it once")
            if num_shards(group) == 1 and not replicates(group):
                continue
            _check(name or type(model).__name__, group)
            ranks = registered_ranks(group._reduce_scatter_process_group)
            if ranks not in own_groups:
                made = dist.new_group(list(ranks), use_local_synchronization=True)
                assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
                own_groups[ranks] = made
            # The mean in one step: a division afterwards would come before the sum.
            group.force_sum_reduction_for_comms = False
            group._reduce_scatter_comm = _Deferred(name, group, gradients, own_groups[ranks])
            number += 1
    return number


def _check(name: str, group: Any) -> None:
    why = (
        "is sharded over a 2-D mesh (HSDP), whose all-reduce follows at once; shard it over a 1-D mesh"
        if replicates(group)
        else "has an all-reduce hook, which follows at once; leave it out"
        if group._all_reduce_hook is not None
        else f"has the gradient divide factor {group.gradient_divide_factor}, and divides at once; leave it out"
        if group.gradient_divide_factor is not None
        else "is offloaded to the host, which copies its gradients at once; keep it on the device"
        if any(one.offload_to_cpu for one in group.fsdp_params)
        else None
    )
    if why is not None:
        raise ModelError(f"unit {name!r} {why}, or let it reduce outside of reduction slots")


class _Deferred(ReduceScatter):
    """Reduce-scatter that queues the reduction in a `DenseGradients`."""

    def __init__(self, name: str, group: Any, gradients: DenseGradients, own: dist.ProcessGroup) -> None:
        self._name, self._group, self._gradients, self._own = name, group, gradients, own
        self._inner: ReduceScatter = group._reduce_scatter_comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer outside any pool, because it lives until `finish`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Queue the reduction of input_tensor [W * n] into output_tensor [n]."""
        self._refuse_what_looks(output_tensor, op)
        rows = input_tensor.view(self._own.size(), -1)
        if input_tensor.is_cuda:
            self._gradients.hold(input_tensor, output_tensor)

        def reduce(first: int, last: int) -> None:
            part = rows[:, first:last].reshape(-1)
            self._inner(output_tensor[first:last], part, self._own, op)

        self._gradients.defer_slices(rows.shape[1], rows.shape[0] * rows.itemsize, reduce, input_tensor.device)
        return None

    def _refuse_what_looks(self, output: Tensor, op: Any) -> None:
        params = self._group.fsdp_params
        trained = [one.sharded_param for one in params if one.sharded_param.requires_grad]
        others = [one.dtype for one in trained if one.dtype != output.dtype]
        why = (
            f"reduces {output.dtype}, which is not the mean that the collective makes; use float32 or bfloat16"
            if op != dist.ReduceOp.AVG
            else f"reduces {output.dtype}, but its parameters are {others[0]}; set"
            " MixedPrecisionPolicy.reduce_dtype to that"
            if others
            else "has gradients already, to which this one would be added at once; set them to None, and let"
            " micro-batches but the last not reduce (set_requires_gradient_sync(False))"
            if any(one.sharded_param.grad is not None for one in params)
            else "has parameters with post-accumulate-grad hooks, which look at once; call them after finish"
            if any(getattr(one.sharded_param, "_post_accumulate_grad_hooks", None) for one in params)
            else None
        )
        if why is not None:
            raise ScheduleError(f"unit {self._name!r} reduces in slots, but {why}")
