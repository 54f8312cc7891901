"""Calls of a group that are known to be left raw, so that they cost next to nothing on top of the backend's own.

gloo takes a tenth of a millisecond for a short message on one machine: three per cent of that are a few microseconds, a
dozen lines of Python. So what was decided once for a call, a number of elements and a dtype is looked up, in one table
per group, and counted without a lock. What may change, that the data of a kind does not shrink, is compared in each
call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.runtime.callbacks import here

__all__ = ["RawCalls", "Way", "forget_ways", "is_plain", "is_plain_strided", "known_way", "raw_calls_of"]

_MAX_KNOWN = 1024
"""A program whose sizes never repeat must not fill the memory."""

_STRIDED = torch.strided


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a strided tensor is its values from front to back; sparse ones are left to the backend."""
    return x.layout != torch.strided or is_plain_strided(x)


def is_plain_strided(x: Tensor) -> bool:
    """Whether a tensor is strided, and its memory is its values from front to back."""
    return x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg()


class Way:
    """How a call of a function goes that is known to be left raw."""

    __slots__ = ("_count", "_still", "group", "group_rank", "world")

    def __init__(
        self,
        count: Iterator[int],
        group: Callable[[], Any],
        world: int,
        group_rank: int,
        still: Callable[[], bool] | None,
    ) -> None:
        """Make the way of calls that are counted by `count`, and carried by `group` of `world` ranks.

        `group_rank` is that of the root or peer, if there is one; `still` as for `RawCalls.add`.
        """
        self._count, self._still = count, still
        self.group, self.world, self.group_rank = group, world, group_rank

    def goes(self, async_op: bool = False) -> bool:
        """Whether this call is left raw as well; counts it then."""
        # Calls in the background are chosen for there, by what their own group has learnt.
        if self._still is not None and (async_op or not self._still()):
            return False
        next(self._count)
        return True


class RawCalls:
    """Calls of one group that are left raw, with plain CPU tensors, outside of callbacks, which have their own order.

    Their names are tuples for functions, whose arguments that are no tensors they have, and strings for methods of a
    laconic group.
    """

    def __init__(self, carrier: dist.ProcessGroup) -> None:
        """`carrier` carries the calls of the group."""
        self._carrier, self._world = weakref.ref(carrier), carrier.size()
        self._ways: dict[tuple[Hashable, int, torch.dtype], Way] = {}

    def find(self, call: Hashable, x: Tensor) -> Way | None:
        """The way of such a call with `x`, if it is known."""
        way = self._ways.get((call, x.numel(), x.dtype))
        return way if way is not None and not here.depth and x.is_cpu and is_plain_strided(x) else None

    def has(self, call: Hashable, x: Tensor) -> bool:
        """Whether such a call with `x` is known to be left raw; counts it then."""
        way = self.find(call, x)
        return way is not None and way.goes()

    def add(
        self,
        call: Hashable,
        x: Tensor,
        operation: str,
        nbytes: int,
        reason: str,
        group_rank: int = 0,
        still: Callable[[], bool] | None = None,
    ) -> None:
        """From now on calls like this one are known; each counts as `nbytes` that `operation` sends.

        Args:
            call: its name.
            x: the tensor whose size decides.
            operation, nbytes, reason: for the audit.
            group_rank: of the root or peer.
            still: says of each call in the caller's thread whether it is left raw as well; None if nothing can change
                that.
        """
        key = call, x.numel(), x.dtype
        if x.is_cpu and (key in self._ways or len(self._ways) < _MAX_KNOWN):
            count = audit.tally(operation, x.dtype, nbytes, reason)
            if count is not None:
                self._ways[key] = Way(count, self._carrier, self._world, group_rank, still)

    def clear(self) -> None:
        """Forget all."""
        self._ways.clear()


_known: dict[int, RawCalls] = {}
"""By id of the group that the caller gives, while it lives: a weak dictionary takes as long as all the rest."""


def raw_calls_of(group: dist.ProcessGroup, carrier: dist.ProcessGroup) -> RawCalls:
    """The calls of `group`, which `carrier` carries, that are known."""
    key = id(group)
    if key not in _known:
        _known[key] = RawCalls(carrier)
        weakref.finalize(group, _known.pop, key, None)
    return _known[key]


def known_way(group: Any, call: Hashable, x: Tensor) -> Way | None:
    """The way of a call that was left raw before; its arguments were found to be right then.

    Args:
        group: as the caller gave it; None is the default group.
        call: its name.
        x: the tensor whose size decides.
    """
    known = _known.get(id(dist.group.WORLD if group is None else group))
    return None if known is None else known.find(call, x)


def forget_ways() -> None:
    """To be called when something has been learnt by which calls might be coded."""
    for known in _known.values():
        known.clear()
