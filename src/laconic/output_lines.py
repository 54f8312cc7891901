"""Lines for whoever reads: whole, and no reason to fail when nobody does any more. No torch."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream` (None: stderr) at once, if that is possible.

    In unbuffered Python `print` writes a line's end apart, amid lines of other processes. A terminal that was closed or
    a reader that has left must not end a run of hours, whose files hold what it has to say.
    """
    stream = sys.stderr if stream is None else stream
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed; a signal handler amid another line
        stream.write(f"{line}\n")
        stream.flush()
