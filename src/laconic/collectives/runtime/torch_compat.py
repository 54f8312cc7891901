"""torch's own collectives under one set of names, each started and not waited for.

torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor and warns at every call of the old names; 2.11 has
only those. They are called nowhere else in the package.

On CPU tensors all-to-all and all-gather are sends and receives between every two ranks, all at once: gloo's own
all-to-all handles one peer after the other and uses a full-duplex link for 55 % (4 hosts, 100 Mbit/s), this for 80 %.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _dynamo
from torch.utils._pytree import tree_map

from laconic.collectives.runtime.group_facts import goes_through_host, timeout_of

_eval_frame: Any = getattr(_dynamo, "eval_frame", None)  # private: a torch that has moved it traces as before


def _named(new: str, old: str) -> Callable[..., Any]:
    return getattr(dist, new, None) or getattr(dist, old)


_all_gather = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


def name_of(new: str, old: str) -> str:
    """The name that this torch has for a method of process groups that 2.13 renamed."""
    return new if hasattr(dist.ProcessGroup, new) else old


def method_of(group: dist.ProcessGroup, new: str, old: str) -> Callable[..., dist.Work]:
    """Look up a method of process groups that torch 2.13 renamed."""
    found: Callable[..., dist.Work] = getattr(group, name_of(new, old))
    return found


_Class = TypeVar("_Class", bound=type)


def untraced(cls: _Class) -> _Class:
    """Decorate a class whose methods C++ calls, as those of process groups and works: Dynamo compiles none of them.

    A compiled function that calls a collective which Dynamo cannot trace calls it from Python, as DDP's forward does
    with buffers, and Dynamo would look at each frame that this opens. `torch.compiler.disable` would import Dynamo, a
    second, and stand in front of every call.
    """
    set_strategy = getattr(_eval_frame, "set_code_exec_strategy", None)
    if set_strategy is not None:
        skip = _eval_frame._FrameAction.SKIP
        for function in vars(cls).values():
            if inspect.isfunction(function):
                set_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return cls


class Started(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when it is done (on CUDA: when the current stream waits for it); raise its error."""


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> Started:
    """Exchange rows: row r of `sent` [W, n] goes to rank r; row r of `received` [W, n] comes from it."""
    if goes_through_host(group, sent.device):
        return _ThroughHost(all_to_all, received, sent, group)
    count_sent(sent.nbytes * (group.size() - 1) // group.size())
    if sent.device.type == "cpu":
        return _exchange(received, list(sent), group)
    return _started(dist.all_to_all_single(received, sent, group=group, async_op=True))


def all_to_all_uneven(received: list[Tensor], sent: list[Tensor], group: dist.ProcessGroup) -> Started:
    """Exchange tensors: sent[r], contiguous, goes to rank r; received[r] comes from it. Both ranks know their sizes."""
    if goes_through_host(group, sent[0].device):
        return _ThroughHost(all_to_all_uneven, received, sent, group)
    me = group.rank()
    count_sent(sum(x.nbytes for peer, x in enumerate(sent) if peer != me))
    if sent[me].device.type == "cpu":
        return _exchange(received, sent, group)
    return _started(dist.all_to_all(received, sent, group=group, async_op=True))


_HEAD_NBYTES = 1 << 15
"""First part of a message that carries its own length; a buffer of this size is ready for each peer."""


def all_to_all_messages(sent: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange byte strings of any length, contiguous uint8: sent[r] goes to rank r; return what came from each.

    Waits. One round for short messages on CPU tensors: gloo delivers a message into a longer buffer. Longer ones have a
    second part, which is offered at once as well. On other devices lengths are exchanged first.
    """
    rank, world = group.rank(), group.size()
    if sent[rank].device.type != "cpu":
        return _messages_on_device(sent, group)
    count_sent(sum(8 + x.numel() for peer, x in enumerate(sent) if peer != rank))
    tag, more = _next_tag(group), _next_tag(group)
    froms = [(rank - distance) % world for distance in range(1, world)]
    buffers = {peer: torch.empty(_HEAD_NBYTES, dtype=torch.uint8, device="cpu") for peer in froms}
    heads = {peer: group.recv([buffer], peer, tag) for peer, buffer in buffers.items()}
    sends = []
    for peer in froms[::-1]:
        prefix = torch.tensor([sent[peer].numel()], device="cpu").view(torch.uint8)
        sends.append(group.send([torch.cat((prefix, sent[peer][: _HEAD_NBYTES - 8]))], peer, tag))
        if sent[peer].numel() > _HEAD_NBYTES - 8:
            sends.append(group.send([sent[peer][_HEAD_NBYTES - 8 :]], peer, more))
    received, tails = list(sent), {}
    timeout = timeout_of(group)
    for peer, head in heads.items():
        head.wait(timeout)
        length = int(buffers[peer][:8].view(torch.int64))
        received[peer] = buffers[peer][8 : 8 + length]
        if length > _HEAD_NBYTES - 8:
            tail = torch.empty(length - (_HEAD_NBYTES - 8), dtype=torch.uint8, device="cpu")
            tails[peer] = tail, group.recv([tail], peer, more)
    for peer, (tail, work) in tails.items():
        work.wait(timeout)
        received[peer] = torch.cat((received[peer], tail))
    for work in sends:
        work.wait(timeout)
    return received


def _messages_on_device(sent: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    lengths = torch.tensor([[x.numel()] for x in sent], device=sent[0].device)
    incoming = torch.empty_like(lengths)
    all_to_all(incoming, lengths, group).wait()
    received = [sent[0].new_empty(length) for length in incoming.flatten().tolist()]
    all_to_all_uneven(received, list(sent), group).wait()
    return received


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> Started:
    """Gather: row r of `gathered` [W, ...] becomes rank r's `mine` [...]."""
    if goes_through_host(group, mine.device):
        return _ThroughHost(all_gather, gathered, mine, group)
    count_sent(mine.nbytes * (group.size() - 1))
    if mine.device.type == "cpu":
        return _exchange(gathered.view(group.size(), -1), [mine.view(-1)] * group.size(), group)
    return _started(_all_gather(gathered.view(-1), mine.view(-1), group=group, async_op=True))


def reduce_scatter(mine: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Started:
    """Sum over ranks row `rank` of `rows` [W, n] into `mine` [n], in the tensor's own type."""
    if goes_through_host(group, rows.device):
        return _ThroughHost(reduce_scatter, mine, rows, group)
    count_sent(rows.nbytes * (group.size() - 1) // group.size())
    return _started(_reduce_scatter(mine, rows.view(-1), group=group, async_op=True))


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Started:
    """Replace `tensor` [...] by its sum over ranks, in its own type."""
    count_sent(2 * tensor.nbytes * (group.size() - 1) // group.size())
    return _started(dist.all_reduce(tensor, group=group, async_op=True))


# Tags that nobody else uses on a group, a new one for each exchange of those that may be under way together.
_FIRST_TAG, _NUM_TAGS = 1 << 24, 1 << 16
_num_exchanges: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class _Exchange:
    """Sends and receives as one operation; that they could not start, as a rank has ended, is raised in `wait`."""

    def __init__(self, started: Iterable[dist.Work], timeout: timedelta) -> None:
        self._timeout = timeout
        self._works: list[dist.Work] = []
        self._error: RuntimeError | None = None
        try:
            self._works.extend(started)
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait(self._timeout)


class _ThroughHost:
    """A function of this module on the host's copies of a device's tensors; `wait` copies back what arrives."""

    def __init__(
        self, start: Callable[..., Started], received: Tensor | list[Tensor], sent: Tensor | list[Tensor], group: Any
    ) -> None:
        self._received = received
        self._arrived: Any = tree_map(lambda x: torch.empty_like(x, device="cpu"), received)
        self._started = start(self._arrived, tree_map(Tensor.cpu, sent), group)

    def wait(self) -> None:
        self._started.wait()
        tree_map(Tensor.copy_, self._received, self._arrived)


def _exchange(received: Tensor | list[Tensor], sent: list[Tensor], group: dist.ProcessGroup) -> _Exchange:
    rank, world = group.rank(), group.size()
    tag = _next_tag(group)
    # Each rank begins with another peer, so that no rank is sent to by all others at once.
    froms = [(rank - distance) % world for distance in range(1, world)]
    receives = (group.recv([received[peer]], peer, tag) for peer in froms)
    sends = (group.send([sent[peer]], peer, tag) for peer in froms[::-1])
    received[rank].copy_(sent[rank])
    return _Exchange(chain(receives, sends), timeout_of(group))


def pass_around(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> Started:
    """Send `sent` to the next rank and receive as much from the one before into `received`."""
    if goes_through_host(group, sent.device):
        return _ThroughHost(pass_around, received, sent, group)
    count_sent(sent.nbytes)
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    if sent.device.type == "cpu":
        tag = _next_tag(group)
        receives = (group.recv([received], peer, tag) for peer in [before])
        sends = (group.send([sent], peer, tag) for peer in [after])
        return _Exchange(chain(receives, sends), timeout_of(group))
    calls = [dist.P2POp(dist.irecv, received, group=group, group_peer=before)]
    calls.append(dist.P2POp(dist.isend, sent, group=group, group_peer=after))
    return _Exchange(batch_isend_irecv(calls), timedelta())


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """torch's; from 2.15 on that asks any group for its backend, and a group written in Python may have none."""
    group, device = operations[0].group, operations[0].tensor.device
    if group is None or type(group) is dist.ProcessGroup or torch.device(device.type) in group._device_types:
        return list(dist.batch_isend_irecv(operations))
    peer = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [op.op(op.tensor, group=group, tag=op.tag, **{peer[op.op]: op.group_peer}) for op in operations]


def _next_tag(group: dist.ProcessGroup) -> int:
    number = _num_exchanges.get(group, 0)
    _num_exchanges[group] = number + 1
    return _FIRST_TAG + number % _NUM_TAGS


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only processes of the group call"
    return work


# --- bytes that no dispatch mode sees, because they are sent from another thread ---


class _Thread(threading.local):
    counts = False


_thread = _Thread()
_lock = threading.Lock()
_sent_nbytes = 0


def sent_in_background_nbytes() -> int:
    """Bytes this process has sent from background threads so far, counted as bandwidth-optimal algorithms send them."""
    return _sent_nbytes


@contextmanager
def in_background() -> Iterator[None]:
    """Count what the current thread sends inside the block in `sent_in_background_nbytes`."""
    _thread.counts = True
    try:
        yield
    finally:
        _thread.counts = False


def count_sent(nbytes: int) -> None:
    """Count bytes that leave the process, if the current thread counts them."""
    global _sent_nbytes
    if _thread.counts:
        with _lock:
            _sent_nbytes += nbytes
