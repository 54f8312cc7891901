"""A process group of several processes on the simulated device: gloo carries the messages, the streams are NCCL's.

What leaves or enters the process is work that only the program's own order does (`Device.external`): the other orders
find in the tensors that are sent what this one sent, and get what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from tests.streams.device import Device
from tests.streams.stream_group import StreamGroup, StreamWork

__all__ = ["ranks"]


class _Ranks(StreamGroup):
    device: Device

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "ranks"

    # --- collectives ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        return self._move(
            "all-reduce", tensors, tensors, lambda: _reduce(self._all(tensors[0]), tensors[0], opts), opts
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        root = 0 if opts is None else opts.rootRank
        return self._move("broadcast", tensors, tensors, lambda: tensors[0].copy_(self._all(tensors[0])[root]), opts)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> StreamWork:
        return self._move("all-gather", ins, outs[0], lambda: _copy(self._all(ins[0]), outs[0]), opts)

    def _allgather_base(self, out: Tensor, mine: Tensor, opts: Any = None) -> StreamWork:
        rows = list(out.view(self.size(), -1))
        return self._move("all-gather", [mine], [out], lambda: _copy(self._all(mine.view(-1)), rows), opts)

    def _reduce_scatter_base(self, out: Tensor, rows: Tensor, opts: Any = None) -> StreamWork:
        def run() -> None:
            found = [whole.view(self.size(), -1)[self.rank()] for whole in self._all(rows)]
            _reduce(found, out.view(-1), opts)

        return self._move("reduce-scatter", [rows], [out], run, opts)

    def alltoall_base(self, out: Tensor, rows: Tensor, _: Any, __: Any, opts: Any = None) -> StreamWork:
        return self.alltoall(list(out.view(self.size(), -1)), list(rows.view(self.size(), -1)), opts)

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> StreamWork:
        def run() -> None:
            outs[self.rank()].copy_(ins[self.rank()])
            peers = [peer for peer in range(self.size()) if peer != self.rank()]
            self._exchange(
                [(True, ins[peer], peer, 0) for peer in peers] + [(False, outs[peer], peer, 0) for peer in peers]
            )

        return self._move("all-to-all", ins, outs, run, opts)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _all(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty(mine.shape, dtype=mine.dtype) for _ in range(self.size())]
        self._gloo.allgather([found], [mine.contiguous()]).wait()
        return found

    def _exchange(self, messages: Sequence[tuple[bool, Tensor, int, int]]) -> None:
        """Messages: whether it is sent, the tensor, the peer, the tag."""
        works = []
        for is_sent, x, peer, tag in messages:
            if x.numel():
                works.append((self._gloo.send if is_sent else self._gloo.recv)([x], peer, tag))
        for work in works:
            work.wait()

    def _move(
        self, name: str, reads: list[Tensor], writes: list[Tensor], run: Callable[[], object], opts: Any
    ) -> StreamWork:
        if not any(x.is_cuda for x in (*reads, *writes)):
            return self.start(run, [], writes, opts)
        held = [*reads, *writes]
        return self.start(lambda: self.device.external(name, reads, writes, run), held, writes, opts)

    # --- point to point ---

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._post(self._gloo.send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._post(self._gloo.recv, tensors, peer, tag)

    def _post(self, operation: Callable[..., Any], tensors: list[Tensor], peer: int, tag: int) -> Any:
        if tensors[0].is_cuda:
            raise NotImplementedError("between devices only dist.batch_isend_irecv is modelled, no single message")
        return operation(tensors, peer, tag)

    def batch(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        """`dist.batch_isend_irecv` as it is with NCCL: one operation of the device."""
        sends = [(True, op.tensor, op.group_peer, op.tag) for op in operations if op.op is dist.isend]
        receives = [(False, op.tensor, op.group_peer, op.tag) for op in operations if op.op is not dist.isend]
        reads, writes = [x for _, x, *_ in sends], [x for _, x, *_ in receives]
        return [self._move("batch_isend_irecv", reads, writes, lambda: self._exchange(sends + receives), None)]

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def _copy(found: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    for out, x in zip(outs, found, strict=True):
        out.copy_(x.view(out.shape))


def _reduce(found: Sequence[Tensor], out: Tensor, opts: Any) -> None:
    is_mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
    assert is_mean or opts is None or opts.reduceOp == dist.ReduceOp.SUM, "only SUM and AVG are modelled"
    total = torch.stack([*found]).sum(0)
    out.copy_((total / len(found) if is_mean else total).view(out.shape))


_batch_isend_irecv = torch_compat.batch_isend_irecv


def _batch_of_device(operations: list[dist.P2POp]) -> list[dist.Work]:
    """torch makes one operation of them for its own class of groups only."""
    group = operations[0].group
    is_ours = isinstance(group, _Ranks) and operations[0].tensor.is_cuda
    return group.batch(operations) if is_ours else _batch_isend_irecv(operations)


dist.Backend.register_backend("ranks", _Ranks, devices=["cpu", "cuda"])


@contextmanager
def ranks(device: Device, store: Path, rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """Yield the default group of `size` processes that meet in the file `store`. Enter the device before."""
    dist.init_process_group("ranks", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert isinstance(group, _Ranks)
        with (
            mock.patch.object(_Ranks, "device", device, create=True),
            mock.patch.object(torch_compat, "batch_isend_irecv", _batch_of_device),
        ):
            yield group
    finally:
        dist.destroy_process_group()
