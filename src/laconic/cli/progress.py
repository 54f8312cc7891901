"""Progress of commands that take longer than two seconds: a live bar on a terminal, a line now and then elsewhere.

Both go to stderr. tqdm is an extra; without it a terminal gets lines, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from laconic.cost.sizes import format_nbytes
from laconic.output_lines import say

_SILENT_SECONDS = 2.0
"""What is done sooner says nothing."""
_SECONDS_PER_LINE = 15.0
_SECONDS_PER_REFRESH = 0.5


@contextlib.contextmanager
def progress_bar(total_nbytes: Callable[[], int], what: str) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done while the block runs.

    Args:
        total_nbytes: returns the bytes of the whole work; called only if something is shown.

    Yields:
        A function to call, from any thread, with each number of further bytes done.
    """
    tqdm = _tqdm(sys.stderr)
    if tqdm is None:
        yield _Lines(total_nbytes, what).advance
        return
    with tqdm(
        total=total_nbytes(), desc=what, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, file=sys.stderr
    ) as bar:

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show that the block, whose amount of work is not known, still runs: what it does, and for how long.

    Lines go where stderr is when the block begins, so that they are seen even if it hides what libraries write there.

    Yields:
        A function to call with what is done from now on; elsewhere than on a terminal each is a line.
    """
    with _same_stream() as stream:
        tqdm = _tqdm(stream)
        ended = threading.Event()
        if tqdm is None:
            show: Callable[[], None] = _Ticker(what, stream).tick
            tell, close = (lambda text: say(f"laconic: {text}", stream)), (lambda: None)
        else:
            bar = tqdm(total=1, desc=what, bar_format="{desc}, {elapsed}", leave=False, file=stream, dynamic_ncols=True)
            show, tell, close = bar.refresh, bar.set_description_str, bar.close

        def run() -> None:
            while not ended.wait(_SECONDS_PER_REFRESH):
                show()

        thread = threading.Thread(target=run, name="laconic-progress", daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            ended.set()
            thread.join()
            close()


class _Lines:
    def __init__(self, total_nbytes: Callable[[], int], what: str) -> None:
        self._total_nbytes, self._what = total_nbytes, what
        self._total: int | None = None
        self._done = 0
        self._next = time.monotonic() + _SILENT_SECONDS
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _SECONDS_PER_LINE
            if self._total is None:
                self._total = self._total_nbytes()
            share = f" ({self._done / self._total:.0%})" if self._total else ""
            say(f"laconic: {self._what}: {format_nbytes(self._done)} of {format_nbytes(self._total)}{share}")


class _Ticker:
    """Prints what is done after the first seconds, and later for how long it has been going on."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._stream = what, stream
        self._started = time.monotonic()
        self._next = _SILENT_SECONDS

    def tick(self) -> None:
        passed = time.monotonic() - self._started
        if passed < self._next:
            return
        what = self._what if self._next == _SILENT_SECONDS else f"{self._what}, {passed:.0f} s"
        say(f"laconic: {what}", self._stream)
        self._next = passed + _SECONDS_PER_LINE


@contextlib.contextmanager
def _same_stream() -> Iterator[TextIO]:
    try:
        copied = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError):  # no file, or closed
        yield sys.stderr
        return
    with copied:
        yield copied


def _tqdm(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
