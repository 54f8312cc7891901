"""The local part of a distributed tensor, and whose a sharded parameter is."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["is_deepspeeds", "local_part", "sharded_like"]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the local shard of a DTensor (FSDP2, tensor parallelism), else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A local shard of what lies over the ranks as `tensor` does: a DTensor beside a DTensor, else the shard itself."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def is_deepspeeds(parameter: Tensor) -> bool:
    """Whether a parameter is DeepSpeed's: ZeRO 3 partitions it, or ZeRO 1 or 2 updates it from a copy."""
    return hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None
