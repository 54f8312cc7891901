"""The signals that ask a program to end, and code that they do not interrupt. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP, which comes when a terminal is closed, unless it is ignored as nohup has it."""
    always = (signal.SIGINT, signal.SIGTERM)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object], numbers: Iterable[int]) -> Iterator[None]:
    """Let `handler` have these signals; outside the main thread, where Python allows no handlers, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let the signals that ask for an end wait for that of the block, such as the start of a child process.

    An exception within `subprocess.Popen` leaves a child that nobody knows, and whose own signal was lost if it came
    between fork and exec.
    """
    came: list[int] = []
    numbers = (*ending_signals(), signal.SIGALRM)  # the last: of an interrupt that waits already
    try:
        with handled_by(lambda number, _: came.append(number), filter(_is_handled, numbers)):
            yield
    finally:
        for held in came:
            signal.raise_signal(held)


def _is_handled(number: int) -> bool:
    return callable(signal.getsignal(number))
