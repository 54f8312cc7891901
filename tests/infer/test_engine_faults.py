"""What an engine does when listeners raise, workers stand still or talk nonsense, and callers leave or fork."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from laconic.errors import CollectiveError, ConfigError, LaconicError
from laconic.infer import ChosenToken, Engine, Sampling
from tests.distributed.processes import wait_until
from tests.infer.models import make
from tests.infer.scripted import (
    DESERTED,
    HALF_A_LINE,
    NO_EVENT,
    SILENT,
    SLOW,
    STALLED,
    script_workers,
    scripted_engine,
)
from tests.patience import patient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    script_workers(monkeypatch)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with scripted_engine(model) as engine:
        yield engine


class Raises:
    """A listener that raises at its `at`-th call."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.calls = at, error, 0

    def on_token(self, token: ChosenToken) -> None:
        self._call()

    def on_end(self, error: LaconicError | None) -> None:
        self._call()

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("no room"), SystemExit(3)])
def test_what_a_listener_raises_ends_its_request_alone(
    engine: Engine, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Raises(2, error)
    with caplog.at_level(logging.ERROR, "laconic"):
        failed = engine.stream([5], Sampling(max_new_tokens=4), bad)
        assert engine.generate([[6]], 3) == [[6, 6, 6]]
    with pytest.raises(type(error), match=str(error)):
        failed.result(patient(10))
    assert bad.calls == 2
    assert "the listener of request-0 raised; the request is cancelled" in caplog.text
    assert engine.free_cache_tokens == engine.cache_tokens


def test_what_a_listener_raises_at_its_end_is_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "laconic"):
        ended = engine.stream([5], Sampling(max_new_tokens=2), Raises(3, ValueError("late")))
        assert ended.result(patient(10)) == [5, 5]
        assert engine.generate([[6]], 1) == [[6]]
        silent = [engine.stream([SILENT], Sampling(), Raises(1, ValueError("end"))) for _ in range(2)]
        engine.close()
    for request in silent:
        with pytest.raises(CollectiveError, match="the engine is closed"):
            request.result(0)
    assert caplog.text.count("raised at its end") == 3


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (HALF_A_LINE, r"attention worker 0 \(pid \d+\) ended with exit code 7; its requests are lost"),
        (NO_EVENT, r"attention worker 0 \(pid \d+\) sent what is no event \(JSONDecodeError.*same version of laconic"),
    ],
)
def test_a_worker_whose_words_cannot_be_read_is_lost(engine: Engine, first: int, words: str) -> None:
    waiting = engine.submit([SILENT])
    with pytest.raises(CollectiveError, match=words):
        engine.submit([first]).result(patient(10))
    with pytest.raises(CollectiveError, match=words):
        waiting.result(patient(10))
    with pytest.raises(CollectiveError, match=words):
        engine.submit([1])


@pytest.mark.parametrize("killed", [True, False])
def test_a_worker_that_ends_because_its_peers_have_is_not_the_one_that_is_named(model: Path, killed: bool) -> None:
    with scripted_engine(model, attention=2) as engine:
        waiting, deserted = engine.submit([SILENT]), engine.submit([DESERTED])  # one for each worker
        wait_until(lambda: psutil.Process(engine.workers[1].pid).status() == psutil.STATUS_ZOMBIE)
        if killed:
            os.kill(engine.workers[0].pid, signal.SIGKILL)
        lost = r"0 \(pid \d+\) was killed by SIGKILL" if killed else r"1 \(pid \d+\) ended with exit code 0"
        for request in (deserted, waiting):
            with pytest.raises(CollectiveError, match=rf"attention worker {lost}"):
                request.result(patient(10))


@pytest.mark.ci
def test_a_micro_batch_that_hangs_beside_one_that_works_is_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.infer.watch._ATTRIBUTION_SECONDS", 0.7)
    with scripted_engine(model, answer_timeout_seconds=0.1) as engine:
        assert engine.generate([[SLOW]], 1) == [[SLOW]]
        with pytest.raises(CollectiveError, match=r"attention worker 0 .* is lost: .* no progress within 0\.8 s"):
            engine.generate([[STALLED]], 1)


