"""Streams of this process for the exchanges of layers of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from laconic.collectives.runtime.torch_compat import in_background
from laconic.moe.parallel.cuda_streams import CudaStream
from laconic.schedule.execute import InlineStream, Stream, ThreadStream
from laconic.schedule.moe_pipeline import COMPUTE, INTER, INTRA

__all__ = ["pipeline_streams"]

_wires: dict[torch.device, dict[str, Stream]] = {}


def pipeline_streams(device: torch.device) -> Mapping[str, Stream]:
    """Return this process's streams for layers on a device: two for communication, and the caller's thread.

    On CUDA the caller's stream takes the place of its thread. No machine with several GPUs has run this yet.
    """
    cuda = device.type == "cuda"
    if device not in _wires:

        def wire(name: str) -> Stream:
            return CudaStream(torch.cuda.Stream(device)) if cuda else ThreadStream(f"laconic-{name}", in_background)

        _wires[device] = {name: wire(name) for name in (INTER, INTRA)}
    return {**_wires[device], COMPUTE: CudaStream(torch.cuda.current_stream(device)) if cuda else InlineStream()}
