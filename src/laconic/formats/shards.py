"""The local part of a distributed tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["local_part", "sharded_like"]


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
