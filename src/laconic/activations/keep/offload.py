"""Offloads packed bytes to host memory until backward.

On a GPU, codes and scales are copied to pinned memory on a side stream while forward goes on. In backward they are
copied back on another stream, and fetching one prefetches those that will be asked for next, so that computation
overlaps both directions. Tensors in host memory stay where they are.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.activations.host.cuda_graph import is_captured
from laconic.errors import ModelError

AHEAD = 8
"""How many offloaded values are prefetched; a decoder layer sends about that many."""

Tensors = tuple[Tensor, ...]


class Copier(Protocol):
    """Copies tensors between a device and the host in the background."""

    def send(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Start copies to the host: the host tensors, and an event of their completion."""
        ...

    def fetch(self, tensors: Tensors, sent: Any) -> tuple[Tensors, Any]:
        """Start copies to the device after the event `sent`: the device tensors, and an event of their completion."""
        ...

    def wait(self, tensors: Tensors, fetched: Any) -> None:
        """Make the computation wait for the event `fetched`, of which `tensors` are the result."""
        ...


class OffloadHandle:
    """State of one offloaded value. Whoever saves the host tensors owns them.

    Args:
        host: the tensors in host memory.
        sent: the copier's event.
        before: the handle of the value offloaded before.
    """

    def __init__(self, host: Tensors, sent: Any, before: weakref.ref[OffloadHandle] | None) -> None:
        self.host = tuple(weakref.ref(tensor) for tensor in host)
        self.sent = sent
        self.before = before
        self.back: tuple[Tensors, Any] | None = None
        self.was_asked_for = False


class Offloader:
    """Offloads values of one device and prefetches them in backward.

    Args:
        copier: does the copying; None if there is nothing to copy.
    """

    def __init__(self, copier: Copier | None) -> None:
        self._copier = copier
        self._last: weakref.ref[OffloadHandle] | None = None

    def send(self, tensors: Tensors) -> tuple[Tensors, OffloadHandle | None]:
        """The tensors to save for backward in place of `tensors`, and the handle to pass to `fetch`."""
        if self._copier is None:
            return tensors, None
        host, sent = self._copier.send(tensors)
        handle = OffloadHandle(host, sent, self._last)
        self._last = weakref.ref(handle)
        return host, handle

    def fetch(self, host: Tensors, handle: OffloadHandle | None) -> Tensors:
        """The tensors on their device again; starts to prefetch those sent before them."""
        if self._copier is None or handle is None:
            return host
        tensors, fetched = handle.back or self._copier.fetch(host, handle.sent)
        handle.back, handle.was_asked_for = None, True
        self._fetch_ahead(handle)
        self._copier.wait(tensors, fetched)
        return tensors

    def _fetch_ahead(self, handle: OffloadHandle) -> None:
        """Prefetch values sent before this one: backward asks for them from the last to the first."""
        assert self._copier is not None
        for _ in range(AHEAD):
            earlier = None if handle.before is None else handle.before()
            if earlier is None:
                return
            host = tuple(tensor for tensor in (reference() for reference in earlier.host) if tensor is not None)
            # A second pass over a retained graph fetches when it asks: it may be the last, or not come at all.
            if earlier.back is None and not earlier.was_asked_for and len(host) == len(earlier.host):
                earlier.back = self._copier.fetch(host, earlier.sent)
            handle = earlier


class CudaCopier:
    """Copies on two streams of a CUDA device, one for each direction.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, tensors: Tensors) -> tuple[Tensors, torch.cuda.Event]:
        """Copy to pinned memory on the outgoing stream, after the work of the current stream.

        Raises:
            ModelError: a CUDA graph is captured.
        """
        if is_captured(self._device):
            raise ModelError(
                "a site is offloaded to host memory while a CUDA graph is captured, but a replay would copy to memory"
                " that has been given away; plan the site without offload, or call it outside of the graph"
            )
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu") for t in tensors)
            for source, target in zip(tensors, host, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._out)  # its memory is not given away before the copy has read it
        return host, self._out.record_event()

    def fetch(self, tensors: Tensors, sent: torch.cuda.Event) -> tuple[Tensors, torch.cuda.Event]:
        """Copy back to the device on the incoming stream, after the event `sent`."""
        self._back.wait_event(sent)
        with torch.cuda.stream(self._back):
            back = tuple(t.to(self._device, non_blocking=True) for t in tensors)
        return back, self._back.record_event()

    def wait(self, tensors: Tensors, fetched: torch.cuda.Event) -> None:
        """Make the current stream wait for the event `fetched`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(fetched)
        for tensor in tensors:
            tensor.record_stream(current)


@cache
def offloader_of(device: torch.device) -> Offloader:
    """The offloader of a device; there is one for each."""
    return Offloader(CudaCopier(device) if device.type == "cuda" else None)
