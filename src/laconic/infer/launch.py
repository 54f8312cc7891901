"""Launchers of an engine's workers: processes of this machine, or the ranks of torchrun."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from laconic.errors import ConfigError
from laconic.infer.control import (
    LocalWorker,
    RankConnections,
    Worker,
    check_world,
    connect_rank,
    master_store,
)
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.interrupts import interrupts_wait
from laconic.train.distributed.world import RankInfo, num_cores, read_environment

Launcher = Literal["engine", "torchrun"]


def torchrun_info(launcher: Launcher, split: EngineSplit) -> RankInfo | None:
    """Return this rank of torchrun; None where the engine starts its workers.

    A rank other than 0, or more or fewer processes than workers, are a ConfigError.
    """
    if launcher == "engine":
        return None
    info = read_environment(os.environ)
    if info is None or info.rank != 0:
        raise ConfigError(
            f"launcher is 'torchrun', but RANK is {None if info is None else info.rank}: the engine runs on"
            " rank 0 of torchrun, and other ranks call laconic.infer.serve_rank"
        )
    check_world(info, split)
    return info


class WorkerLauncher:
    """Starts the workers of one engine, again if need be, and says where they meet.

    `settings` are by rank, without `store` and with the `threads` that were asked for; ranks of torchrun have
    `timeout_seconds` to connect, and a store of torchrun that cannot be reached is a ConfigError.
    """

    def __init__(self, settings: Sequence[WorkerSettings], info: RankInfo | None, timeout_seconds: float) -> None:
        self._settings, self._timeout_seconds = list(settings), timeout_seconds
        self._connections: RankConnections | None = None
        self._interface: str | None = "lo"
        if info is None:
            threads = max(1, num_cores() // len(settings))
            self._settings = [replace(each, threads=each.threads or threads) for each in settings]
        elif info.world_size > 1:
            store, opened = master_store(info, timeout_seconds)
            self._connections = RankConnections(opened)
            self._interface = "lo" if info.local_world_size == info.world_size else None
            self._settings = [replace(each, store=store) for each in settings]
        self._scratch = tempfile.TemporaryDirectory(prefix="laconic-infer-")

    def launch(self, attempt: int) -> list[Worker]:
        """Start all workers, or take those of torchrun (CollectiveError if one is late); they are not yet ready."""
        if self._connections is None:
            # A file of its own: what an earlier set of workers has written must not be found.
            store = str(Path(self._scratch.name) / f"store-{attempt}")
            return _start([replace(each, store=store) for each in self._settings], self._interface)
        (first,) = _start(self._settings[:1], self._interface)
        try:
            found = self._connections.accept(dict(enumerate(self._settings[1:], 1)), self._timeout_seconds)
        except BaseException:
            _end(first)
            raise
        finally:
            self._connections.close()
        return [first, *(found[rank] for rank in sorted(found))]

    def close(self) -> None:
        """Remove what the workers met in."""
        self._scratch.cleanup()


def _start(settings: Sequence[WorkerSettings], interface: str | None) -> list[Worker]:
    """Start a process for each; if one cannot be started, none stays."""
    started: list[Worker] = []
    try:
        for each in settings:
            with interrupts_wait():
                started.append(LocalWorker(each, interface))
    except BaseException:
        with interrupts_wait():
            for worker in started:
                _end(worker)
        raise
    return started


def _end(worker: Worker) -> None:
    worker.kill()
    worker.wait()
    worker.close()


def serve_rank(timeout_seconds: float = 300.0) -> NoReturn:
    """Be the worker of a rank above 0 that torchrun has started, and end the process with it.

    Rank 0 runs `Engine(..., launcher="torchrun")` and says what this rank is to be. The directory of the model has the
    same path on all machines.

    Args:
        timeout_seconds: for the engine on rank 0 to start.

    Raises:
        ConfigError: this is no rank above 0, or rank 0 cannot be reached.
    """
    from laconic.infer.worker import work  # which `python -m laconic.infer.worker` must not find imported already

    settings, commands, events = connect_rank(timeout_seconds)
    work(settings, commands, events)
