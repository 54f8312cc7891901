"""Packed bytes in the host's memory while they wait for backward.

On a GPU, codes and scales are copied to pinned memory on a stream of their own while forward goes on. In backward they
come back on another stream, and asking for one starts the copies of those that will be asked for next, so that the way
back hides behind the computation as well. For tensors that are in the host's memory already there is nothing to do.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["AHEAD", "Copier", "Lane", "Parcel", "lane_of"]

AHEAD = 8
"""How many parcels are fetched before they are asked for; a decoder layer sends about that many."""

Tensors = tuple[Tensor, ...]


class Copier(Protocol):
    """Moves tensors between a device and the host. What it starts runs in the background."""

    def send(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Starts copies to the host: the host tensors, and a mark of the moment they are complete."""
        ...

    def fetch(self, tensors: Tensors, sent: Any) -> tuple[Tensors, Any]:
        """Starts copies to the device once `sent` has come: the device tensors, and a mark of their completion."""
        ...

    def wait(self, tensors: Tensors, fetched: Any) -> None:
        """Lets the computation wait for `fetched`, of which `tensors` are the result."""
        ...


class Parcel:
    """Tensors of one kept value on their way to the host and back. The host tensors belong to whoever saves them.

    Args:
        host: the tensors in the host's memory.
        sent: the copier's mark.
        before: what was sent before it.
    """

    def __init__(self, host: Tensors, sent: Any, before: weakref.ref[Parcel] | None) -> None:
        self.host = tuple(weakref.ref(tensor) for tensor in host)
        self.sent = sent
        self.before = before
        self.back: tuple[Tensors, Any] | None = None
        self.was_asked_for = False


class Lane:
    """The way between one device and the host.

    Args:
        copier: does the copying; None if there is nothing to copy.
    """

    def __init__(self, copier: Copier | None) -> None:
        self._copier = copier
        self._last: weakref.ref[Parcel] | None = None

    def send(self, tensors: Tensors) -> tuple[Tensors, Parcel | None]:
        """What to save for backward in place of `tensors`, and the parcel that `fetch` wants to see."""
        if self._copier is None:
            return tensors, None
        host, sent = self._copier.send(tensors)
        parcel = Parcel(host, sent, self._last)
        self._last = weakref.ref(parcel)
        return host, parcel

    def fetch(self, host: Tensors, parcel: Parcel | None) -> Tensors:
        """The tensors on their device again, and a start for those that were sent before them."""
        if self._copier is None or parcel is None:
            return host
        tensors, fetched = parcel.back or self._copier.fetch(host, parcel.sent)
        parcel.back, parcel.was_asked_for = None, True
        self._fetch_ahead(parcel)
        self._copier.wait(tensors, fetched)
        return tensors

    def _fetch_ahead(self, parcel: Parcel) -> None:
        """Backward asks for parcels from the last to the first, so those sent before this one come next."""
        assert self._copier is not None
        for _ in range(AHEAD):
            earlier = None if parcel.before is None else parcel.before()
            if earlier is None:
                return
            host = tuple(tensor for tensor in (reference() for reference in earlier.host) if tensor is not None)
            # A second pass over a retained graph fetches when it asks: it may be the last, or not come at all.
            if earlier.back is None and not earlier.was_asked_for and len(host) == len(earlier.host):
                earlier.back = self._copier.fetch(host, earlier.sent)
            parcel = earlier


class CudaCopier:
    """Copies on two streams of a CUDA device, one for each direction.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, tensors: Tensors) -> tuple[Tensors, torch.cuda.Event]:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for source, target in zip(tensors, host, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._out)  # its memory is not given away before the copy has read it
        return host, self._out.record_event()

    def fetch(self, tensors: Tensors, sent: torch.cuda.Event) -> tuple[Tensors, torch.cuda.Event]:
        self._back.wait_event(sent)
        with torch.cuda.stream(self._back):
            back = tuple(t.to(self._device, non_blocking=True) for t in tensors)
        return back, self._back.record_event()

    def wait(self, tensors: Tensors, fetched: torch.cuda.Event) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(fetched)
        for tensor in tensors:
            tensor.record_stream(current)


@cache
def lane_of(device: torch.device) -> Lane:
    """The lane of a device; there is one for each."""
    return Lane(CudaCopier(device) if device.type == "cuda" else None)
