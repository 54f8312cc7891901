"""Counts the bytes that a process sends, from the collectives that it issues.

Every collective, from Python or from DDP's C++ reducer, passes torch's dispatcher as an operator of `c10d` or
`_c10d_functional`, where a dispatch mode sees its tensors. Bytes follow from those by what the bandwidth-optimal
algorithm (the ring, as in NCCL and gloo) sends per process: with W processes and N bytes,

    all-reduce of N                        2 (W - 1) / W * N
    all-gather of N per process            (W - 1) * N
    reduce-scatter, all-to-all of N        (W - 1) / W * N
    broadcast of N                         N (in a ring all but the last process pass it on)
    send of N                              N

W is the size of the group that a collective runs in, which may be smaller than the run.

Quantized reductions run in a background thread, where no dispatch mode of this one sees them; they count their own
bytes by the same formulas.

A dispatch mode slows down every operator, so it is open for one step only; each step issues the same collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.collectives.runtime.torch_compat import sent_in_background_nbytes


class WireCounter(TorchDispatchMode):
    """Context manager: after the block, `nbytes` is what this process sent inside it.

    `world_size` stands for the size of a group that an operator does not name.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self.nbytes = 0
        """Bytes sent."""
        self._background_nbytes = 0

    def __enter__(self) -> WireCounter:
        self._background_nbytes = sent_in_background_nbytes()
        if self._world_size > 1:  # else nothing is sent, and seeing each operation costs a small step much
            super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._world_size > 1:
            super().__exit__(*exception)
        self.nbytes += sent_in_background_nbytes() - self._background_nbytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            # (output, input, group, ...) for the operators that have both, (tensors, group, ...) for those in place.
            self._count(func.__name__, args[:2], self._group_size(args[1:3]))
        elif func.namespace == "_c10d_functional":
            self._count(func.__name__, (args[0], args[0]), self._group_size(args[-1:]))
        return func(*args, **(kwargs or {}))

    def _group_size(self, candidates: Sequence[Any]) -> int:
        for value in candidates:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return dist.ProcessGroup.unbox(value).size()
            if isinstance(value, dist.ProcessGroup):
                return value.size()
            if isinstance(value, str):
                # Functional collectives name their group; torch has no public way from the name to the group.
                return dist.distributed_c10d._resolve_process_group(value).size()  # type: ignore[attr-defined, arg-type]
        return self._world_size

    def _count(self, name: str, tensors: Sequence[Any], group_size: int) -> None:
        others = group_size - 1
        if "reduce_scatter" in name or "all_to_all" in name or "alltoall" in name:
            self.nbytes += others * _nbytes(tensors[1]) // group_size
        elif "allgather" in name or "all_gather" in name:
            self.nbytes += others * _nbytes(tensors[1])
        elif "allreduce" in name or "all_reduce" in name:
            self.nbytes += 2 * others * _nbytes(tensors[0]) // group_size
        elif "broadcast" in name or name.startswith("send"):
            self.nbytes += _nbytes(tensors[0])
        # Receives, barriers and waits carry nothing out.


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
