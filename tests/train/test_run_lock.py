"""One run at a time in a directory: who holds the lock, who has lost it, and what happens to a second run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from laconic.errors import CheckpointError, ConfigError
from laconic.train import run_lock
from laconic.train.config.toml import save_config
from laconic.train.run_lock import LOCK_FILE, RunLock
from tests.distributed.processes import Ending, ForkedCommand, num_steps, wait_until
from tests.train.runs import losses, resumed, tiny_config, train_alone


def holder(**changes: Any) -> dict[str, Any]:
    return run_lock._record("somebody", os.getpid()) | changes


def write(run_dir: Path, content: Any) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / LOCK_FILE).write_text(json.dumps(content))
    return run_dir


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 0.05)


def test_a_lock_is_held_once_and_let_go_of(tmp_path: Path) -> None:
    with RunLock() as first:
        first.acquire(tmp_path / "new" / "run")
        with RunLock() as second, pytest.raises(ConfigError, match=rf"where a run \(pid {os.getpid()} on .* at work"):
            second.acquire(tmp_path / "new" / "run")
        first.check()
    assert list((tmp_path / "new" / "run").iterdir()) == []
    with RunLock() as third:
        third.acquire(tmp_path / "new" / "run")


def test_a_dead_holder_s_lock_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(tmp_path, holder(pid=gone.pid))
    with RunLock() as lock:
        lock.acquire(tmp_path)
        assert f"taking over from a run (pid {gone.pid} on" in caplog.text
        lock.check()


def test_a_number_used_again_is_another_process(tmp_path: Path) -> None:
    write(tmp_path, holder(started="1"))  # this very pid, but of a process that began at another time
    with RunLock() as lock:
        lock.acquire(tmp_path)


def test_the_remains_of_a_process_hold_nothing(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    write(tmp_path, holder(pid=zombie.pid, started=run_lock._started(zombie.pid)))
    with RunLock() as lock, pytest.raises(ConfigError, match=f"pid {zombie.pid}"):
        lock.acquire(tmp_path)
    zombie.kill()
    wait_until(lambda: run_lock._started(zombie.pid) is None)
    with RunLock() as lock:
        lock.acquire(tmp_path)
    zombie.wait()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": "x"}', "\x00" * 20])
def test_a_torn_lock_holds_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    with RunLock() as lock:
        lock.acquire(tmp_path)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"machine": "another boot"}])
def test_a_holder_elsewhere_is_known_by_its_touch(change: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path, holder(**change)) / LOCK_FILE
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with RunLock() as lock, pytest.raises(ConfigError, match=f"is at work; .* delete {file}"):
            lock.acquire(tmp_path)
    finally:
        done.set()
        thread.join()
    with RunLock() as lock:
        lock.acquire(tmp_path)  # silent for half a second


@pytest.mark.usefixtures("impatient")
def test_a_lost_lock_is_noticed(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.acquire(tmp_path)
        write(tmp_path, holder())
        with pytest.raises(CheckpointError, match="no longer this run's"):
            lock.check()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["token"] == "somebody"  # not ours to remove


def _compete(folder: Path, rounds: int, results: Any) -> None:
    wins = 0
    for index in range(rounds):
        with RunLock() as lock:
            try:
                lock.acquire(folder / str(index))
            except ConfigError:
                continue
            wins += 1
            assert not (folder / f"{index}.taken").exists() or (folder / f"{index}.free").exists()
            (folder / f"{index}.taken").touch()
            time.sleep(0.002)
            (folder / f"{index}.free").touch()
    results.put(wins)


def test_of_many_at_once_one_holds_it(tmp_path: Path) -> None:
    """Every directory begins with the lock of a dead run, which all want to take over."""
    rounds, processes = 20, 6
    for index in range(rounds):
        write(tmp_path / str(index), holder(started="1"))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_compete, args=(tmp_path, rounds, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * processes
    assert sum(results.get() for _ in workers) >= rounds


def two_trainings(config: Path) -> list[Ending]:
    """How `laconic train` with one configuration ends twice at once; the lower exit code first."""
    command = ["train", "--config", str(config)]
    both = [ForkedCommand(command, config.parent / name) for name in ("first", "second")]
    return sorted((command.finish() for command in both), key=lambda ending: ending.code)


@pytest.mark.ci
def test_a_second_run_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 40, "checkpoint.every": 5, "eval_every": 0})
    train_alone(config, stop_after=5)
    save_config(resumed(config), tmp_path / "resumed.toml")
    endings = two_trainings(tmp_path / "resumed.toml")
    # The slower one may also come when the faster has done all steps.
    assert endings[0].code == 0, endings
    assert endings[1].code == 2 or "has done 40 of 40 steps" in endings[0].out + endings[1].out, endings
    if endings[1].code == 2:
        assert "is at work; stop it or choose another run_dir" in endings[1].err
        assert "Traceback" not in endings[1].err
    assert sorted(losses(config.run_dir)) == list(range(1, 41))
    assert not (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.ci
def test_two_new_runs_in_one_directory(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 40, "eval_every": 0})
    train_alone(tiny_config(tmp_path, "warm", {"steps": 1}))  # so that both find the data tokenized
    save_config(config, tmp_path / "config.toml")
    endings = two_trainings(tmp_path / "config.toml")
    assert [ending.code for ending in endings] == [0, 2], endings
    assert "is at work" in endings[1].err or "is not empty" in endings[1].err
    assert sorted(losses(config.run_dir)) == list(range(1, 41))


def test_a_run_that_was_killed_is_gone_on_with_at_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 1000, "checkpoint.every": 1, "eval_every": 0})
    save_config(config, tmp_path / "config.toml")
    command = ForkedCommand(["train", "--config", str(tmp_path / "config.toml")], tmp_path / "printed")
    wait_until(lambda: num_steps(config.run_dir) >= 3, timeout_seconds=120)
    command.kill()
    assert command.finish().code == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK_FILE).exists()
    again = tiny_config(tmp_path, "run", {"steps": num_steps(config.run_dir) + 2, "eval_every": 0})
    assert train_alone(resumed(again)) == 0
    assert sorted(losses(config.run_dir)) == list(range(1, again.steps + 1))


def _tries_to_take(run_dir: Path, done: threading.Event, taken: list[str]) -> None:
    """A second run at the door all the time: what it could have taken, and what the lock said then."""
    while not done.is_set():
        with RunLock() as lock, contextlib.suppress(ConfigError):
            lock.acquire(run_dir)
            if not done.is_set():
                taken.append(f"taken when {len(losses(run_dir))} steps were done")
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGKILL),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, signal.SIGKILL), (0, signal.SIGSTOP))),
    ],
)
@pytest.mark.ci
def test_no_other_run_gets_in_between_two_attempts(rank: int, number: int, tmp_path: Path) -> None:
    """A launcher starts lost processes again: from the first step to the end, the directory is its own."""
    changes = {"steps": 30, "checkpoint.every": 2, "eval_every": 0, "nproc": 2, "restarts": 1}
    config = tiny_config(tmp_path, "run", changes | {"rank_timeout_seconds": 8})
    save_config(config, tmp_path / "config.toml")
    command = ForkedCommand(["train", "--config", str(tmp_path / "config.toml")], tmp_path / "printed")
    wait_until(lambda: num_steps(config.run_dir) >= 4, timeout_seconds=120)
    done, taken = threading.Event(), list[str]()
    visitor = threading.Thread(target=_tries_to_take, args=(tmp_path / "run", done, taken))
    visitor.start()
    try:
        holder = json.loads((tmp_path / "run" / LOCK_FILE).read_text())
        launcher = psutil.Process(command.pid)
        forked = [child for child in launcher.children() if child.cmdline() == launcher.cmdline()]
        sorted(forked, key=lambda child: child.pid)[rank].send_signal(number)
        wait_until(lambda: num_steps(config.run_dir) >= 28, timeout_seconds=120)
    finally:
        done.set()
        visitor.join()
    ending = command.finish()
    assert ending.code == 0, ending
    assert "restart 1 of 1" in ending.err
    assert not taken, taken
    assert holder["pid"] == command.pid
    assert sorted(losses(config.run_dir)) == list(range(1, 31))
    assert not (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.parametrize("seed", range(3))
def test_who_takes_a_launch_s_lock(seed: int, tmp_path: Path) -> None:
    """Only processes of the same launcher and launch; ids alone may be given twice."""
    chance = random.Random(seed)
    for _ in range(40):
        launch, pid = chance.choice(["mine", "other", None]), chance.choice([os.getppid(), os.getpid()])
        content = run_lock._record("earlier", pid) | {"launch": launch}
        write(tmp_path, content)
        asked = chance.choice(["mine", "third", None])
        with RunLock(asked) as lock:
            if asked is not None and (asked, os.getppid()) == (launch, pid):
                lock.acquire(tmp_path)
                assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getppid()
            else:
                with pytest.raises(ConfigError, match=f"a run \\(pid {pid} on .* at work"):
                    lock.acquire(tmp_path)


@pytest.mark.usefixtures("impatient")
def test_a_launcher_keeps_its_lock_while_no_process_runs(tmp_path: Path) -> None:
    file = tmp_path / LOCK_FILE
    with run_lock.keep_for_launch(tmp_path, "mine"):
        write(tmp_path, run_lock._record("earlier", os.getpid()) | {"launch": "mine"})
        os.utime(file, (1, 1))
        wait_until(lambda: file.stat().st_mtime > 2, timeout_seconds=20)
    assert not file.exists()
    with run_lock.keep_for_launch(tmp_path, "mine"):
        write(tmp_path, holder(launch="other"))
        os.utime(file, (1, 1))
        time.sleep(0.3)
        assert file.stat().st_mtime == 1
    assert file.exists()


def test_a_failed_process_of_a_launch_leaves_the_lock_to_it(tmp_path: Path) -> None:
    for launch, kept in (("mine", True), (None, False)):
        with contextlib.suppress(ZeroDivisionError), RunLock(launch) as lock:
            lock.acquire(tmp_path)
            raise ZeroDivisionError
        assert (tmp_path / LOCK_FILE).exists() is kept
        (tmp_path / LOCK_FILE).unlink(missing_ok=True)
        with RunLock(launch) as lock:
            lock.acquire(tmp_path)
        assert not (tmp_path / LOCK_FILE).exists()
