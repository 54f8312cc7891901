"""FSDP2's reduce-scatter in 8 bits."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.arguments import Op
from laconic.collectives.integrations.fsdp2 import OwnBuffers, ReduceScatter
from laconic.errors import ConfigError
from laconic.gradients.reduce import NATIVE_BELOW_NBYTES, reduce_scatter_q8


class Q8ReduceScatter(OwnBuffers, ReduceScatter):
    """`reduce_scatter_q8` for `FSDPModule.set_custom_reduce_scatter`; units of fewer than min_nbytes go natively.

    FSDP2 hands over one flat buffer of W equal chunks per unit, without borders of parameters; each chunk is quantized
    by itself. The reduced shard has the buffer's own type (`MixedPrecisionPolicy.reduce_dtype`); keep that fp32: the
    messages do not grow with it.
    """

    def __init__(self, min_nbytes: int = NATIVE_BELOW_NBYTES) -> None:
        self.min_nbytes = min_nbytes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce input_tensor [W * n] into output_tensor [n]; refuses all but SUM and AVG, and async_op."""
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
