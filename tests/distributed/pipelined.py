"""What the processes of a pipeline do together.

As in `tests.distributed.pair`, each scenario is a run in a folder, and the tests read what it left there. Two processes
do most of them; four processes are slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from laconic.train.distributed.world import World
from laconic.train.model_split import ModelChunk
from tests.distributed.pair import Pair
from tests.train.runs import AGOQ, resumed, tiny_config

LAYERS = {"model.num_hidden_layers": 4}
SMOOTH = {"optimizer.eps": 1e-2, "activations.bits": 16} | LAYERS
DROPOUT = {"model.extra": {"attention_dropout": 0.3}} | LAYERS
UNTIED = {"model.tie_word_embeddings": False}
CHUNKED = {"activations.loss": "chunked"}
FSDP = {"parallel": "fsdp"}
TWO = {"pipeline.stages": 2, "pipeline.micro_batches": 2}
GPIPE = TWO | {"pipeline.schedule": "gpipe"}
INTERLEAVED = TWO | {"pipeline.schedule": "interleaved-1f1b", "pipeline.virtual_stages": 2}
FOUR = {"pipeline.stages": 4, "pipeline.micro_batches": 4}

Runs = dict[str, dict[str, Any]]

# name: changes, the number of processes first. Smooth runs are compared with one process; the others, which compress
# activations, are run in one piece and with a stop after step 3 as "<name>-broken".
SMOOTH_RUNS: Runs = {
    "2-1f1b": TWO,
    "2-interleaved": INTERLEAVED,
    "2-untied": TWO | UNTIED | CHUNKED,
}
BROKEN_RUNS: Runs = {
    "2-1f1b-nf4": TWO | DROPOUT,
    "2-interleaved-agoq": INTERLEAVED | DROPOUT | AGOQ,
}
# Other combinations of the same.
SLOW_SMOOTH_RUNS: Runs = {
    "2-gpipe": GPIPE,
    "4-ddp": TWO,
    "4-1f1b": FOUR,
    "4-fsdp": TWO | FSDP | CHUNKED,
    "4-interleaved-fsdp": INTERLEAVED | FSDP,
}
SLOW_BROKEN_RUNS: Runs = {
    "4-fsdp-agoq": TWO | FSDP | LAYERS | AGOQ,
    "4-ddp-agoq": TWO | LAYERS | AGOQ,
    "4-ddp-q8": TWO | LAYERS | {"gradients.reduce": "q8"},
    "4-fsdp-bf16": TWO | FSDP | LAYERS | {"precision": "bf16"},
}


class Pipelined(Pair):
    """The scenarios, as seen by one of the processes."""

    def of_this_size(self, runs: Runs) -> Runs:
        return {name: changes for name, changes in runs.items() if name.startswith(f"{self.world.size}-")}

    def smooth_runs(self, runs: Runs) -> None:
        for name, changes in self.of_this_size(runs).items():
            self.train(tiny_config(self.folder, name, SMOOTH | changes))

    def interrupted_runs(self, runs: Runs) -> None:
        for name, changes in self.of_this_size(runs).items():
            self.train(tiny_config(self.folder, name, changes))
            broken = tiny_config(self.folder, f"{name}-broken", changes)
            assert self.train(broken, stop_after=3, on_rank=self.world.size - 1) == 130
            torch.manual_seed(self.world.rank + 77)
            assert self.train(resumed(broken)) == 0

    def changed_layouts(self) -> None:
        """Interleaved stages go on with what FSDP2 began, and FSDP2 with what they left."""
        self.train(tiny_config(self.folder, "2-changed", SMOOTH | FSDP), stop_after=2)
        self.train(resumed(tiny_config(self.folder, "2-changed", SMOOTH | INTERLEAVED)), stop_after=2)
        self.train(resumed(tiny_config(self.folder, "2-changed", SMOOTH | FSDP)))

    def not_finite(self) -> None:
        """The second step's loss is NaN, which only the last stage sees."""
        loss = ModelChunk.loss
        calls = {"training": 0}

        def spoilt(self: ModelChunk, x: torch.Tensor, labels: torch.Tensor, chunked: bool) -> torch.Tensor:
            calls["training"] += torch.is_grad_enabled()
            value = loss(self, x, labels, chunked)
            return value * float("nan") if torch.is_grad_enabled() and calls["training"] == 4 else value

        ModelChunk.loss = spoilt  # type: ignore[method-assign]
        try:
            self.train(tiny_config(self.folder, "2-nan", TWO | LAYERS))
        finally:
            ModelChunk.loss = loss  # type: ignore[method-assign]

    def refusals(self) -> None:
        self.expect_error("stages", tiny_config(self.folder, "stages", {"pipeline.stages": 3}))
        uneven = {"pipeline.stages": 2, "pipeline.micro_batches": 3}
        self.expect_error("uneven", tiny_config(self.folder, "uneven", uneven))
        self.expect_error("layers", tiny_config(self.folder, "layers", INTERLEAVED))
        rate = {"optimizer.learning_rate": 1e-3 * (1 + self.world.rank)}
        self.expect_error("settings", tiny_config(self.folder, "settings", rate))


def more(world: World, folder: Path) -> None:
    """What takes long besides."""
    scenarios = Pipelined(folder, world)
    scenarios.smooth_runs(SLOW_SMOOTH_RUNS)
    scenarios.interrupted_runs(SLOW_BROKEN_RUNS)


def everything(world: World, folder: Path) -> None:
    """All other scenarios of one of the processes."""
    scenarios = Pipelined(folder, world)
    scenarios.smooth_runs(SMOOTH_RUNS)
    scenarios.interrupted_runs(BROKEN_RUNS)
    scenarios.changed_layouts()
    scenarios.not_finite()
    scenarios.refusals()
