"""Collectives of the backend, for messages that are left raw: one call, no handshake, no chunks, no threads.

Sums are the backend's, in its order and in the tensor's type. Ranks that mean different calls get no error of this
package; the backend hangs or fails as it always does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

from laconic.collectives.runtime.background import Work
from laconic.collectives.runtime.callbacks import follow, queue_of
from laconic.collectives.runtime.failure_diagnosis import absent
from laconic.collectives.runtime.torch_compat import method_of
from laconic.errors import CollectiveError

__all__ = [
    "BackendWork",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broken_off",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_AVG: Any = dist.ReduceOp.AVG  # whose type the stubs do not accept

_KNOWN = frozenset(
    (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    )
)
"""To every backend. Tensors of other types are moved as bytes."""


class BackendWork(Work[T]):
    """A call that the backend carries out, with its result and its name for errors."""

    __slots__ = ("_done", "_group", "_name", "_peer", "_result", "_work")

    def __init__(
        self, work: dist.Work, result: T, group: dist.ProcessGroup, name: str, peer: int | None = None
    ) -> None:
        self._work, self._result, self._group, self._name, self._peer = work, result, group, name, peer
        self._done = False

    def wait(self) -> T:
        """Wait for the result.

        Raises:
            CollectiveError: the backend gave up.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise broken_off(self._name, self._group, error, self._peer) from error
        self._done = True
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done or self._work.is_completed()

    def get_future(self) -> torch.futures.Future[T]:
        """The result as torch's future."""
        return self._followed(lambda result: result)

    def map(self, change: Callable[[T], S]) -> Work[S]:
        """This work with `change` of its result."""
        return _ChangedWork(self, change)

    def _followed(self, change: Callable[[T], S]) -> torch.futures.Future[S]:
        """The future of the result and `change`."""

        def value(done: torch.futures.Future[Any]) -> S:
            try:
                done.value()
            except RuntimeError as error:
                raise broken_off(self._name, self._group, error, self._peer) from error
            return change(self._result)

        found = self._work.get_future().then(value)
        # On CUDA callbacks run on streams of their own.
        is_cuda = isinstance(self._result, Tensor) and self._result.is_cuda
        return found if is_cuda else follow(found, queue_of(self._group))


class _ChangedWork(Work[S]):
    """A work of the backend and what is made of its result, by the first who asks for it."""

    def __init__(self, work: BackendWork[T], change: Callable[[T], S]) -> None:
        self._work: BackendWork[Any] = work
        self._change: Callable[[Any], S] = change
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
        with self._lock, torch.no_grad():
            if not self._found:
                self._found.append(self._change(result))
            return self._found[0]


def broken_off(name: str, group: dist.ProcessGroup, error: RuntimeError, peer: int | None = None) -> CollectiveError:
    """The error of a rank on which the backend gave up: on `peer`, or finds out on whom as far as that is known."""
    ranks = dist.get_process_group_ranks(group)
    missing = [f"rank {ranks[other]}" for other in (absent(group) if peer is None else [peer])]
    reason = str(error).partition("\n")[0].partition(". This is typically")[0]
    return CollectiveError(
        f"{name} broke off on rank {ranks[group.rank()]}: {reason};"
        f" {', '.join(missing) or f'one of ranks {ranks}'} ended, stopped, raised an error or took longer than the"
        " group's timeout, see its own output"
    )


# Each returns torch's handle.


def _movable(x: Tensor) -> Tensor:
    return x if x.dtype in _KNOWN else x.view(-1).view(torch.uint8)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: str = "sum") -> dist.Work:
    """`tensor` becomes the sum, or with op="avg" the average, over ranks."""
    options = AllreduceOptions()
    if op == "avg":
        options.reduceOp = _AVG
    return group.allreduce([tensor], options)


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup, op: str = "sum") -> dist.Work:
    """`output` [n] becomes the sum or average over ranks of this one's part of `input` [W * n]."""
    options = ReduceScatterOptions()
    if op == "avg":
        options.reduceOp = _AVG
    return method_of(group, "reduce_scatter_single", "_reduce_scatter_base")(output.view(-1), input.view(-1), options)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`output` [W * n] becomes what ranks have in `input` [n]."""
    method = method_of(group, "all_gather_single", "_allgather_base")
    return method(_movable(output.view(-1)), _movable(input.view(-1)), AllgatherOptions())


def all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Part r of `output` [W * n] becomes what rank r has in this one's part of its `input`."""
    method = method_of(group, "all_to_all_single", "alltoall_base")
    return method(_movable(output.view(-1)), _movable(input.view(-1)), [], [], AllToAllOptions())


def broadcast(tensor: Tensor, group: dist.ProcessGroup, src: int) -> dist.Work:
    """`tensor` of group rank `src` replaces that of the others."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = src, 0
    return group.broadcast([_movable(tensor)], options)


def gather(output: Tensor | None, input: Tensor, group: dist.ProcessGroup, dst: int) -> dist.Work:
    """`output` [W * n] on group rank `dst` becomes what ranks have in `input` [n]."""
    options = GatherOptions()
    options.rootRank = dst
    outputs = [] if output is None else [list(_movable(output).view(group.size(), -1))]
    return group.gather(outputs, [_movable(input).view(-1)], options)


def scatter(output: Tensor, input: Tensor | None, group: dist.ProcessGroup, src: int) -> dist.Work:
    """`output` [n] becomes this rank's part of `input` [W * n] of group rank `src`."""
    options = ScatterOptions()
    options.rootRank = src
    inputs = [] if input is None else [list(_movable(input).view(group.size(), -1))]
    return group.scatter([_movable(output).view(-1)], inputs, options)


_TAG = 1 << 26
"""And above: programs, torch_compat.py and announcements stay below, transport.py above."""

_DTYPES = {dtype: number for number, dtype in enumerate(sorted(_KNOWN, key=str))}


def send(tensor: Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    """Send to group rank `peer`, which calls `recv` with as many elements of that dtype."""
    return group.send([_movable(tensor)], peer, _tag(tensor))


def recv(tensor: Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    """Receive what group rank `peer` sends."""
    return group.recv([_movable(tensor)], peer, _tag(tensor))


def _tag(x: Tensor) -> int:
    """Tag that keeps messages of other lengths or types from meeting.

    gloo would silently deliver a shorter message into a longer tensor.
    """
    return _TAG | (x.numel() * 31 + _DTYPES.get(x.dtype, 30)) % _TAG
