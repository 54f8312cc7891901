"""The watch over attention workers, with workers that only note that they were ended."""

from __future__ import annotations

import time
from typing import Any, cast

from laconic.infer.control import Worker
from laconic.infer.in_flight import Generation, InFlight
from laconic.infer.sampling import Sampling
from laconic.infer.watch import Watch
from tests.infer.serving import until


class NotedWorker:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def no_cancel(generation: Generation, reason: BaseException) -> bool:
    raise AssertionError


def test_only_a_worker_with_requests_and_without_progress_is_ended() -> None:
    requests = InFlight(3, 100, 10)
    stuck, busy = (requests.take([1], Sampling(max_new_tokens=5), None, no_cancel).rank for _ in range(2))
    workers = [NotedWorker() for _ in range(3)]
    watch = Watch(cast(dict[int, Worker], dict(enumerate(cast(Any, workers)))), requests, 0.5)
    watch.start()
    for _ in range(100):
        watch.mark(busy)
        time.sleep(0.01)
    until(lambda: workers[stuck].killed)
    watch.stop()
    assert [worker.killed for worker in workers] == [rank == stuck for rank in range(3)]
    assert watch.verdict(stuck) == "is lost: it made no progress within 0.5 s"
    assert watch.verdict(busy) is None
