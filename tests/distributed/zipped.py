"""Runs with `--zip` in two processes.

As in `tests.distributed.pair`, each scenario is a run in a folder, and the tests read what it left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.train.distributed import comm_compression
from laconic.train.distributed.world import World
from tests.distributed.pair import Pair
from tests.train.runs import AGOQ, resumed, tiny_config

DROPOUT = {"model.extra": {"attention_dropout": 0.3}}
TWO_STAGES = {"pipeline.stages": 2, "pipeline.micro_batches": 2, "model.num_hidden_layers": 4}
INTERLEAVED = {"pipeline.schedule": "interleaved-1f1b", "pipeline.virtual_stages": 2}
GPIPE = {"pipeline.schedule": "gpipe"}

# name: changes; each is run raw, and zipped in one piece ("<name>-on") and with a stop after step 3 ("<name>-broken").
RUNS: dict[str, dict[str, Any]] = {
    "ddp": DROPOUT | {"accumulation": 2},
    "fsdp-bf16": {"parallel": "fsdp", "precision": "bf16", "accumulation": 2},
    "1f1b": TWO_STAGES | DROPOUT,
    "fsdp-agoq": AGOQ | {"parallel": "fsdp", "precision": "bf16"},
}
# Other schedules of a pipeline.
SLOW_RUNS: dict[str, dict[str, Any]] = {
    "gpipe": TWO_STAGES | GPIPE,
    "interleaved": TWO_STAGES | INTERLEAVED | {"activations.bits": 16},
}
# Runs on their own.
OTHERS: dict[str, dict[str, Any]] = {
    "auto": {"zip": "auto", "parallel": "fsdp"},
    "ddp-agoq": AGOQ | {"zip": "on"},
}


@contextmanager
def found(torch_seconds: float, our_seconds: float) -> Iterator[None]:
    """Runs measure this."""
    measure = comm_compression.seconds_of_sums
    comm_compression.seconds_of_sums = lambda *_: (torch_seconds, our_seconds)
    try:
        yield
    finally:
        comm_compression.seconds_of_sums = measure


class Zipped(Pair):
    """The scenarios, as seen by one of the processes."""

    def runs(self, runs: dict[str, dict[str, Any]]) -> None:
        for name, changes in runs.items():
            self.train(tiny_config(self.folder, name, changes))
            on = changes | {"zip": "on"}
            self.train(tiny_config(self.folder, f"{name}-on", on))
            broken = tiny_config(self.folder, f"{name}-broken", on)
            assert self.train(broken, stop_after=3, on_rank=1) == 130
            torch.manual_seed(self.world.rank + 77)
            assert self.train(resumed(broken)) == 0

    def others(self) -> None:
        for name, changes in OTHERS.items():
            self.train(tiny_config(self.folder, name, changes))

    def automatic(self) -> None:
        """DDP where torch's sums are faster, and where those over a codec are; a run goes on as it began."""
        for name, seconds in {"torch": (1.0, 2.0), "codec": (2.0, 1.0)}.items():
            changes = DROPOUT | {"zip": "auto", "checkpoint.every": 3}
            broken = tiny_config(self.folder, f"auto-{name}-broken", changes)
            with found(*seconds):
                self.train(tiny_config(self.folder, f"auto-{name}", changes))
                self.train(broken, stop_after=3, on_rank=1)
            with found(*reversed(seconds)):
                self.train(resumed(broken))
        group = dist.group.WORLD
        assert group is not None
        torchs, ours = comm_compression.seconds_of_sums(5000, torch.float32, group, torch.device("cpu"))
        assert self.world.gather((torchs, ours)) == [[torchs, ours]] * 2
        assert min(torchs, ours) > 0

    def refusals(self) -> None:
        config = tiny_config(self.folder, "different")
        self.expect_error("different", replace(config, zip="on" if self.world.is_main else "off"))


def more(world: World, folder: Path) -> None:
    """What takes long besides."""
    Zipped(folder, world).runs(SLOW_RUNS)


def everything(world: World, folder: Path) -> None:
    """All other scenarios of one of the processes."""
    scenarios = Zipped(folder, world)
    scenarios.runs(RUNS)
    scenarios.others()
    scenarios.automatic()
    scenarios.refusals()
