"""What two processes do together, started once.

Each scenario is a run (or several) in a folder; the tests read what it left there. Errors that a scenario expects are
written to <scenario>.<rank>.txt in it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from laconic.errors import LaconicError
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.world import World
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.train.runs import AGOQ, StopAfter, resumed, spoilt, tiny_config

SMOOTH = {"optimizer.eps": 1e-2, "activations.bits": 16}
FSDP = {"parallel": "fsdp"}
ZIP = {"checkpoint.zip": True}
DROPOUT = {"model.extra": {"attention_dropout": 0.3}}

# name: changes to the tiny configuration; each is run in one piece, and with a stop after step 3 as "<name>-broken".
RUNS: dict[str, dict[str, Any]] = {
    "ddp": DROPOUT,
    "fsdp-agoq": FSDP | AGOQ | ZIP | {"accumulation": 2},
}
SLOW_RUNS: dict[str, dict[str, Any]] = {
    "fsdp": DROPOUT | FSDP | {"accumulation": 2},
    "ddp-agoq": AGOQ | {"accumulation": 2},
    "ddp-bf16": {"precision": "bf16"},
    "ddp-q8": DROPOUT | {"gradients.reduce": "q8"},
    "fsdp-bf16": FSDP | ZIP | {"precision": "bf16", "model.tie_word_embeddings": False},
}


class Pair:
    """The scenarios, as seen by one of the two processes."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.world = world

    def train(self, config: TrainConfig, stop_after: int | None = None, on_rank: int = 0) -> int:
        """Run `config`; with `stop_after`, the process `on_rank` alone hears the request to stop."""
        stops = stop_after is not None and self.world.rank == on_rank
        return run(config, self.world, StopAfter(stop_after or 0) if stops else StopRequest())

    def expect_error(self, name: str, config: TrainConfig) -> None:
        try:
            self.train(config)
        except LaconicError as error:
            (self.folder / f"{name}.{self.world.rank}.txt").write_text(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{name} did not fail")

    def copy(self, source: str, target: str) -> None:
        if self.world.is_main:
            shutil.copytree(self.folder / source, self.folder / target)
        self.world.gather(None)

    def interrupted_runs(self, runs: dict[str, dict[str, Any]]) -> None:
        for name, changes in runs.items():
            assert self.train(tiny_config(self.folder, name, changes)) == 0
            broken = tiny_config(self.folder, f"{name}-broken", changes)
            assert self.train(broken, stop_after=3, on_rank=1) == 130
            torch.manual_seed(self.world.rank + 77)
            assert self.train(resumed(broken)) == 0

    def smooth_runs(self) -> None:
        """Runs whose losses differ by rounding only, whatever the parallelism."""
        self.train(tiny_config(self.folder, "smooth-ddp", SMOOTH))
        self.train(tiny_config(self.folder, "smooth-fsdp", SMOOTH | FSDP))
        self.train(tiny_config(self.folder, "smooth-chunked-fsdp", SMOOTH | FSDP | {"activations.loss": "chunked"}))
        self.train(tiny_config(self.folder, "smooth-accumulated", SMOOTH | {"accumulation": 2}))

    def changed_worlds(self) -> None:
        """Go on with a run that one process began; DDP begins what FSDP2 ends, and the other way round."""
        self.train(resumed(tiny_config(self.folder, "smooth-1-2-1", SMOOTH | FSDP | ZIP)), stop_after=2)
        self.train(resumed(tiny_config(self.folder, "agoq-1-2-1", AGOQ | FSDP)), stop_after=2)
        for name, first, then in (("smooth-ddp-fsdp", ZIP, FSDP), ("smooth-fsdp-ddp", FSDP | ZIP, {})):
            self.train(tiny_config(self.folder, name, SMOOTH | first), stop_after=3)
            self.train(resumed(tiny_config(self.folder, name, SMOOTH | then)))

    def not_finite(self) -> None:
        """The loss of rank 1 alone becomes NaN in steps 2 and 4."""
        with spoilt({1, 3}, self.world.rank == 1):
            for name, changes in (("nan-ddp", {}), ("nan-fsdp", FSDP), ("nan-agoq", AGOQ)):
                self.train(tiny_config(self.folder, name, changes))
        with spoilt(set(range(2, 9)), self.world.rank == 1):
            self.expect_error("nan-all", tiny_config(self.folder, "nan-all", {"checkpoint.every": 1, "steps": 9}))

    def failed_saves(self) -> None:
        """The disk is full for rank 1 alone."""
        config = tiny_config(self.folder, "full", FSDP | {"checkpoint.every": 3})
        self.train(config, stop_after=3)
        with full_disk(self.world.rank == 1):
            self.expect_error("full", resumed(config))

    def refusals(self) -> None:
        self.train(tiny_config(self.folder, "kind", {"checkpoint.every": 3}), stop_after=3)
        self.expect_error("kind", resumed(tiny_config(self.folder, "kind", {"optimizer.kind": "adamw8bit"})))
        self.expect_error("batch", tiny_config(self.folder, "batch", {"batch_size": 3}))
        config = tiny_config(self.folder, "damaged", {"checkpoint.every": 3})
        self.train(config)
        if self.world.is_main:
            newest = self.folder / "damaged" / "checkpoints" / "step-00000006"
            for shard in newest.glob("__1_*"):
                shard.write_bytes(shard.read_bytes()[:-7])
        self.world.gather(None)
        self.expect_error("damaged", resumed(config))
        self.train(replace(resumed(config), checkpoint=replace(config.checkpoint, load=3)))


@contextmanager
def full_disk(here: bool) -> Iterator[None]:
    """Make DCP's files report a full disk, if `here`."""
    create = filesystem.FileSystem.create_stream

    @contextmanager
    def create_stream(self: Any, path: Any, mode: str) -> Iterator[Any]:
        if here and "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        with create(self, path, mode) as stream:
            yield stream

    filesystem.FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    try:
        yield
    finally:
        filesystem.FileSystem.create_stream = create  # type: ignore[method-assign]


def everything(world: World, folder: Path) -> None:
    """All scenarios of one of the processes but the slow ones."""
    pair = Pair(folder, world)
    pair.interrupted_runs(RUNS)
    pair.smooth_runs()
    pair.changed_worlds()
    pair.not_finite()
    pair.failed_saves()
    pair.refusals()


def more(world: World, folder: Path) -> None:
    """What takes long besides."""
    pair = Pair(folder, world)
    pair.interrupted_runs(SLOW_RUNS)
    pair.train(tiny_config(folder, "smooth-chunked-ddp", SMOOTH | {"activations.loss": "chunked"}))
