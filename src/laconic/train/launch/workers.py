"""The processes that our launcher has started, as it sees them: who they are, in which step, and whether they run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from laconic.train.launch_record import StepFile

WORKER = "laconic.train.launch.worker"
"""The module that the processes run."""

_POLL_SECONDS = 0.5


def step_file(folder: Path, rank: int) -> StepFile:
    """The file in which the process `rank` of the attempt in `folder` tells its launcher about itself."""
    return StepFile(folder / f"rank-{rank}")


class Workers:
    """The processes of one attempt at a run."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._files = [step_file(folder, rank) for rank in range(num_ranks)]
        self.stopped: dict[int, float] = {}
        """Ranks that `kill_stopped` has killed, and the seconds for which they had not run."""

    def pids(self) -> dict[int, int]:
        """Process ids by rank, of those that have begun."""
        known = ((rank, file.read()) for rank, file in enumerate(self._files))
        return {rank: status[0] for rank, status in known if status is not None}

    def steps(self) -> dict[int, int]:
        """The steps, from 1, that processes are or were in, by rank, of those that have begun one."""
        known = ((rank, file.read()) for rank, file in enumerate(self._files))
        return {rank: status[1] for rank, status in known if status is not None and status[1] is not None}

    def send_signal(self, number: int) -> bool:
        """Send a signal to all that run, even before they have written who they are; False if none does."""
        reached = False
        for pid in {*self.pids().values(), *_starting()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                reached = True
        return reached

    @contextmanager
    def kill_stopped(self, after_seconds: float) -> Iterator[None]:
        """While the block runs, kill a process that was stopped (SIGSTOP, a full freezer) for so long."""
        done = threading.Event()

        def watch() -> None:
            since: dict[int, float] = {}
            before = time.monotonic()
            while not done.wait(_POLL_SECONDS):
                now = time.monotonic()
                if now - before > 4 * _POLL_SECONDS:  # this process did not run either
                    since.clear()
                before = now
                for rank, pid in self.pids().items():
                    if not _is_stopped(pid):
                        since.pop(rank, None)
                    elif now - since.setdefault(rank, now) >= after_seconds and rank not in self.stopped:
                        self.stopped[rank] = now - since[rank]
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

        watcher = threading.Thread(target=watch, name="stopped workers", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _starting() -> list[int]:
    """Processes of ours that run the worker's module, whether they have got to its first line or not."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if WORKER in child.cmdline():
                found.append(child.pid)
    return found


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
