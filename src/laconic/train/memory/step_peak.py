"""The most bytes of tensors at one time during a computation, as torch's allocators count them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_nbytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a device's allocator has handed out at one time while `run` runs, beyond those before.

    On CUDA the allocator is asked; on the CPU it is the sum over the events of torch's memory profiler, which does not
    see what threads allocate that were not started by torch itself.
    """
    gc.collect()  # the profiler miscounts what was made before it and goes while it watches
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        run()
    now = peak = 0
    assert watched.profiler is not None
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
