"""What of torch belongs to a thread, carried to another: whether autograd records, inference mode, autocast.

A thread starts with torch's defaults, so work that is moved to one (`laconic.schedule.execute.ThreadStream`) would
record a graph under `no_grad` and compute in fp32 under autocast. Hooks on saved tensors
(`torch.autograd.graph.saved_tensors_hooks`) are not carried: what they should see has to run in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

__all__ = ["thread_state"]

_DEVICE_TYPES = ("cpu", "cuda")


def thread_state() -> AbstractContextManager[None]:
    """Notes the calling thread's state; what is returned gives it to the thread that enters it."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _DEVICE_TYPES
        if kind == "cpu" or torch.cuda.is_available()
    ]

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, enabled, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return entered()
