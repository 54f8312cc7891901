"""Calls of a group that are known to be left raw, so that they cost next to nothing on top of the backend's own.

gloo takes a tenth of a millisecond for a short message on one machine: three per cent of that are a few microseconds, a
dozen lines of Python. So what was decided once for a call, a number of elements and a dtype is looked up, in one table
per group, and counted without a lock. What may change, that data does not shrink or that coding is slower, is compared
in each call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.policy.chooser import Refusal
from laconic.collectives.runtime.callbacks import here

T = TypeVar("T")

_MAX_KNOWN = 1024
"""A program whose sizes never repeat must not fill the memory."""

_STRIDED = torch.strided


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a strided tensor is its values from front to back; sparse ones are left to the backend."""
    return x.layout != torch.strided or is_plain_strided(x)


def is_plain_strided(x: Tensor) -> bool:
    """Whether a tensor is strided, and its memory is its values from front to back."""
    return x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg()


class RawRoute:
    """How a call of a function goes that is known to be left raw: its counter, the group that carries it, the root.

    `beside` are elements of its other tensor, if it has two; `refusal` is what the cost model says of each such call,
    None if nothing can change that it is left raw.
    """

    __slots__ = ("_beside", "_count", "_refusal", "group", "root")

    def __init__(
        self, count: Iterator[int], carrier: Callable[[], Any], root: int, beside: int | None, refusal: Refusal | None
    ) -> None:
        self._count, self._beside, self._refusal = count, beside, refusal
        self.group, self.root = carrier, root

    def fits(self, beside: Tensor, x: Tensor) -> bool:
        """Whether a second tensor is plain, on the CPU, of the dtype of `x` and the right size."""
        return beside.numel() == self._beside and beside.dtype is x.dtype and beside.is_cpu and is_plain_strided(beside)

    def goes(self, tensors: Iterable[Tensor] = (), async_op: bool = False) -> bool:
        """Whether this call with `tensors` is left raw as well; counts it then."""
        # Calls in the background are chosen for there, by what their own group has learnt. And a call that may be coded
        # takes tensors that the backend does not: made in inference mode, or of autograd.
        if self._refusal is not None and (
            async_op or any([x.is_inference() or x.requires_grad for x in tensors]) or not self._refusal.holds()
        ):
            return False
        next(self._count)
        return True

    def run(self, start: Callable[..., T], *arguments: Any) -> T:
        """Start the call, and tell the cost model what it takes if that wants to know."""
        if self._refusal is None or self._refusal.observe is None:
            return start(*arguments)
        began = time.perf_counter_ns()
        work = start(*arguments)
        self._refusal.observe(time.perf_counter_ns() - began)
        return work


class RawCalls:
    """Calls of one group that are left raw, with plain CPU tensors, outside of callbacks, which have their own order.

    Their names are tuples for functions, whose arguments that are no tensors they have, and strings for methods of a
    laconic group.
    """

    def __init__(self, carrier: dist.ProcessGroup) -> None:
        """`carrier` carries the calls of the group."""
        self._carrier = weakref.ref(carrier)
        self._routes: dict[tuple[Hashable, int, torch.dtype], RawRoute] = {}

    def find(self, call: Hashable, x: Tensor) -> RawRoute | None:
        """The route of such a call with `x`, if it is known."""
        route = self._routes.get((call, x.numel(), x.dtype))
        return route if route is not None and not here.depth and x.is_cpu and is_plain_strided(x) else None

    def has(self, call: Hashable, x: Tensor) -> bool:
        """Whether such a call with `x` is known to be left raw; counts it then."""
        route = self.find(call, x)
        return route is not None and route.goes()

    def add(
        self,
        call: Hashable,
        x: Tensor,
        operation: str,
        nbytes: int,
        reason: str,
        root: int = 0,
        beside: int | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """From now on calls like this one are known; the audit counts each as `nbytes` that `operation` sends.

        The rest is as for `RawRoute`; `x` is the tensor whose size decides.
        """
        key = call, x.numel(), x.dtype
        if x.is_cpu and (key in self._routes or len(self._routes) < _MAX_KNOWN):
            count = audit.tally(operation, x.dtype, nbytes, reason)
            if count is not None:
                self._routes[key] = RawRoute(count, self._carrier, root, beside, refusal)

    def clear(self) -> None:
        """Forget all."""
        self._routes.clear()


_known: dict[int, RawCalls] = {}
"""By id of the group that the caller gives, while it lives: a weak dictionary takes as long as all the rest."""


def raw_calls_of(group: dist.ProcessGroup, carrier: dist.ProcessGroup) -> RawCalls:
    """The calls of `group`, which `carrier` carries, that are known."""
    key = id(group)
    if key not in _known:
        _known[key] = RawCalls(carrier)
        weakref.finalize(group, _known.pop, key, None)
    return _known[key]


def known_route(group: Any, call: Hashable, x: Tensor, beside: Tensor | None, async_op: bool) -> RawRoute | None:
    """The route of a call that is left raw as others like it were, whose arguments were found to be right; counts it.

    `group` is as the caller gave it. The size of `x` decides; `beside` is the other tensor, if there are two.
    """
    known = _known.get(id(dist.group.WORLD if group is None else group))
    route = None if known is None else known.find(call, x)
    if route is None or not (beside is None or route.fits(beside, x)):
        return None
    return route if route.goes((x,) if beside is None else (x, beside), async_op) else None


def forget_routes() -> None:
    """To be called when something has been learnt by which calls might be coded."""
    for known in list(_known.values()):  # another thread may let a group go meanwhile
        known.clear()
