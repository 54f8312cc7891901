"""Memory for large results on the CPU, in huge pages where the system gives them.

A large result is memory that the process has not written yet. The system maps it at the first write, page by page of
4 KiB, and for a codec that takes longer than the values themselves. Asked for huge pages, it maps 2 MiB at a time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGE_NBYTES = 4 << 20
"""From here on a result is asked for in huge pages."""

_CPU = torch.device("cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """Return `torch.empty`; of a large one on the CPU the system is asked to map it in huge pages.

    It is asked with madvise, so only on Linux and where /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or
    `always`; elsewhere nothing else happens.
    """
    result = torch.empty(shape, dtype=dtype, device=device)
    if result.nbytes >= LARGE_NBYTES and device.type == "cpu":
        _advise(result.data_ptr(), result.data_ptr() + result.nbytes, "MADV_HUGEPAGE")
    return result


def cut(x: Tensor, nbytes: int) -> Tensor:
    """Return the first bytes of uint8 [n] as a tensor whose storage is no longer; `x` must not be used any more.

    A large one on the CPU is not copied: the memory behind goes back to the system, its addresses stay taken.
    """
    if x.device.type != "cpu" or nbytes < LARGE_NBYTES or not _advise(x.data_ptr() + nbytes, x.data_ptr() + x.nbytes):
        return x[:nbytes].clone()
    view = (ctypes.c_uint8 * nbytes).from_address(x.data_ptr())
    setattr(view, "owner", x)  # noqa: B010 - the storage keeps the view, and the view the memory
    return torch.frombuffer(view, dtype=torch.uint8)


def _advise(first: int, last: int, advice: str = "MADV_DONTNEED") -> bool:
    """Tell the system something of the whole pages between two addresses; returns whether there is a way to."""
    if (advise := _madvise()) is None:
        return False
    page = mmap.PAGESIZE
    first, last = -(-first // page) * page, last // page * page
    return last <= first or advise(first, last - first, getattr(mmap, advice)) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    advise: Callable[[int, int, int], int] = function
    return advise
