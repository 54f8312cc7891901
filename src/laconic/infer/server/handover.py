"""Calls of an engine's threads, brought to the event loop of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


class Handover:
    """Runs calls of any thread on an event loop, in order; the loop is woken once for all that have come meanwhile.

    Waking a loop takes a system call and a change of threads, and a forward gives each of many requests a token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` soon; never if the loop has been closed, since nobody is interested any more then."""
        with self._lock:
            self._calls.append((function, args))
            if len(self._calls) > 1:
                return  # the loop has been woken, and has not taken the first yet
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            with self._lock:
                self._calls.clear()

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function, args in calls:
            try:
                function(*args)
            except Exception as error:
                self.loop.call_exception_handler({"message": f"{function.__qualname__} failed", "exception": error})
