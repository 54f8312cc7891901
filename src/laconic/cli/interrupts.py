"""How Ctrl-C and SIGTERM end a command: in order, and not within an import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["ending_in_order_at_sigterm", "interrupted_between_imports"]

_LOOK_AGAIN_SECONDS = 0.05


@contextlib.contextmanager
def ending_in_order_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that it ends its child processes and removes temporary files.

    A rank dies at once, as it may be waiting in a collective that never returns to Python.
    """
    alone = "RANK" not in os.environ and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit_at_sigterm)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (_exit_at_sigterm, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_at_sigterm(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # the end is on its way
    sys.exit(128 + number)


@contextlib.contextmanager
def interrupted_between_imports() -> Iterator[None]:
    """Let the first Ctrl-C wait for the end of an import.

    An exception that comes while torch's C++ part initializes itself aborts the process, and some modules swallow one
    that comes while they are imported: the command would go on as if nobody had pressed a key.
    """
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does at SIGINT; within an import look again soon, at a second SIGINT raise."""
    waits = number == signal.SIGALRM or signal.getsignal(signal.SIGALRM) is not _interrupt
    if waits and _imports(frame):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_SECONDS)
        return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a module's code is being run in a frame or in one that has called it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False
