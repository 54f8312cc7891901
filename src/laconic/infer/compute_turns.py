"""Whose turn it is to compute: the micro-batches of one attention worker share its processor.

Each micro-batch is a thread. It computes while it has the turn and gives the turn away while it waits for experts.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

Kind = Literal["attention", "shared"]


class ComputeTurns:
    """A lock with two queues: who waits for attention goes before who waits for shared experts, each in order of call.

    That is the order greedy. AASS runs so too: it differs only where micro-batches keep step, which nothing makes them
    do here. Under ASAS a micro-batch keeps its turn through its shared experts and does not queue.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[object]] = {"attention": deque(), "shared": deque()}
        self._taken = False

    def take(self, kind: Kind = "attention") -> None:
        """Wait for the turn and take it."""
        ticket, queue = object(), self._waiting[kind]
        with self._changed:
            queue.append(ticket)
            self._changed.wait_for(lambda: not self._taken and queue[0] is ticket and self._goes_first(kind))
            queue.popleft()
            self._taken = True

    def give(self) -> None:
        """Give the turn to the next who waits."""
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    def _goes_first(self, kind: Kind) -> bool:
        return kind == "attention" or not self._waiting["attention"]
