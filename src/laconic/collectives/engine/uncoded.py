"""Collectives of the backend, for messages that are left raw: one call, no handshake, no chunks, no threads.

Sums are the backend's, in its order and in the tensor's type. Ranks that mean different calls get no error of this
package; the backend hangs or fails as it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from laconic.collectives.runtime.background import Work, done
from laconic.collectives.runtime.callbacks import CallsBack, follow, queue_of
from laconic.collectives.runtime.failure_diagnosis import broken_off
from laconic.collectives.runtime.group_facts import goes_through_host, timeout_of
from laconic.collectives.runtime.thread_state import as_here
from laconic.collectives.runtime.torch_compat import name_of

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_AVG: Any = dist.ReduceOp.AVG  # whose type the stubs do not accept

_REDUCE_SCATTER = name_of("reduce_scatter_single", "_reduce_scatter_base")
_ALL_GATHER = name_of("all_gather_single", "_allgather_base")
_ALL_TO_ALL = name_of("all_to_all_single", "alltoall_base")

_KNOWN = frozenset(
    (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)
"""To every backend. Tensors of other types are moved as bytes."""


class _BackendWork(CallsBack, Work[T]):
    """A call that the backend carries out, with its result and its name for errors."""

    __slots__ = ("_done", "_group", "_name", "_peer", "_result", "_work")

    def __init__(
        self, work: dist.Work, result: T, group: dist.ProcessGroup, name: str, peer: int | None = None
    ) -> None:
        self._work, self._result, self._group, self._name, self._peer = work, result, group, name, peer
        self._done = False

    def wait(self) -> T:
        try:
            _wait(self._work, self._result, self._group, self._peer)
        except RuntimeError as error:
            raise broken_off(self._name, self._group, error, self._peer) from error
        self._done = True
        self._settle()
        return self._result

    def is_completed(self) -> bool:
        return (self._done or self._work.is_completed()) and self._is_settled()

    def get_future(self) -> torch.futures.Future[T]:
        return self._followed(lambda result: result)

    def map(self, change: Callable[[T], S]) -> Work[S]:
        return _ChangedWork(self, change)

    def _followed(self, change: Callable[[T], S]) -> torch.futures.Future[S]:
        def changed(_: object) -> S:
            return change(self._result)

        found = self._work.get_future()
        if isinstance(self._result, Tensor) and self._result.is_cuda:
            return found.then(lambda done: changed(done.value()))  # callbacks run on streams of their own
        explain = partial(broken_off, self._name, self._group, peer=self._peer)
        return self._give(follow(found, queue_of(self._group), explain, changed))


class _ChangedWork(Work[S]):
    """A work of the backend and what is made of its result, by the first who asks for it."""

    def __init__(self, work: _BackendWork[T], change: Callable[[T], S]) -> None:
        self._work: _BackendWork[Any] = work
        self._change: Callable[[Any], S] = as_here(change)
        self._lock = threading.Lock()
        self._found: list[S] = []

    def wait(self) -> S:
        return self._changed(self._work.wait())

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        self.wait()
        return True

    def get_future(self) -> torch.futures.Future[S]:
        return self._work._followed(self._changed)

    def map(self, change: Callable[[S], R]) -> Work[R]:
        return _ChangedWork(self._work, lambda result: change(self._changed(result)))

    def _changed(self, result: Any) -> S:
        with self._lock:
            if not self._found:
                self._found.append(self._change(result))
            return self._found[0]


# The collectives. Each waits for the backend unless `async_op`, and its work returns the output.


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: str = "sum", async_op: bool = True) -> Work[Tensor]:
    """`tensor` becomes the sum, or with op="avg" the average, over ranks."""
    work = group.allreduce([tensor], _options(AllreduceOptions, async_op, op))
    return _carried("all_reduce", work, tensor, group, async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, op: str = "sum", async_op: bool = True
) -> Work[Tensor]:
    """`output` [n] becomes the sum or average over ranks of this one's part of `input` [W * n]."""
    method = getattr(group, _REDUCE_SCATTER)
    work = method(_flat(output), _flat(input), _options(ReduceScatterOptions, async_op, op))
    return _carried("reduce_scatter", work, output, group, async_op)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = True) -> Work[Tensor]:
    """`output` [W * n] becomes what ranks have in `input` [n]."""
    method = getattr(group, _ALL_GATHER)
    work = method(_movable(output), _movable(input), _options(AllgatherOptions, async_op))
    return _carried("all_gather", work, output, group, async_op)


