"""Codes, and what is rebuilt from them, are shared by readers on one CUDA stream only.

A reader on another stream has waited for an event that was recorded behind the tensor, and the codes may have been made
after that event. Backward runs on the stream of its forward, and two readers there do not wait for each other either.
So a second stream packs the tensor once more.

Torch's layers hold their input until backward; whoever keeps codes of it lets it go. Its memory is then free for the
stream that it was allocated on, whatever another one still reads there. So that other stream is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stream_of(x: Tensor) -> torch.cuda.Stream | None:
    """The current stream of the device of `x`; None on the CPU and while a graph is traced."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return None
    return torch.cuda.current_stream(x.device)


def record_reader(x: Tensor) -> None:
    """Keep the memory of `x` [...], even if it is let go, until the current stream has done what it has been given."""
    if x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling():
        x.record_stream(torch.cuda.current_stream(x.device))
