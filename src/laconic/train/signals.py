"""Requests to stop a run: finish the step, save, leave. Every way of starting a run has its own signals.

Alone or under torchrun, SIGINT (Ctrl-C) and SIGTERM ask for it, and a second SIGINT leaves at once. Under our launcher
the processes get SIGUSR1 from it for the same request, while SIGTERM means that another process has died and this one
has seconds to go. A process waiting inside a collective runs no Python signal handlers, so there a thread listens.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["EXIT_INTERRUPTED", "EXIT_PEER_LOST", "EXIT_TERMINATED", "STOP_SIGNAL", "StopRequest", "listen_to_launcher"]

EXIT_INTERRUPTED = 130
"""Exit code after SIGINT, by the shell's convention of 128 + signal number: stopped early, and saved."""
EXIT_TERMINATED = 143
"""The same after SIGTERM."""
EXIT_PEER_LOST = 75
"""Exit code of a process that had to stop because another one did."""
STOP_SIGNAL = signal.SIGUSR1
"""What our launcher sends its processes to ask for a stop."""

_PEER_LOST_GRACE_SECONDS = 3.0
_PARENT_POLL_SECONDS = 1.0


class StopRequest:
    """Whether this process has been asked to stop, and the exit code that goes with it."""

    def __init__(self) -> None:
        self._code: int | None = None
        self.armed = False
        """Whether the loop looks at this object: before, a request ends the process at once."""

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._code is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that stopped on request, also when the request reached another process."""
        return EXIT_INTERRUPTED if self._code is None else self._code

    def request(self, code: int = EXIT_INTERRUPTED) -> None:
        """Ask for a stop; the first request decides the exit code."""
        if self._code is None:
            self._code = code

    @contextmanager
    def on_signals(self, announce: Callable[[str], None]) -> Iterator[None]:
        """While the block runs, SIGINT and SIGTERM of this process request a stop; a second SIGINT leaves at once.

        `announce` is called with a message for the user. Outside the main thread, where Python allows no handlers,
        signals keep their meaning.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.request(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)
            announce("stopping after this step, then saving; Ctrl-C again leaves at once without saving")

        before: dict[int, Any] = {
            number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen_to_launcher(stop: StopRequest) -> None:
    """Start the thread that handles our launcher's signals. Call it before any other thread is started.

    SIGUSR1 requests a stop, or ends the process when the loop has not begun. SIGTERM ends it after a short grace unless
    a stop is under way. The process also ends when the launcher does.
    """
    signals = {STOP_SIGNAL, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited by all threads, so only sigwait gets them
    launcher = os.getppid()

    def listen() -> None:
        while True:
            if signal.sigwait(signals) == STOP_SIGNAL:
                if not stop.armed:
                    os._exit(EXIT_PEER_LOST)
                stop.request()
            else:
                threading.Timer(_PEER_LOST_GRACE_SECONDS, leave_unless_stopping).start()

    def leave_unless_stopping() -> None:
        if not stop.requested:
            os._exit(EXIT_PEER_LOST)

    def watch_launcher() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(EXIT_PEER_LOST)

    for target in (listen, watch_launcher):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()