def all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = True) -> Work[Tensor]:
    """Part r of `output` [W * n] becomes what rank r has in this one's part of its `input`."""
    method = getattr(group, _ALL_TO_ALL)
    work = method(_movable(output), _movable(input), [], [], _options(AllToAllOptions, async_op))
    return _carried("all_to_all", work, output, group, async_op)


def broadcast(tensor: Tensor, group: dist.ProcessGroup, src: int, async_op: bool = True) -> Work[Tensor]:
    """`tensor` of group rank `src` replaces that of the others."""
    work = group.broadcast([_movable(tensor)], _options(BroadcastOptions, async_op, "sum", src))
    return _carried("broadcast", work, tensor, group, async_op)


def gather(
    output: Tensor | None, input: Tensor, group: dist.ProcessGroup, dst: int, async_op: bool = True
) -> Work[Tensor | None]:
    """`output` [W * n] on group rank `dst` becomes what ranks have in `input` [n]."""
    outputs = [] if output is None else [_rows(output, group)]
    work = group.gather(outputs, [_movable(input)], _options(GatherOptions, async_op, "sum", dst))
    return _carried("gather", work, output, group, async_op)


def scatter(
    output: Tensor, input: Tensor | None, group: dist.ProcessGroup, src: int, async_op: bool = True
) -> Work[Tensor]:
    """`output` [n] becomes this rank's part of `input` [W * n] of group rank `src`."""
    inputs = [] if input is None else [_rows(input, group)]
    work = group.scatter([_movable(output)], inputs, _options(ScatterOptions, async_op, "sum", src))
    return _carried("scatter", work, output, group, async_op)


def send(tensor: Tensor, group: dist.ProcessGroup, peer: int, async_op: bool = True) -> Work[Tensor]:
    """Send to group rank `peer`, which calls `recv` with as many elements of that dtype."""
    x = _movable(tensor)
    try:
        work = group.send([x.cpu() if goes_through_host(group, x.device) else x], peer, _tag(tensor))
    except RuntimeError as error:
        raise broken_off("send", group, error, peer) from error
    return _carried("send", work, tensor, group, async_op, peer)


def recv(tensor: Tensor, group: dist.ProcessGroup, peer: int, async_op: bool = True) -> Work[Tensor]:
    """Receive what group rank `peer` sends."""
    if goes_through_host(group, tensor.device):
        host = torch.empty_like(tensor, device="cpu")
        return recv(host, group, peer, async_op).map(tensor.copy_)
    try:
        work = group.recv([_movable(tensor)], peer, _tag(tensor))
    except RuntimeError as error:
        raise broken_off("recv", group, error, peer) from error
    return _carried("recv", work, tensor, group, async_op, peer)


def _carried(
    name: str, work: dist.Work | None, output: T, group: dist.ProcessGroup, async_op: bool, peer: int | None = None
) -> Work[T]:
    """The backend's handle as a work; a backend that waits in a blocking call may have returned None."""
    if async_op and work is not None:
        return _BackendWork(work, output, group, name, peer)
    if work is not None:
        try:
            _wait(work, output, group, peer)
        except RuntimeError as error:
            raise broken_off(name, group, error, peer) from error
    return done(output)


def _wait(work: dist.Work, output: object, group: dist.ProcessGroup, peer: int | None) -> None:
    if peer is not None and isinstance(output, Tensor) and output.is_cpu:
        work.wait(timeout_of(group))  # gloo itself would take the one that the group was made with
    else:
        work.wait()


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)


def _movable(x: Tensor) -> Tensor:
    """Flat, and as bytes if the backend may not know the dtype."""
    if x.dtype not in _KNOWN:
        return x.view(-1).view(torch.uint8)
    return x if x.dim() == 1 else x.view(-1)


def _rows(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    return [*_movable(x).chunk(group.size())]


_TAG = 1 << 26
"""And above: programs, torch_compat.py and announcements stay below, transport.py above."""

_DTYPES = {dtype: number for number, dtype in enumerate(sorted(_KNOWN, key=str))}


def _tag(x: Tensor) -> int:
    """Tag that keeps messages of other lengths or types apart: gloo would deliver a short one into a long tensor."""
    return _TAG | (x.numel() * 31 + _DTYPES.get(x.dtype, 30)) % _TAG


# Backends only read options, so each set of them is made once: its constructor takes 3 us, a blocking all-reduce of
# four bytes between two processes of one machine 60.


@cache
def _options(kind: Callable[[], Any], async_op: bool, op: str = "sum", root: int | None = None) -> Any:
    made = kind()
    made.asyncOp = async_op
    if op == "avg":
        made.reduceOp = _AVG
    if root is not None:
        made.rootRank = root
    return made
