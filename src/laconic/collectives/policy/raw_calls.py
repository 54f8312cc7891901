"""Calls of a group that are known to be left raw, so that they cost next to nothing on top of the backend's own.

gloo takes a tenth of a millisecond for a short message on one machine: three per cent of that are a few microseconds, a
dozen lines of Python. So what was decided once for an operation, a number of elements and a dtype is looked up, and
counted without a lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.runtime.callbacks import depth

__all__ = ["RawCalls", "is_plain"]

_MAX_KNOWN = 1024
"""A program whose sizes never repeat must not fill the memory."""

_STRIDED = torch.strided


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a strided tensor is its values from front to back; sparse ones are left to the backend."""
    return x.layout != torch.strided or (x.is_contiguous() and not x.is_conj() and not x.is_neg())


class RawCalls:
    """Those of one group, of plain tensors, outside of callbacks, whose calls have an order of their own."""

    def __init__(self) -> None:
        self._counters: dict[tuple[Hashable, int, torch.dtype], Iterator[int]] = {}

    def has(self, call: Hashable, x: Tensor) -> bool:
        """Whether such a call with `x` is known to be left raw; counts it then."""
        counter = self._counters.get((call, x.numel(), x.dtype))
        if counter is None or depth() or x.layout is not _STRIDED or not is_plain(x):
            return False
        next(counter)
        return True

    def would_have(self, call: Hashable, x: Tensor) -> bool:
        """The same without counting."""
        return (call, x.numel(), x.dtype) in self._counters and x.layout is _STRIDED and is_plain(x)

    def add(self, call: Hashable, x: Tensor, operation: str, nbytes: int, reason: str) -> None:
        """From now on calls like this one are known; each counts as `nbytes` that `operation` sends."""
        if len(self._counters) < _MAX_KNOWN:
            counter = audit.tally(operation, x.dtype, nbytes, reason)
            if counter is not None:
                self._counters[call, x.numel(), x.dtype] = counter
