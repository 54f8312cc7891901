"""A process group of one process on the simulated device: every other rank has what this one has.

`ranks.py` has groups of several processes, with values of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.streams.stream_group import StreamGroup, StreamWork

__all__ = ["echo"]


class _Echo(StreamGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._sent: dict[int, deque[tuple[Tensor, StreamWork]]] = {}
        self._received: dict[int, deque[tuple[Tensor, StreamWork]]] = {}

    def getBackendName(self) -> str:
        return "echo"

    # --- collectives ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        factor = self.size() if opts is None or opts.reduceOp == dist.ReduceOp.SUM else 1
        return self.start(lambda: [x.mul_(factor) for x in tensors], tensors, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        return self.start(lambda: [x.mul_(1) for x in tensors], tensors, tensors, opts)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> StreamWork:
        return self.start(lambda: [x.copy_(ins[0]) for x in outs[0]], ins + outs[0], outs[0], opts)

    def _allgather_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> StreamWork:
        rows = out.view(self.size(), -1)
        return self.start(lambda: [row.copy_(mine.view(-1)) for row in rows], [out, mine], [out], opts)

    def _reduce_scatter_base(self, out: Tensor, rows: Tensor, opts: Any = None) -> StreamWork:
        factor = self.size() if opts is None or opts.reduceOp == dist.ReduceOp.SUM else 1
        mine = rows.view(self.size(), -1)[self.rank()]
        return self.start(lambda: out.view(-1).copy_(mine).mul_(factor), [out, rows], [out], opts)

    def alltoall_base(self, out: Tensor, rows: Tensor, _: Any, __: Any, opts: Any = None) -> StreamWork:
        return self.alltoall(list(out.view(self.size(), -1)), list(rows.view(self.size(), -1)), opts)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> StreamWork:
        def run() -> None:
            whole, mine = torch.cat([x.reshape(-1) for x in ins]), ins[self.rank()]
            for out in outs:
                if out.numel() == mine.numel():
                    out.copy_(mine)
                elif out.numel():  # another rank need not send as much: something of that length
                    values = whole if whole.numel() else torch.zeros_like(out).view(-1)
                    out.view(-1).copy_(values.repeat(out.numel() // values.numel() + 1)[: out.numel()])

        return self.start(run, outs + ins, outs, opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    # --- point to point: what this rank sends to another one comes back from there ---

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        return self._post(tensors[0], self._sent.setdefault(peer, deque()), peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        return self._post(tensors[0], self._received.setdefault(peer, deque()), peer)

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> StreamWork:
        work = StreamWork([], [])
        work.event = self.stream.record_event()
        return work

    def _post(self, x: Tensor, box: deque[tuple[Tensor, StreamWork]], peer: int) -> StreamWork:
        work = StreamWork([x], [x])
        box.append((x, work))
        with torch.no_grad(), self.on_stream([x]):
            while self._sent.get(peer) and self._received.get(peer):
                (sent, one), (received, other) = self._sent[peer].popleft(), self._received[peer].popleft()
                assert sent.numel() == received.numel(), "this rank expects from another what it does not send"
                received.view(-1).copy_(sent.view(-1))
                self.finish(one)
                self.finish(other)
        return work


dist.Backend.register_backend("echo", _Echo, devices=["cpu", "cuda"])


@contextmanager
def echo(size: int = 2) -> Iterator[dist.ProcessGroup]:
    """Yield the default group: this is rank 0 of `size`. Enter the device before."""
    dist.init_process_group("echo", store=dist.HashStore(), rank=0, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