def test_workers_that_stand_still_are_ended_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them with a full pipe, in which another thread waits."""
    monkeypatch.setattr("laconic.infer.workers._STOP_SECONDS", 1.0)
    with scripted_engine(model, attention=4) as engine:
        pids = [worker.pid for worker in engine.workers]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        filling = threading.Thread(target=lambda: [_submit_or_not(engine, [1] * 4000) for _ in range(40)])
        filling.start()
        filling.join(0.3)
        assert filling.is_alive()
        start = time.monotonic()
        engine.close()
        assert time.monotonic() - start < patient(3)
        filling.join(patient(5))
        assert not filling.is_alive()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _submit_or_not(engine: Engine, prompt: list[int]) -> None:
    with contextlib.suppress(CollectiveError):  # it is closed
        engine.submit(prompt, 1)


def test_ctrl_c_in_generate_leaves_nothing_in_flight(engine: Engine) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this with it ignored
    here = threading.get_ident()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(here, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[SILENT], [SILENT]])
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert engine.free_cache_tokens == engine.cache_tokens
    assert engine.generate([[7]], 1) == [[7]]


def test_an_engine_that_is_forgotten_is_ended(model: Path) -> None:
    engine = scripted_engine(model)
    pid = engine.workers[0].pid
    requests = [engine.submit([SILENT])]
    del engine
    gc.collect()
    assert psutil.pid_exists(pid)  # who holds a request that runs holds the engine
    assert requests[0].cancel()
    with pytest.warns(ResourceWarning, match="an Engine was not closed"):
        requests.clear()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_prompts_of_any_integers_and_of_nothing_else(engine: Engine) -> None:
    prompts: list[Any] = [np.array([5, 6]), torch.tensor([6]), (np.int32(7),), range(8, 10)]
    assert engine.generate(prompts, 1) == [[5], [6], [7], [8]]
    for prompt in ([1.0], "one", [[1, 2]], torch.tensor([[1, 2]]), [None], 5):
        with pytest.raises(ConfigError, match=r"^the prompt is .*must be a sequence of integers"):
            engine.submit(cast(Any, prompt))
    assert engine.free_cache_tokens == engine.cache_tokens


def test_a_request_may_take_the_whole_cache_and_no_more(engine: Engine) -> None:
    longest = engine.max_request_tokens
    assert engine.submit([3] * (longest - 1), 1).result(patient(10)) == [3]
    with pytest.raises(ConfigError, match=rf"need {longest + 1} tokens"):
        engine.submit([3] * longest, 1)


def test_engines_and_threads_side_by_side(model: Path, engine: Engine) -> None:
    with scripted_engine(model, attention=2) as other, ThreadPoolExecutor(8) as pool:
        asked = [(each, token) for token in range(40) for each in (engine, other)]
        found = pool.map(lambda pair: pair[0].generate([[pair[1]], [pair[1] + 1]], 2), asked)
        for (_, token), tokens in zip(asked, found, strict=True):
            assert tokens == [[token] * 2, [token + 1] * 2]


def test_close_from_anywhere_and_more_than_once(model: Path) -> None:
    """From a listener at a token, from a signal handler that interrupts a wait, and from many threads at once."""
    ended = threading.Event()

    class Closes(Raises):
        def on_token(self, token: ChosenToken) -> None:
            engine.close()
            ended.set()

    engine = scripted_engine(model)
    asked = engine.stream([5], Sampling(max_new_tokens=2), Closes(0, ValueError()))
    assert ended.wait(patient(15))
    with pytest.raises(CollectiveError, match="the engine is closed"):
        asked.result(0)
    assert not asked.cancel()

    engine = scripted_engine(model)
    before = signal.signal(signal.SIGALRM, lambda *_: engine.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(CollectiveError, match="the engine is closed"):
            engine.generate([[SILENT]])
    finally:
        signal.signal(signal.SIGALRM, before)

    engine = scripted_engine(model)
    waiting = engine.submit([SILENT])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: engine.close(), range(4)))
    with pytest.raises(CollectiveError, match="closed"):
        waiting.result(0)
    with pytest.raises(CollectiveError, match="closed"):
        engine.submit([1])


def test_a_block_that_raises_ends_the_workers_and_raises_the_same(model: Path) -> None:
    engine = scripted_engine(model)
    waiting, cancelled = (engine.submit([SILENT]) for _ in range(2))
    assert cancelled.cancel()
    with pytest.raises(CancelledError), engine:
        cancelled.result(0)
    with pytest.raises(CollectiveError, match="closed"):
        waiting.result(0)
    assert not cancelled.cancel()
    assert not psutil.pid_exists(engine.workers[0].pid)


def test_a_forked_process_does_not_keep_the_workers(engine: Engine) -> None:
    """The pipe to a worker closes, as at the end of the engine's process, while a child that it forked lives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads
        child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert engine.generate([[5]], 2) == [[5, 5]]  # the child has taken nothing from here
        engine._workers._processes[0].commands.close()
        with pytest.raises(CollectiveError, match="ended with exit code 0"):
            engine.submit([SILENT]).result(patient(10))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_request_that_was_not_sent_is_not_in_flight(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker would be taken for one that hangs."""

    def interrupted(rank: int, *commands: dict[str, Any]) -> None:
        if commands[0]["do"] == "request":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._workers, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.submit([1, 2])
    assert engine.free_cache_tokens == engine.cache_tokens
    assert engine.generate([[3]], 2) == [[3, 3]]
