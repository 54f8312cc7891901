"""The launch that a process of a run belongs to, and the restarts of the run: `launch.json` in its directory.

A launch is one `laconic train` or one torchrun, however often it starts processes anew. A process finds out from the
file that the run in its directory was begun by its own launch: then it goes on with it, from the newest good checkpoint
or, where there is none yet, from the beginning. A run of another launch goes on only with `--resume`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil

from laconic.durable import write_whole

LAUNCH_FILE = "launch.json"
"""Its name in a run directory, and in the folder where our launcher tells its processes about it."""


@dataclass(frozen=True)
class Restart:
    """One restart of a run's processes."""

    launch: str
    """Id of the launch."""
    time: str
    """When the failure was seen, in ISO 8601."""
    reason: str
    """What had happened, with the rank that failed first."""
    rank: int | None = None
    """That rank; None where nothing tells which it was, as under torchrun."""
    step: int | None = None
    """Step, from 1, in which that rank was; None before the first one and under torchrun."""


def now() -> str:
    """The time in ISO 8601, to the millisecond."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Launch:
    """What starts the processes of a run, and what became of those it has started before."""

    id: str
    restarts: tuple[Restart, ...] = ()
    abandoned: tuple[str, ...] = ()
    """Checkpoints, by name, that are newer than the one this launch began from: no restart goes on from one of them."""

    def began(self, run_dir: Path) -> bool:
        """Whether this launch has begun, or gone on with, the run in `run_dir` before."""
        found = _read(run_dir / LAUNCH_FILE)
        return found is not None and found.id == self.id

    def in_directory(self, run_dir: Path) -> Launch:
        """This launch with what `run_dir` tells about it and about restarts by earlier launches."""
        found = _read(run_dir / LAUNCH_FILE)
        if found is None:
            return self
        earlier = tuple(restart for restart in found.restarts if restart.launch != self.id)
        own = self.restarts or tuple(restart for restart in found.restarts if restart.launch == self.id)
        return Launch(self.id, earlier + own, found.abandoned if found.id == self.id else ())

    def save(self, folder: Path) -> None:
        """Write it into `folder`; the file appears whole or not at all."""
        write_whole(folder / LAUNCH_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> Launch:
        """Read what `save` has written."""
        found = _read(folder / LAUNCH_FILE)
        assert found is not None, folder
        return found


def _read(file: Path) -> Launch | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        restarts = tuple(Restart(**restart) for restart in content["restarts"])
        return Launch(str(content["id"]), restarts, tuple(map(str, content["abandoned"])))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def launch_of_torchrun(environment: Mapping[str, str]) -> Launch | None:
    """The launch of a process that torchrun has started; None for any other process.

    It is the rendezvous's id, or, where that says nothing ("none", torchrun's default), the agent on this machine.
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    if run_id == "none":
        with contextlib.suppress(psutil.Error):
            agent = psutil.Process(os.getppid())
            run_id = f"{agent.pid}@{agent.create_time():.2f}"
    return Launch(f"torchrun {run_id}")


@dataclass
class StepFile:
    """A file in which a process of our launcher says its id and the step it is in, for the launcher to read."""

    path: Path
    _descriptor: int | None = field(default=None, repr=False)

    def write(self, step: int | None) -> None:
        """Say that `step`, counted from 1, has begun; None: none yet."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        text = f"{os.getpid()} {-1 if step is None else step}"
        os.pwrite(self._descriptor, text.ljust(64).encode(), 0)

    def read(self) -> tuple[int, int | None] | None:
        """The process id, and its step or None; None before the process has written."""
        try:
            pid, step = map(int, self.path.read_text().split())
        except (OSError, ValueError):
            return None
        return pid, None if step < 0 else step


def restarts_of(launch: Launch | None, run_dir: Path) -> tuple[Restart, ...]:
    """The restarts so far of the run in `run_dir`."""
    return (launch or Launch("")).in_directory(run_dir).restarts


def record_launch(
    launch: Launch, run_dir: Path, goes_on: bool, checkpoints: Sequence[str], chosen: str | None
) -> tuple[Restart, ...]:
    """Write into `run_dir` that its run belongs to `launch`.

    Args:
        goes_on: whether the launch has begun the run before.
        checkpoints: names of all checkpoints, the newest first.
        chosen: the one that the run continues from; None: it begins.

    Returns:
        The restarts of the run so far.
    """
    recorded = launch.in_directory(run_dir)
    if not goes_on:
        newer = checkpoints[: checkpoints.index(chosen)] if chosen in checkpoints else ()
        recorded = replace(recorded, abandoned=tuple(newer))
    elif not launch.restarts:  # torchrun tells its processes no reason
        again = Restart(launch.id, now(), "torchrun started it again")
        recorded = replace(recorded, restarts=(*recorded.restarts, again))
    recorded.save(run_dir)
    return recorded.restarts
