"""How Ctrl-C, SIGTERM and SIGHUP end a command: in order, and Ctrl-C not within an import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_LOOK_AGAIN_SECONDS = 0.05
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a closed terminal, end a command as Ctrl-C does: children and temporary files go, too.

    A rank dies at once, as it may be waiting in a collective that never returns to Python. What nohup has ignored stays
    ignored.
    """
    alone = "RANK" not in os.environ and threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDING if alone and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit_in_order)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) in (_exit_in_order, signal.SIG_IGN):
                signal.signal(number, signal.SIG_DFL)


def _exit_in_order(number: int, _: object) -> NoReturn:
    for other in _ENDING:  # the end is on its way
        signal.signal(other, signal.SIG_IGN)
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
