"""Reaches the processes that a script starts by multiprocessing's spawn, as `torch.multiprocessing.spawn` does.

Such a process begins anew and knows nothing of what was watched in its parent. So its target is wrapped in an object
that switches the savings on around it there, and writes what came of them to a folder of the parent's, which prints
one summary. Workers of data loaders are left alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from laconic.run.models import Wishes
from laconic.run.savings import Savings
from laconic.run.summary import summarize
from laconic.run.zipped_groups import ZippedGroups


@dataclass(frozen=True)
class _Reached:
    """The target of a spawned process, with the savings around it."""

    target: Callable[..., Any]
    wishes: Wishes
    zip: str
    folder: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        savings = Savings(self.wishes)
        groups = None if self.zip == "off" else ZippedGroups(self.zip)  # type: ignore[arg-type]  # checked by the parent
        try:
            with savings, groups or nullcontext():
                return self.target(*args, **kwargs)
        finally:
            if not savings.is_forked and (savings.models or savings.optimizers):
                path = Path(self.folder) / f"{time.time_ns()}-{os.getpid()}"
                path.write_text(json.dumps(summarize(savings, groups)), encoding="utf-8")
                path.rename(path.with_suffix(".json"))  # whole, or not there


class Spawned:
    """Context manager in which processes that are spawned get the savings, too.

    Attributes:
        summaries: after the block, what the processes that trained wrote when they ended, the first one first.
    """

    def __init__(self, wishes: Wishes, zip: str) -> None:
        self._wishes, self._zip = wishes, zip
        self.summaries: list[dict[str, Any]] = []

    def __enter__(self) -> Spawned:
        self._process = os.getpid()
        # Made when a process is spawned: nothing is left of a script that spawns none, whatever kills it.
        self._folder = os.path.join(tempfile.gettempdir(), f"laconic-run-{secrets.token_hex(8)}")
        spawned = self

        def start(process: Any) -> None:
            target = process._target
            if target is not None and not getattr(target, "__module__", "").startswith("torch.utils.data"):
                os.makedirs(spawned._folder, 0o700, exist_ok=True)
                process._target = _Reached(target, spawned._wishes, spawned._zip, spawned._folder)
            BaseProcess.start(process)

        SpawnProcess.start = start  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if "start" in vars(SpawnProcess):  # and no other has given back that of its base
            del SpawnProcess.start
        if os.getpid() == self._process:  # and not a process that the script forked
            self.summaries = [json.loads(path.read_text("utf-8")) for path in sorted(Path(self._folder).glob("*.json"))]
            shutil.rmtree(self._folder, ignore_errors=True)
