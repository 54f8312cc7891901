"""Calls of a group that are known to be left raw, so that they cost next to nothing on top of the backend's own.

gloo takes a tenth of a millisecond for a short message on one machine: three per cent of that are a few microseconds, a
dozen lines of Python. So what was decided once for an operation, a number of elements and a dtype is looked up, and
counted without a lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.runtime.callbacks import here

__all__ = ["RawCalls", "Way", "forget_ways", "is_plain", "is_plain_strided", "known_way", "remember_way"]

_MAX_KNOWN = 1024
"""A program whose sizes never repeat must not fill the memory."""

_STRIDED = torch.strided


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a strided tensor is its values from front to back; sparse ones are left to the backend."""
    return x.layout != torch.strided or is_plain_strided(x)


def is_plain_strided(x: Tensor) -> bool:
    """Whether a tensor is strided, and its memory is its values from front to back."""
    return x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg()


class RawCalls:
    """Those of one group, of plain tensors, outside of callbacks, whose calls have an order of their own."""

    def __init__(self) -> None:
        self._counters: dict[tuple[Hashable, int, torch.dtype], Iterator[int]] = {}

    def has(self, call: Hashable, x: Tensor) -> bool:
        """Whether such a call with `x` is known to be left raw; counts it then."""
        counter = self._counters.get((call, x.numel(), x.dtype))
        if counter is None or here.depth or not is_plain_strided(x):
            return False
        next(counter)
        return True

    def would_have(self, call: Hashable, x: Tensor) -> bool:
        """The same without counting."""
        return (call, x.numel(), x.dtype) in self._counters and is_plain_strided(x)

    def counter(self, call: Hashable, x: Tensor) -> Iterator[int] | None:
        """What counts calls like this one, if they are known."""
        return self._counters.get((call, x.numel(), x.dtype))

    def add(self, call: Hashable, x: Tensor, operation: str, nbytes: int, reason: str) -> None:
        """From now on calls like this one are known; each counts as `nbytes` that `operation` sends."""
        if len(self._counters) < _MAX_KNOWN:
            counter = audit.tally(operation, x.dtype, nbytes, reason)
            if counter is not None:
                self._counters[call, x.numel(), x.dtype] = counter


class Way:
    """How a call of a function goes that is known to be left raw."""

    __slots__ = ("count", "group", "group_rank", "world")

    def __init__(self, count: Iterator[int], group: dist.ProcessGroup, group_rank: int) -> None:
        """`count`: of such calls; `group` carries it; `group_rank` of the root or peer, if there is one."""
        self.count = count
        self.group = group
        self.group_rank = group_rank
        self.world = group.size()


_ways: dict[int, dict[tuple[Hashable, int, torch.dtype], Way]] = {}
"""By id of the group that the caller gives, while it lives: a weak dictionary takes as long as all the rest."""


def known_way(group: Any, call: Hashable, x: Tensor) -> Way | None:
    """The way of a call that has been left raw before, and would be again; its arguments were found to be right then.

    Args:
        group: as the caller gave it; None is the default group.
        call: the function and those of its arguments that are no tensors.
        x: the tensor whose size decides.
    """
    ways = _ways.get(id(dist.group.WORLD if group is None else group))
    if ways is None:
        return None
    way = ways.get((call, x.numel(), x.dtype))
    return way if way is not None and not here.depth and x.is_cpu and is_plain_strided(x) else None


def remember_way(group: Any, call: Hashable, x: Tensor, way: Way) -> None:
    """Calls like this one go this way from now on, but not those of groups that have another one inside."""
    group = dist.group.WORLD if group is None else group
    if way.group is not group or not x.is_cpu:
        return
    key = id(group)
    if key not in _ways:
        _ways[key] = {}
        weakref.finalize(group, _ways.pop, key, None)
    ways = _ways[key]
    if len(ways) < _MAX_KNOWN:
        ways[call, x.numel(), x.dtype] = way


def forget_ways() -> None:
    """To be called when something has been learnt by which calls might be coded."""
    for ways in _ways.values():
        ways.clear()
