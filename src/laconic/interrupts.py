"""Code that Ctrl-C and SIGTERM do not interrupt, because a child process would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["interrupts_wait"]


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block, such as the start of a child process.

    An exception within `subprocess.Popen` leaves a child that nobody knows, and whose own signal was lost if it came
    between fork and exec.
    """
    if threading.current_thread() is not threading.main_thread():  # where handlers do not run
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # the last: of an interrupt that waits already
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)
