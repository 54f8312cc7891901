"""FSDP2's reduce-scatter in 8 bits.

The interface is in a private module of torch, so it is imported here only; should it move, this file says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import ConfigError
from laconic.gradients.reduce import NATIVE_BELOW_NBYTES, Op, reduce_scatter_q8

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has moved FSDP2's interface for custom reduce-scatters; laconic knows the place it"
        " has in torch 2.11 to 2.13"
    ) from error

__all__ = ["Q8ReduceScatter", "replicates"]


class Q8ReduceScatter(ReduceScatter):
    """`reduce_scatter_q8` for `FSDPModule.set_custom_reduce_scatter`.

    FSDP2 hands over one flat buffer of W equal chunks per unit, without borders of parameters; each chunk is quantized
    by itself. The reduced shard has the buffer's own type (`MixedPrecisionPolicy.reduce_dtype`); keep that fp32: it
    costs no bytes on the wire.
    """

    def __init__(self, min_nbytes: int = NATIVE_BELOW_NBYTES) -> None:
        """`min_nbytes`: a unit whose gradients take fewer bytes goes by the native reduce-scatter."""
        self.min_nbytes = min_nbytes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce input_tensor [W * n] into output_tensor [n].

        Raises ConfigError for operations other than SUM and AVG, and for async_op, which FSDP2 does not use.
        """
        if async_op:
            raise ConfigError("async_op is True, but Q8ReduceScatter finishes before it returns; pass False")
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"op is {op}, but a quantized reduce-scatter does SUM and AVG; call"
                " set_force_sum_reduction_for_comms(True) on the module, as quantize_reduction does"
            )
        name: Op = "avg" if op == dist.ReduceOp.AVG else "sum"
        output_tensor.copy_(reduce_scatter_q8(input_tensor, group, op=name, min_nbytes=self.min_nbytes))
        return None


def replicates(module: Any) -> bool:
    """Whether an FSDPModule holds copies of its shards on other ranks (HSDP), which FSDP2 all-reduces natively."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and isinstance(group.mesh_info, HSDPMeshInfo) for group in groups)
