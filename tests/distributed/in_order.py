"""A process group with NCCL's rules over gloo: messages meet in their order, and none of unequal length are delivered.

A message whose peer does something else hangs until the group is aborted. With `is_used_on_cpu` the package takes the
path of such backends for CPU tensors.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.engine import call, transport

__all__ = ["InOrder", "is_used_on_cpu"]


class _Work(dist.Work):
    def __init__(self, group: InOrder, work: dist.Work, held: list[Tensor]) -> None:
        super().__init__()
        self._group, self._work, self._held = group, work, held
        self._error: RuntimeError | None = None
        self._is_done = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._is_done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._is_done.wait(0.001):
            if self._group.is_aborted:
                raise RuntimeError("the communicator was aborted")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_done.is_set()


class InOrder(dist.ProcessGroup):
    """The backend "in_order"; counts its calls."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.is_aborted = False
        self.num_calls: Counter[str] = Counter()

    def getBackendName(self) -> str:
        return "in_order"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        self.num_calls["send"] += 1
        return _Work(self, self._gloo.send(tensors, peer, tensors[0].nbytes), tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return _Work(self, self._gloo.recv(tensors, peer, tensors[0].nbytes), tensors)

    def _allgather_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> _Work:
        self.num_calls["all_gather"] += 1
        rows = list(out.view(self.size(), -1))
        return _Work(self, self._gloo.allgather([rows], [mine.view(-1)]), [out, mine])

    all_gather_single = _allgather_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        self.num_calls["all_reduce"] += 1
        return _Work(self, self._gloo.allreduce(tensors), tensors)

    def abort(self) -> None:
        self.is_aborted = True


dist.Backend.register_backend("in_order", InOrder, devices=["cpu"])


@contextmanager
def is_used_on_cpu() -> Iterator[None]:
    """Inside, CPU tensors take the path of backends without tags."""
    with (
        mock.patch.object(transport, "has_tags", return_value=False),
        mock.patch.object(call, "has_tags", return_value=False),
    ):
        yield
