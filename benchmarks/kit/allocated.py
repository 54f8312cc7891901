"""What the C library's allocator has handed out: every byte of CPU tensors, whoever keeps them and why.

Saved-tensor hooks do not see what recomputation caches or a compiled graph keeps; the allocator does. Reading it takes
half a microsecond, so a thread that reads it all the time finds the peak.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from laconic.train.memory import step_peak
from laconic.train.model_split import mean_loss


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


def allocated_nbytes() -> int:
    """Bytes in use, small blocks and mapped ones. Raises AttributeError where the C library is not glibc >= 2.33."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def peak_nbytes(run: Callable[[], object]) -> int:
    """The most bytes that are in use during `run` beyond those before it."""
    gc.collect()
    before = peak = allocated_nbytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(5e-5):
            peak = max(peak, allocated_nbytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return peak - before


def peak_of_step(model: nn.Module, ids: Tensor, bf16: bool, micro_batches: int, chunked: bool) -> int:
    """The most bytes of tensors at one time in a step of the trainer after a warm-up, beyond those before it.

    Counted from the events of torch's memory profiler, so only what torch's allocator hands out. ids: int64 [n, s].
    `chunked` says that the model was given loss="chunked".
    """

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = mean_loss(model, ids, chunked, input_ids=ids)
            loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    return step_peak.peak_nbytes(step, ids.device)
