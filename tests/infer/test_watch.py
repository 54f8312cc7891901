"""The watch over attention workers, which here only note that they were ended, and the progress that they report."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from laconic.infer.control import Worker
from laconic.infer.in_flight import Generation, InFlight
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.transformers_seam import Finished
from laconic.infer.watch import Watch
from tests.distributed.processes import wait_until
from tests.infer.alone import worker_of
from tests.infer.models import make
from tests.patience import patient


class NotedWorker:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def no_cancel(generation: Generation, reason: BaseException) -> bool:
    raise AssertionError


def test_only_a_worker_with_requests_and_without_progress_is_ended() -> None:
    requests = InFlight(3, 100, 10)
    stuck, busy = (requests.take([1], Sampling(max_new_tokens=5), None, no_cancel)[0]._rank for _ in range(2))
    workers = [NotedWorker() for _ in range(3)]
    watch = Watch(cast(dict[int, Worker], dict(enumerate(cast(Any, workers)))), requests, 0.5)
    watch.start()
    for _ in range(100):
        watch.mark(busy)
        time.sleep(0.01)
    wait_until(lambda: workers[stuck].killed)
    watch.stop()
    assert [worker.killed for worker in workers] == [rank == stuck for rank in range(3)]
    assert watch.verdict(stuck) == "is lost: it made no progress within 0.5 s"
    assert watch.verdict(busy) is None


@pytest.mark.ci
def test_a_worker_says_how_long_its_slowest_micro_batch_has_stalled(tmp_path: Path) -> None:
    hold, counts, ended = threading.Event(), Counter[str](), set[str]()

    def on_tokens(chosen: list[tuple[str, ChosenToken]]) -> None:
        names = {name for name, _ in chosen}
        counts.update(names)
        if "hangs" in names:
            hold.wait(patient(60))  # on the thread that runs the model for it

    def on_finished(finished: Finished) -> None:
        assert finished.error is None
        ended.add(finished.name)

    path = make("llama", tmp_path)
    worker = worker_of(path, micro_batches=2, on_finished=on_finished, on_tokens=on_tokens)
    assert worker.stalled_seconds == 0
    worker.add("hangs", [1, 2], Sampling(max_new_tokens=3))
    wait_until(lambda: counts["hangs"] == 1)
    worker.add("works", [3], Sampling(max_new_tokens=500))
    wait_until(lambda: worker.stalled_seconds > 0.3)
    begun = counts["works"]
    wait_until(lambda: counts["works"] > begun + 2)
    assert worker.stalled_seconds > 0.3  # although blocks have ended
    assert time.monotonic() - worker.progress_time < worker.stalled_seconds
    hold.set()
    wait_until(lambda: ended == {"hangs", "works"})
    assert worker.stalled_seconds == 0
    worker.close()
