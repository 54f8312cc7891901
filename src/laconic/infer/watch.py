"""Watch over attention workers: one that has requests and makes no progress has hung, and is ended.

A thread that only says "I live" would say so of a worker whose forward is stuck. So a worker reports progress, that is
blocks of the model that have ended, and the watch compares the time since the last report with a limit while the worker
has requests. One that works on one micro-batch may hang in another: with its progress it reports for how long the
slowest micro-batch has made none. Expert workers are watched by the attention workers that wait for their answers.
"""

from __future__ import annotations

import threading
import time

from laconic.infer.control import Worker
from laconic.infer.in_flight import InFlight

_LOOKS = 20
"""In one limit; it is exceeded by at most one part of as many."""
_ATTRIBUTION_SECONDS = 10.0


def progress_limit(answer_timeout_seconds: float) -> float:
    """Return how long an attention worker may make no progress, seconds.

    It is longer than an expert worker may take to answer: an attention worker that waits for one is not to blame.
    """
    return answer_timeout_seconds + _ATTRIBUTION_SECONDS


class Watch:
    """Ends workers that have hung; their readers then ask for the `verdict`.

    `limit_seconds` is without progress of a worker, by rank, that has requests.
    """

    def __init__(self, workers: dict[int, Worker], requests: InFlight, limit_seconds: float) -> None:
        self._workers, self._requests, self._limit_seconds = workers, requests, limit_seconds
        self._idle_seconds = dict.fromkeys(workers, 0.0)
        self._verdicts: dict[int, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch, once the workers are ready."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def mark(self, rank: int, stalled_seconds: float = 0.0) -> None:
        """Note that a worker has made progress, and how long one of its micro-batches has made none."""
        if rank in self._idle_seconds:
            self._idle_seconds[rank] = stalled_seconds

    def verdict(self, rank: int) -> str | None:
        """Return why a worker was ended; None if it was not the watch that did."""
        return self._verdicts.get(rank)

    def _run(self) -> None:
        pause = self._limit_seconds / _LOOKS
        before = time.monotonic()
        while not self._stopped.wait(pause):
            now = time.monotonic()
            # An engine that was stopped itself has not read what its workers wrote, so a long pause counts as a short.
            passed, before = min(now - before, 2 * pause), now
            busy = self._requests.busy_ranks
            for rank, worker in self._workers.items():
                self._idle_seconds[rank] = self._idle_seconds[rank] + passed if rank in busy else 0.0
                if self._idle_seconds[rank] > self._limit_seconds and rank not in self._verdicts:
                    self._verdicts[rank] = f"is lost: it made no progress within {self._limit_seconds:g} s"
                    worker.kill()
