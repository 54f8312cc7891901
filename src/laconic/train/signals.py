"""Requests to stop a run: finish the step, save, leave. Every way of starting a run has its own signals.

Alone or under torchrun, SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) ask for it, and a second SIGINT leaves
at once. Under our launcher the processes get SIGUSR1 from it for the same request, while SIGTERM means that another
process has died and this one has seconds to go. A process waiting inside a collective runs no Python signal handlers,
so there a thread listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from laconic.interrupts import ending_signals, handled_by

EXIT_INTERRUPTED = 130
"""Exit code after SIGINT, by the shell's convention of 128 + signal number: stopped early, and saved. So for others."""
EXIT_PEER_LOST = 75
"""Exit code of a process that had to stop because another one did."""
STOP_SIGNAL = signal.SIGUSR1
"""What our launcher sends its processes to ask for a stop."""
_PACKAGE = Path(__file__).parents[1]
INTERRUPTED = "Interrupted: "
"""What the error file of a process begins with that left because of another one, before the place where it was."""

_PEER_LOST_GRACE_SECONDS = 3.0
_PARENT_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


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
        """While the block runs, SIGINT, SIGTERM and SIGHUP request a stop; a second SIGINT leaves at once.

        `announce` is called with a message for the user. Outside the main thread, where Python allows no handlers,
        signals keep their meaning.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.request(128 + number)
            announce("stopping after this step, then saving; Ctrl-C again leaves at once without saving")

        with handled_by(interrupt, ending_signals()):
            yield


def listen_to_launcher(stop: StopRequest) -> None:
    """Start the thread that handles our launcher's signals. Call it before any other thread is started.

    SIGUSR1 requests a stop, or ends the process when the loop has not begun. SIGTERM ends it after a short grace unless
    a stop is under way. The process also ends when the launcher does: on Linux the kernel kills it, even one that is
    stopped; elsewhere a thread looks every second.
    """
    signals = {STOP_SIGNAL, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited by all threads, so only sigwait gets them
    launcher = os.getppid()
    _die_with_parent()

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
            with contextlib.suppress(Exception):  # it is only for the message
                _record_place()
            os._exit(EXIT_PEER_LOST)

    def watch_launcher() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(EXIT_PEER_LOST)

    for target in (listen, watch_launcher):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, where the kernel can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _record_place() -> None:
    """Write where the main thread is into the error file that torch's elastic agent reads, unless there is one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    if not file or frame is None or os.path.exists(file):
        return
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack if Path(entry.filename).is_relative_to(_PACKAGE)]
    places = [f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}" for entry in (*ours[-1:], stack[-1])]
    text = INTERRUPTED + ", ".join(dict.fromkeys(places))
    details = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
    Path(file).write_text(json.dumps({"message": details}), encoding="utf-8")
