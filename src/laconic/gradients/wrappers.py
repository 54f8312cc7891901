"""One call that makes the reduction of a DDP or FSDP2 model quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.engine.layouts import TwoLevel
from laconic.errors import ConfigError, ModelError
from laconic.gradients.ddp import ddp_q8_hook
from laconic.gradients.reduce import NATIVE_BELOW_NBYTES, all_reduce_q8
from laconic.ops import DTYPES


@dataclass(frozen=True)
class QuantizedReduction:
    """Summary of `quantize_reduction`: the wrapper, and how much is reduced in 8 bits."""

    wrapper: str
    """"DDP" or "FSDP2"."""
    num_units: int
    """Modules whose gradients are reduced in 8 bits: 1 for DDP, the FSDPModules for FSDP2."""
    num_elements: int
    """Gradient elements of these modules. FSDP2 itself reduces no parameter that lies in none of them."""

    def __str__(self) -> str:
        return f"{self.wrapper}: {self.num_elements:,} gradient elements in {self.num_units} unit(s) reduced in 8 bits"


def quantize_reduction(
    model: nn.Module,
    *,
    across: dist.ProcessGroup | TwoLevel | None = None,
    error_feedback: bool = False,
    min_nbytes: int = NATIVE_BELOW_NBYTES,
) -> QuantizedReduction:
    """Make a wrapped model reduce its gradients in 8 bits. Call it once, before the first backward.

    Gradient accumulation stays what it was: `no_sync`, `set_requires_gradient_sync`.

    Args:
        model: a DistributedDataParallel, or a module with fully_shard applied to it or inside it, wherever it was.
        across: DDP: the groups of a two-level reduction. FSDP2 on a mesh inside one node: the ranks of other nodes that
            hold the same shards; after the reduce-scatter the shard is averaged over them in 8 bits, which makes hybrid
            sharding (FSDP2's own all-reduce, on a 2-D mesh, cannot be replaced). They must start alike.
        error_feedback: see `ddp_q8_hook`; DDP only.
        min_nbytes: smaller buckets and units are reduced natively.

    Returns:
        The wrapper and the size of what is reduced in 8 bits.

    Raises:
        ModelError: the model is not wrapped, has gradients of a type that cannot be quantized, or is sharded over a 2-D
            mesh (HSDP).
        ConfigError: an argument does not go with the wrapper.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise ModelError(
                f"{name} is {parameter.dtype}, but its gradient must be float32, bfloat16 or float16 to be reduced in 8"
                " bits; convert the model or freeze the parameter"
            )
    if isinstance(model, DistributedDataParallel):
        num_elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        group = across or model.process_group
        state, q8_hook = ddp_q8_hook(group, error_feedback=error_feedback, min_nbytes=min_nbytes)
        state.model = ref(model)
        model.register_comm_hook(state, q8_hook)
        return QuantizedReduction("DDP", 1, num_elements)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ModelError(
            f"model is a {type(model).__name__} that neither DDP nor FSDP2 has wrapped; wrap it first"
            " (DistributedDataParallel(model), fully_shard(model)), or use compress_gradients(model, group=...), which"
            " needs no wrapper"
        )
    if error_feedback:
        raise ConfigError("error_feedback is True, but FSDP2 shows no parameters to keep errors for; it needs DDP")
    if isinstance(across, TwoLevel):
        raise ConfigError("across is a TwoLevel, but FSDP2 itself reduces inside the node; pass the group across nodes")
    from laconic.collectives.integrations.fsdp2 import DividedOnce, num_trained, param_groups, replicates
    from laconic.gradients.fsdp2 import Q8ReduceScatter

    if any(replicates(group) for unit in units for group in param_groups(unit)):
        raise ModelError(
            "the model is sharded over a 2-D mesh (HSDP), whose all-reduce FSDP2 does not let others replace; shard"
            " over the mesh inside the node only and pass the ranks across nodes as `across`"
        )
    for unit in units:
        # A plain sum, and FSDP2 divides afterwards: then every divide factor works.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_reduce_scatter(Q8ReduceScatter(min_nbytes))
        if across is not None:
            hook = partial(_average_across, group=across, min_nbytes=min_nbytes)
            before = [group._all_reduce_hook for group in param_groups(unit)]
            unit.set_all_reduce_hook(next((it.followed_by(hook) for it in before if isinstance(it, DividedOnce)), hook))
    num_elements = sum(num_trained(group) for unit in units for group in param_groups(unit))
    return QuantizedReduction("FSDP2", len(units), num_elements)


def _average_across(shard: Tensor, group: dist.ProcessGroup, min_nbytes: int) -> None:
    all_reduce_q8(shard, group, min_nbytes=min_nbytes)
