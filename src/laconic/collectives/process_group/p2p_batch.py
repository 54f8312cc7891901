"""Sends and receives over NCCL that start together.

Two ranks that both send first and receive then wait for each other for ever, unless NCCL is told of both at once.
torch's batch_isend_irecv tells it so for groups of exactly its own class; for others it calls isend and irecv one by
one. So what is asked for here is put off until one of it is waited for or the group is used for something else, and
started as one then.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Batches"]

_NO_TIMEOUT = timedelta()


class Batches:
    """The sends and receives of a group that have not been started, and those that have."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pending: _Batch | None = None

    def add(self, tensor: Tensor, start: Callable[[], object]) -> dist.Work:
        """Put off `start`, which sends or receives `tensor`."""
        if self._pending is None or self._pending.device != tensor.device:
            self.start()
            self._pending = _Batch(self, tensor.device)
        self._pending.add(start)
        return _BatchedWork(self._pending, tensor)

    def start(self) -> None:
        """Start what was put off."""
        batch, self._pending = self._pending, None
        if batch is not None:
            batch.start(self._group)


class _Batch:
    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.device = device
        self._batches = batches
        self._starts: list[Callable[[], object]] = []
        self._ready: list[torch.cuda.Event] = []
        self._work: dist.Work | None = None

    def add(self, start: Callable[[], object]) -> None:
        self._starts.append(start)
        if self.device.type == "cuda":
            # The tensor belongs to the stream that is current now, which need not be the one in which all start.
            self._ready.append(torch.cuda.current_stream(self.device).record_event())

    def start(self, group: dist.ProcessGroup) -> None:
        for event in self._ready:
            torch.cuda.current_stream(self.device).wait_event(event)
        group._start_coalescing(self.device)
        for start in self._starts:
            start()
        self._work = group._end_coalescing(self.device)

    def work(self) -> dist.Work:
        if self._work is None:
            self._batches.start()
        assert self._work is not None, "only the newest batch is not started"
        return self._work


class _BatchedWork(dist.Work):
    def __init__(self, batch: _Batch, tensor: Tensor) -> None:
        super().__init__()
        self._batch = batch
        self._tensor = tensor  # has to live until it is sent

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return self._batch.work().wait(timeout)

    def is_completed(self) -> bool:
        return self._batch.work().is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._batch.work().get_future().then(lambda done: (done.value(), [self._tensor])[1])

    def result(self) -> list[Tensor]:
        return [self._tensor]

    def synchronize(self) -> None:
        self.wait()
