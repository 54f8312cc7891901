"""The collectives that gradients need, under one set of names, each started and not waited for.

torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor and warns at every call of the old names; 2.11 has
only those. Nothing else in the package calls them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "all_reduce", "all_to_all", "in_background", "reduce_scatter", "sent_in_background_nbytes"]


def _named(new: str, old: str) -> Callable[..., Any]:
    return getattr(dist, new, None) or getattr(dist, old)


_all_gather = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Row r of `sent` [W, n] goes to rank r; row r of `received` [W, n] comes from it."""
    _count(sent.nbytes * (group.size() - 1) // group.size())
    return _started(dist.all_to_all_single(received, sent, group=group, async_op=True))


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Row r of `gathered` [W, ...] becomes rank r's `mine` [...]."""
    _count(mine.nbytes * (group.size() - 1))
    return _started(_all_gather(gathered.view(-1), mine.view(-1), group=group, async_op=True))


def reduce_scatter(mine: Tensor, rows: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`mine` [n] becomes the sum over ranks of row number `rank` of `rows` [W, n], in the tensor's own type."""
    _count(rows.nbytes * (group.size() - 1) // group.size())
    return _started(_reduce_scatter(mine, rows.view(-1), group=group, async_op=True))


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`tensor` [...] becomes the sum over ranks, in its own type."""
    _count(2 * tensor.nbytes * (group.size() - 1) // group.size())
    return _started(dist.all_reduce(tensor, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "only processes of the group call"
    return work


# --- bytes that no dispatch mode sees, because they leave from another thread ---


class _Thread(threading.local):
    counts = False


_thread = _Thread()
_lock = threading.Lock()
_sent_nbytes = 0


def sent_in_background_nbytes() -> int:
    """Bytes this process has sent from background threads so far, by what bandwidth-optimal algorithms send."""
    return _sent_nbytes


@contextmanager
def in_background() -> Iterator[None]:
    """Count what the current thread sends inside the block in `sent_in_background_nbytes`."""
    _thread.counts = True
    try:
        yield
    finally:
        _thread.counts = False


def _count(nbytes: int) -> None:
    global _sent_nbytes
    if _thread.counts:
        with _lock:
            _sent_nbytes += nbytes
