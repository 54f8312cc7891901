"""The signals that ask a program to end, and code that they do not interrupt. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP, which comes when a terminal is closed, unless it is ignored as nohup has it."""
    always = (signal.SIGINT, signal.SIGTERM)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let the signals that ask for an end wait for that of the block, such as the start of a child process.

    An exception within `subprocess.Popen` leaves a child that nobody knows, and whose own signal was lost if it came
    between fork and exec.
    """
    if threading.current_thread() is not threading.main_thread():  # where handlers do not run
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (*ending_signals(), signal.SIGALRM)  # the last: of an interrupt that waits already
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)
