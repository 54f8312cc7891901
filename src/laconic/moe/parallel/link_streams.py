"""Streams of this process for the exchanges of layers of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from laconic.collectives.runtime.thread_state import ThreadState, thread_state
from laconic.collectives.runtime.torch_compat import in_background
from laconic.moe.parallel.cuda_streams import CudaStream
from laconic.schedule.execute import InlineStream, Stream, ThreadStream
from laconic.schedule.moe_pipeline import COMPUTE, INTER, INTRA

_wires: dict[torch.device, dict[str, Stream]] = {}


@contextmanager
def _in_background(state: ThreadState) -> Iterator[None]:
    with in_background(), state.entered():
        yield


def _as_caller() -> AbstractContextManager[None]:
    """Give a task of another thread the settings that its caller has."""
    return _in_background(thread_state())


@contextmanager
def in_callers_thread(device: torch.device) -> Iterator[None]:
    """Let what would run on this process's streams run in the thread that asks for it, whose tensors can be counted."""
    kept = _wires.pop(device, None)
    _wires[device] = {name: InlineStream() for name in (INTER, INTRA)}
    try:
        yield
    finally:
        del _wires[device]
        if kept is not None:
            _wires[device] = kept


def pipeline_streams(device: torch.device) -> Mapping[str, Stream]:
    """Return this process's streams for layers on a device: two for communication, and the caller's thread.

    On CUDA the caller's stream takes the place of its thread. No machine with several GPUs has run this yet.
    """
    cuda = device.type == "cuda"
    if device not in _wires:

        def wire(name: str) -> Stream:
            return CudaStream(torch.cuda.Stream(device)) if cuda else ThreadStream(f"laconic-{name}", _as_caller)

        _wires[device] = {name: wire(name) for name in (INTER, INTRA)}
    return {**_wires[device], COMPUTE: CudaStream(torch.cuda.current_stream(device)) if cuda else InlineStream()}
