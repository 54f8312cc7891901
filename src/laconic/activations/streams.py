"""A tensor of which codes are kept, and the CUDA stream that has read it.

Torch's layers hold their input until backward; whoever keeps codes of it lets it go. Its memory is then free for the
stream that it was allocated on, whatever another one still reads there. So that other stream is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["record_reader"]


def record_reader(x: Tensor) -> None:
    """Keep the memory of `x` [...], even if it is let go, until the current stream has done what it has been given."""
    if x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling():
        x.record_stream(torch.cuda.current_stream(x.device))
