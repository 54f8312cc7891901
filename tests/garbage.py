"""What code leaves behind that only Python's search for cycles frees, and with it tensors and threads, much later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

__all__ = ["left_in_cycles"]


def left_in_cycles(do: Callable[[], object], times: int = 2) -> Counter[str]:
    """Classes of what `do` leaves in cycles of references, after `times` runs that may import and cache."""
    for _ in range(times):
        do()
    gc.collect()
    gc.freeze()  # what there is: searches look at the rest only
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        do()
        gc.collect()
        return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
