"""What of a distributed tensor lies here."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["local_part"]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the local shard of a DTensor (FSDP2, tensor parallelism), else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
