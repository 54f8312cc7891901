"""Counts the bytes a process sends, from the collectives that are really issued.

Every collective, from Python or from DDP's C++ reducer, passes torch's dispatcher as an operator of `c10d` or
`_c10d_functional`, where a dispatch mode sees its tensors. Bytes follow from those by what the bandwidth-optimal
algorithm (the ring, as in NCCL and gloo) sends per process: with W processes and N bytes,

    all-reduce of N                        2 (W - 1) / W * N
    all-gather of N per process            (W - 1) * N
    reduce-scatter, all-to-all of N        (W - 1) / W * N
    broadcast of N                         N (in a ring all but the last process pass it on)

A dispatch mode slows down every operator, so it is open for one step only; each step issues the same collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WireCounter"]


class WireCounter(TorchDispatchMode):
    """Context manager: after the block, `nbytes` is what this process, one of `world_size`, sent inside it."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self.nbytes = 0
        """Bytes sent."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            # (output, input, ...) for the operators that have both, (tensors, ...) for those in place.
            self._count(func.__name__, args[:2])
        elif func.namespace == "_c10d_functional":
            self._count(func.__name__, (args[0], args[0]))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensors: Sequence[Any]) -> None:
        others = self._world_size - 1
        if "reduce_scatter" in name or "all_to_all" in name or "alltoall" in name:
            self.nbytes += others * _nbytes(tensors[1]) // self._world_size
        elif "allgather" in name or "all_gather" in name:
            self.nbytes += others * _nbytes(tensors[1])
        elif "allreduce" in name or "all_reduce" in name:
            self.nbytes += 2 * others * _nbytes(tensors[0]) // self._world_size
        elif "broadcast" in name:
            self.nbytes += _nbytes(tensors[0])
        # Barriers and waits carry nothing.


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
