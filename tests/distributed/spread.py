"""Runs with experts spread over processes.

As in `tests.distributed.pair`, each scenario is a run in a folder, and the tests read what it left there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.cost.comm.rates import Line, LinkRates
from laconic.cost.moe.rates import MoERates
from laconic.moe.huggingface import GivenRouting
from laconic.moe.placement.balancer import ExpertBalancer
from laconic.train.distributed.world import World
from laconic.train.launch.worker import leave
from laconic.train.trainer import Trainer
from tests.distributed.pair import FSDP, SMOOTH, Pair
from tests.distributed.processes import run_joined
from tests.train.runs import AGOQ, resumed, tiny_config

QWEN = {
    "model.family": "qwen3_moe",
    "model.extra": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "attention_dropout": 0.1,
    },
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
SMOOTH_QWEN = QWEN | SMOOTH | {"model.extra": QWEN["model.extra"] | {"attention_dropout": 0.0}}
EP = {"moe.expert_parallel": 2}
DEEP = {"moe.dispatcher": "hierarchical"}
Q8 = {"gradients.reduce": "q8"}
WINDOWS = EP | DEEP | {"moe.dispatch_codec": "raw", "moe.chunks": (2,), "moe.overlap_grad_reduce": True}

SWAPPED = EP | DEEP | {"moe.swap_every": 1, "moe.swap_pairs": 2}

# Losses differ from those of the plain run by rounding only.
ALIKE: dict[str, dict[str, Any]] = {
    "ep1": {"moe.expert_parallel": 1},
    "ep2": EP,
    "ep2-fsdp": EP | FSDP | {"moe.chunks": (2, 4)},
    "ep2-deep": WINDOWS | {"accumulation": 2},
    "ep2-zip": EP | FSDP | {"zip": "on", "moe.chunks": (2,), "moe.overlap_grad_reduce": True},
    "ep2-auto": EP | {"moe.dispatcher": "auto"},
    "ep2-swapped": SWAPPED | {"moe.swap_policy": "always"},
    "ep2-copies": EP | {"moe.copies": 1, "moe.copy_every": 2, "accumulation": 2},
}
# Each is run in one piece, and with a stop after step 3 as "<name>-broken".
BROKEN: dict[str, dict[str, Any]] = {
    "swapping": SWAPPED | {"moe.dispatch_codec": "int8"},
    "fsdp-bf16": EP | FSDP | DEEP | {"precision": "bf16", "accumulation": 2, "checkpoint.zip": True},
    "agoq": EP | AGOQ | {"moe.chunks": (2,), "moe.dispatch_codec": "lossless"},
    "copying": EP | DEEP | AGOQ | {"moe.copies": 2, "moe.copy_every": 2},
}
# What four processes do: every expert twice.
FOUR: dict[str, dict[str, Any]] = {
    "ddp": EP,
    "fsdp": EP | FSDP,
    "deep": {"moe.expert_parallel": 4, "moe.levels": (2,)}
    | DEEP
    | {"moe.chunks": (2,), "moe.overlap_grad_reduce": True},
    "zip": EP | {"zip": "on"},
    "q8": EP | Q8,
    "copies": EP | {"moe.copies": 1, "moe.copy_every": 1},
    "fsdp-q8": EP | FSDP | Q8,
}


class Spread(Pair):
    """The scenarios, as seen by one of the processes."""

    def interrupted(self, name: str, changes: dict[str, Any]) -> None:
        assert self.train(tiny_config(self.folder, name, changes)) == 0
        broken = tiny_config(self.folder, f"{name}-broken", changes)
        assert self.train(broken, stop_after=3, on_rank=1) == 130
        torch.manual_seed(self.world.rank + 77)
        assert self.train(resumed(broken)) == 0

    def rates(self) -> str:
        """A file with rates of links on which every swap pays, and looking for one costs nothing."""
        rates = self.folder / "rates.json"
        if self.world.is_main:
            link = {"all_to_all": Line(0.0, 1e-6), "send": Line(0.0, 1e-12), "all_gather": Line(0.0, 0.0)}
            groups = {"inter1": LinkRates(2, link, 0.0, 0.0)}
            lines = dict.fromkeys(("all", "node", "across"), link)
            MoERates.of_lines(lines, Line(0.0, 0.0), groups=groups).save(rates)
        self.world.gather(None)
        return str(rates)

    def two(self) -> None:
        rated = {"moe.rates": self.rates()}
        self.train(tiny_config(self.folder, "plain", SMOOTH_QWEN))
        for name, changes in ALIKE.items():
            rates = rated if name in ("ep2-auto", "ep2-swapped") else {}
            self.train(tiny_config(self.folder, name, SMOOTH_QWEN | changes | rates))
        self.train(tiny_config(self.folder, "windows-q8", SMOOTH_QWEN | WINDOWS | Q8))
        for name, changes in BROKEN.items():
            rates = rated if "moe.swap_every" in changes else {}
            self.interrupted(name, QWEN | changes | rates)
        self.train(resumed(tiny_config(self.folder, "resharded", SMOOTH_QWEN | EP | FSDP)), stop_after=2)
        self.train(tiny_config(self.folder, "full", QWEN | EP | {"moe.capacity_factor": 0.5, "steps": 2}))
        self.expect_error("unrated", tiny_config(self.folder, "unrated", QWEN | SWAPPED | {"moe.rates": "none.json"}))
        self.expect_error("odd", tiny_config(self.folder, "odd", QWEN | {"moe.expert_parallel": 3}))
        self.expect_error("dense", tiny_config(self.folder, "dense", EP))
        extra = QWEN["model.extra"] | {"num_experts": 5}
        self.train(tiny_config(self.folder, "five", QWEN | EP | {"model.extra": extra, "steps": 2}))
        self.expect_error("deep", tiny_config(self.folder, "deep", QWEN | EP | DEEP | {"moe.depth": 2}))
        extra = QWEN["model.extra"] | {"num_experts_per_tok": 5}
        self.expect_error("greedy", tiny_config(self.folder, "greedy", QWEN | EP | {"model.extra": extra}))
        extra = SMOOTH_QWEN["model.extra"] | {"num_experts": 8}
        self.expect_error("eight", resumed(tiny_config(self.folder, "ep2", SMOOTH_QWEN | EP | {"model.extra": extra})))
        with spoilt_router(self.world.rank == 1, {1, 3}):
            self.train(tiny_config(self.folder, "nan", QWEN | EP | DEEP | {"moe.chunks": (2,)}))

    def four(self) -> None:
        self.train(tiny_config(self.folder, "plain", SMOOTH_QWEN))
        for name, changes in FOUR.items():
            self.train(tiny_config(self.folder, name, SMOOTH_QWEN | changes))
        self.interrupted("broken-ddp", QWEN | EP)
        self.interrupted("broken-fsdp-bf16", QWEN | EP | FSDP | {"precision": "bf16"})
        self.interrupted("broken-agoq", QWEN | EP | AGOQ)
        self.interrupted("broken-fsdp-agoq", QWEN | EP | FSDP | AGOQ)
        for family, extra in FAMILIES.items():
            options = SMOOTH | {"model.family": family, "model.extra": extra}
            self.train(tiny_config(self.folder, family, options))
            self.train(tiny_config(self.folder, f"{family}-ep", options | {"moe.expert_parallel": 4}))
        # Two machines as it were, and a link between them on which every swap pays.
        four = {"moe.expert_parallel": 4, "moe.levels": (2,)}
        changes = SMOOTH_QWEN | SWAPPED | four | {"moe.rates": self.rates()}
        self.train(tiny_config(self.folder, "swapped", changes | {"checkpoint.every": 2}))
        self.train(tiny_config(self.folder, "continued", changes), stop_after=3, on_rank=1)
        self.train(resumed(tiny_config(self.folder, "continued", changes)))
        for more in (EP | FSDP, {"moe.expert_parallel": 4}):
            self.train(resumed(tiny_config(self.folder, "resharded", SMOOTH_QWEN | more)), stop_after=1)

    def killed(self) -> None:
        """Process 1 vanishes amid a swap, when it has sent what it has to and a checkpoint is there."""
        changes = QWEN | SWAPPED | {"moe.rates": self.rates(), "checkpoint.every": 1, "steps": 8}
        self.train(tiny_config(self.folder, "whole", changes))
        with vanishing(self.world.rank == 1, self.folder / "killed"):
            self.expect_error("killed", tiny_config(self.folder, "killed", changes))
        leave(0)

    def revived(self) -> None:
        """Go on with "killed"."""
        changes = QWEN | SWAPPED | {"moe.rates": self.rates(), "checkpoint.every": 1, "steps": 8}
        assert self.train(resumed(tiny_config(self.folder, "killed", changes))) == 0


@contextmanager
def spoilt_router(here: bool, steps: set[int]) -> Iterator[None]:
    """Make all routing weights NaN in training in these steps (0-based), if `here`."""
    step, routing = Trainer.step, GivenRouting.routing
    current = {"step": 0}

    def counted_step(self: Any, number: int, *args: Any) -> Any:
        current["step"] = number
        return step(self, number, *args)

    def spoilt_routing(self: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> Any:
        spoilt = here and torch.is_grad_enabled() and current["step"] in steps
        return routing(self, x, indices, weights * float("nan") if spoilt else weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", counted_step)
        patch.setattr(GivenRouting, "routing", spoilt_routing)
        yield


@contextmanager
def vanishing(here: bool, run_dir: Path) -> Iterator[None]:
    """End this process, if `here`, in the middle of the first swap after a checkpoint of `run_dir`."""
    step, exchange = ExpertBalancer.step, dist.batch_isend_irecv
    swapping = []

    def noted_step(self: Any, number: int) -> Any:
        swapping.append(number)
        try:
            return step(self, number)
        finally:
            swapping.clear()

    def exchange_or_vanish(operations: list[dist.P2POp]) -> Any:
        if not (here and swapping and (run_dir / "checkpoints" / "latest").exists()):
            return exchange(operations)
        for work in exchange([one for one in operations if one.op is dist.isend]):
            work.wait()
        os._exit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertBalancer, "step", noted_step)
        patch.setattr(dist, "batch_isend_irecv", exchange_or_vanish)
        yield


def run_processes(folder: Path, scenario: str, num_processes: int) -> None:
    """Let as many processes go through `scenario`, a method of Spread; fails if one fails."""
    run_joined(_scenario, (folder, scenario), num_processes)


def _scenario(world: World, folder: Path, name: str) -> None:
    getattr(Spread(folder, world), name)()
