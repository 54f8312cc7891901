"""Faults that a process of a run does to itself, or to its launcher, at a named moment.

They are installed in a worker before it begins (tests/distributed/forked_workers.py). One attempt at a run meets at
most one of them: the first attempt the first of the list, and so on.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.train import trainer as trainer_module
from laconic.train.checkpoint import save_load
from laconic.train.checkpoint.manifest import MANIFEST
from laconic.train.distributed.world import World
from laconic.train.launch_record import Launch

__all__ = ["ACTIONS", "MOMENTS", "SAVING", "Fault", "dump", "install"]

MOMENTS = ("start", "forward", "reduce", "update", "between", "shards", "manifest", "written", "renamed")
"""When a fault happens: before processes meet, before the forward, before the all-reduce of a step's votes, after the
optimizer's step, some time in a step, before the shards of a checkpoint, before its manifest, before its name, before
`latest`. The last three are rank 0's."""
SAVING = ("manifest", "written", "renamed")
ACTIONS = ("kill", "stop", "exit", "raise", "memory", "spin", "launcher")
"""What happens: SIGKILL, SIGSTOP, exit(3), an exception, no more memory, an endless wait, SIGKILL of the launcher."""


@dataclass(frozen=True)
class Fault:
    """One fault of one process, in the first of its moments at or after a step."""

    moment: str
    action: str
    rank: int
    step: int
    delay_seconds: float = 0.0
    """For "between": how long after the beginning of the step."""


def dump(faults: list[Fault], log: Path) -> str:
    """The text for `install`; what happens is written to `log`, a line each."""
    return json.dumps({"faults": [asdict(fault) for fault in faults], "log": str(log)})


def install(text: str) -> None:
    """Let this process, a worker of our launcher, do the fault of its attempt if it is its own."""
    given = json.loads(text)
    log = Path(given["log"])
    attempt = len(Launch.load(Path(os.environ["LACONIC_STORE"]).parent).restarts)
    _write(log, {"pid": os.getpid(), "attempt": attempt})
    if attempt >= len(given["faults"]):
        return
    fault = Fault(**given["faults"][attempt])
    if fault.rank == int(os.environ["RANK"]):
        _arm(fault, _Once(fault, log))


def _write(log: Path, entry: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\n")


class _Once:
    """Does the fault when it is called, the first time."""

    def __init__(self, fault: Fault, log: Path) -> None:
        self._fault = fault
        self._log = log
        self._done = False

    def __call__(self) -> None:
        if self._done:
            return
        self._done = True
        _write(self._log, {"fault": asdict(self._fault), "time": time.time()})
        _act(self._fault.action)


def _act(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("a fault of the test")
        case "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
            torch.empty(1 << 30, dtype=torch.uint8)
        case "spin":
            while True:
                time.sleep(1)
        case "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
    raise AssertionError(action)


def _arm(fault: Fault, act: Callable[[], None]) -> None:
    """Patch the place of the fault's moment; this process is a test's and ends with it."""
    current = {"step": 0}

    def before(owner: Any, name: str, applies: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(owner, name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if current["step"] >= fault.step and applies(*args):
                act()
            return original(*args, **kwargs)

        setattr(owner, name, patched)

    step = trainer_module.Trainer.step

    def counted(self: Any, number: int, *args: Any) -> Any:
        current["step"] = number + 1
        if fault.moment == "between" and current["step"] >= fault.step:
            timer = threading.Timer(fault.delay_seconds, act)
            timer.daemon = True
            timer.start()
        return step(self, number, *args)

    trainer_module.Trainer.step = counted  # type: ignore[method-assign]
    match fault.moment:
        case "start":
            from laconic.train.distributed import world

            original = world.join_world

            def join(*args: Any) -> World:
                act()
                return original(*args)

            world.join_world = join
        case "forward":
            before(trainer_module.Trainer, "_forward_backward")
        case "reduce":
            before(World, "sum")
        case "update":
            register_optimizer_step_post_hook(lambda *_: act() if current["step"] >= fault.step else None)
        case "shards":
            before(save_load, "save")
        case "manifest":
            before(save_load, "_write_durably", lambda path, *_: path.name == MANIFEST)
        case "written":
            before(save_load, "_publish")
        case "renamed":
            before(save_load, "_point_latest")
