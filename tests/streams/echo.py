"""A process group of one process on the simulated device: every other rank has what this one has.

Collectives run as NCCL's do: those that the caller waits for on the current stream, the others and point-to-point
operations on a stream of the group, which waits for the current one. A work's `wait` makes the current stream wait;
until then the group holds the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["echo"]


class _Work(dist.Work):
    def __init__(self, held: list[Tensor], result: list[Tensor]) -> None:
        super().__init__()
        self.event: Any = None
        self._held, self._result = held, result

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        assert self.event is not None or not any(x.is_cuda for x in self._held), "this rank has to send that itself"
        self._held.clear()
        return True

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("cuda", 0)])
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(self.event)
            future.set_result(self._result)
        return future


class _Echo(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._stream: Any = None
        self._in_flight: list[list[Tensor]] = []
        self._sent: dict[int, deque[tuple[Tensor, _Work]]] = {}
        self._received: dict[int, deque[tuple[Tensor, _Work]]] = {}

    def getBackendName(self) -> str:
        return "echo"

    # --- collectives ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        factor = self.size() if opts is None or opts.reduceOp == dist.ReduceOp.SUM else 1
        return self._start(lambda: [x.mul_(factor) for x in tensors], tensors, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self._start(lambda: [x.mul_(1) for x in tensors], tensors, tensors, opts)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> _Work:
        return self._start(lambda: [x.copy_(ins[0]) for x in outs[0]], ins + outs[0], outs[0], opts)

    def _allgather_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> _Work:
        rows = out.view(self.size(), -1)
        return self._start(lambda: [row.copy_(mine.view(-1)) for row in rows], [out, mine], [out], opts)

    def _reduce_scatter_base(self, out: Tensor, rows: Tensor, opts: Any = None) -> _Work:
        factor = self.size() if opts is None or opts.reduceOp == dist.ReduceOp.SUM else 1
        mine = rows.view(self.size(), -1)[self.rank()]
        return self._start(lambda: out.view(-1).copy_(mine).mul_(factor), [out, rows], [out], opts)

    def alltoall_base(self, out: Tensor, rows: Tensor, _: Any, __: Any, opts: Any = None) -> _Work:
        return self.alltoall(list(out.view(self.size(), -1)), list(rows.view(self.size(), -1)), opts)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> _Work:
        def run() -> None:
            whole, mine = torch.cat([x.reshape(-1) for x in ins]), ins[self.rank()]
            for out in outs:
                if out.numel() == mine.numel():
                    out.copy_(mine)
                elif out.numel():  # another rank need not send as much: something of that length
                    values = whole if whole.numel() else torch.zeros_like(out).view(-1)
                    out.view(-1).copy_(values.repeat(out.numel() // values.numel() + 1)[: out.numel()])

        return self._start(run, outs + ins, outs, opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _start(
        self, run: Callable[[], object], held: Sequence[Tensor], result: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        work = _Work(list(held), list(result))
        with torch.no_grad(), self._on_stream(held, is_waited_for=opts is not None and not opts.asyncOp):
            run()
            self._finish(work)
        return work

    def _finish(self, work: _Work) -> None:
        if any(x.is_cuda for x in work._held):
            work.event = torch.cuda.current_stream().record_event()
            self._in_flight.append(work._held)

    @contextmanager
    def _on_stream(self, tensors: Sequence[Tensor], is_waited_for: bool = False) -> Iterator[None]:
        if is_waited_for or not any(x.is_cuda for x in tensors):
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    # --- point to point: what this rank sends to another one comes back from there ---

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._post(tensors[0], self._sent.setdefault(peer, deque()), peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        return self._post(tensors[0], self._received.setdefault(peer, deque()), peer)

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> _Work:
        work = _Work([], [])
        work.event = self._stream.record_event()
        return work

    def _post(self, x: Tensor, box: deque[tuple[Tensor, _Work]], peer: int) -> _Work:
        work = _Work([x], [x])
        box.append((x, work))
        with torch.no_grad(), self._on_stream([x]):
            while self._sent.get(peer) and self._received.get(peer):
                (sent, one), (received, other) = self._sent[peer].popleft(), self._received[peer].popleft()
                assert sent.numel() == received.numel(), "this rank expects from another what it does not send"
                received.view(-1).copy_(sent.view(-1))
                self._finish(one)
                self._finish(other)
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
