"""Runs of two processes whose replicas differ after their first step, or whose experts are averaged wrongly, stop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from laconic.formats.shards import local_part
from laconic.gradients import reduction
from laconic.train.distributed.world import World
from laconic.train.gradients import ExpertParallelGradients, Gradients
from laconic.train.report.run_dir import checkpoint_names
from laconic.train.report.run_logger import RunLogger
from laconic.train.trainer import Trainer
from tests.distributed.pair import Pair
from tests.distributed.processes import run_joined
from tests.distributed.spread import EP, QWEN
from tests.train.runs import AGOQ, tiny_config

Patch = pytest.MonkeyPatch


def in_training(patch: Patch, plant: Callable[[Patch], None]) -> None:
    """Plant a fault after the audit of the first batch, which would find it."""
    before = Trainer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Patch.context() as inner:
            plant(inner)
            return before(self, *args, **kwargs)

    patch.setattr(Trainer, "step", step)


def a_weight_differs(patch: Patch, world: World) -> None:
    before = Trainer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(self, *args, **kwargs)
        if world.rank == 1:
            with torch.no_grad():
                parameter = next(self.model.parameters())
                local_part(parameter).view(-1).view(torch.uint8)[0] ^= 1
        return result

    patch.setattr(Trainer, "step", step)


def a_bucket_is_not_reduced(patch: Patch, world: World) -> None:
    before = DistributedDataParallel.__init__

    @functools.wraps(before)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs | {"bucket_cap_mb": 0.01})

        def hook(state: None, bucket: Any) -> Any:
            found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            found.set_result(bucket.buffer())
            if bucket.index() == 0:
                return found
            summed = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
            return summed.then(lambda done: done.value()[0] / world.size)

        hook.__annotations__.clear()  # DDP wants classes, and here they are strings
        self.register_comm_hook(None, hook)

    patch.setattr(DistributedDataParallel, "__init__", made)


def codes_of_a_bucket_are_not_reduced(patch: Patch, world: World) -> None:
    before = reduction.all_reduce_quantized

    def forgetting(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        return before(copy.deepcopy(gradients), *args, **kwargs)

    in_training(patch, lambda inner: inner.setattr(reduction, "all_reduce_quantized", forgetting))


def one_process_clips_alone(patch: Patch, world: World) -> None:
    before = Gradients.clip

    def clip(self: Any, norm: torch.Tensor, max_norm: float) -> None:
        before(self, norm * 100 if world.rank == 1 else norm, max_norm)

    patch.setattr(Gradients, "clip", clip)


def averaged(patch: Patch, factor: float) -> None:
    before = ExpertParallelGradients.reduce

    def reduce(self: Any) -> None:
        before(self)
        for parameter in self._experts:
            parameter.grad.mul_(factor)

    patch.setattr(ExpertParallelGradients, "reduce", reduce)


def experts_are_summed(patch: Patch, world: World) -> None:
    averaged(patch, world.size)


def experts_are_averaged_twice(patch: Patch, world: World) -> None:
    averaged(patch, 1 / world.size)


AFTER = "AuditError: after step 1, the first of this run, replicas differ: ranks 0 and 1 have different bits"
MEAN = "AuditError: in the first step the gradient of model.layers.0.mlp.experts"
# Settings, the fault, what is said on both.
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Patch, World], None], str]] = {
    "weight": ({}, a_weight_differs, AFTER),
    "bucket": ({}, a_bucket_is_not_reduced, AFTER),
    "codes": (AGOQ, codes_of_a_bucket_are_not_reduced, AFTER),
    "clip": ({"optimizer.clip_norm": 0.1}, one_process_clips_alone, AFTER),
    "sum": (EP | QWEN, experts_are_summed, MEAN),
    "twice": (EP | QWEN, experts_are_averaged_twice, MEAN),
}


def run_each(world: World, folder: Path, names: list[str], audit: bool) -> None:
    pair = Pair(folder, world)
    for name in names:
        changes, fault, _ = FAULTS[name]
        changes = {"verify.every": 0, "eval_every": 0, "steps": 2, "checkpoint.every": 0, "audit": audit} | changes
        with Patch.context() as patch:
            fault(patch, world)
            if audit:
                pair.expect_error(name, tiny_config(folder, name, changes))
            else:
                assert pair.train(tiny_config(folder, name, changes)) == 0


@pytest.mark.parametrize(
    "names", [["weight", "bucket"], pytest.param([*FAULTS][2:], marks=pytest.mark.slow, id="others")]
)
def test_a_fault_of_the_first_step_ends_the_run(names: list[str], tmp_path: Path) -> None:
    run_joined(run_each, (tmp_path, names, True), 2)
    for name in names:
        assert not checkpoint_names(tmp_path / name), name
        for rank in range(2):
            assert (tmp_path / f"{name}.{rank}.txt").read_text().startswith(FAULTS[name][2])


@pytest.mark.slow
def test_without_the_audit_nobody_sees_them(tmp_path: Path) -> None:
    run_joined(run_each, (tmp_path, [*FAULTS], False), 2)


def run_well(world: World, folder: Path) -> None:
    said: list[str] = []
    with Patch.context() as patch:
        patch.setattr(RunLogger, "message", lambda self, text: said.append(text))
        audited = {"audit": True, "verify.every": 0, "eval_every": 0, "steps": 2}
        for name, changes in (("ddp", {}), ("codes", AGOQ), ("ep", EP | QWEN)):
            config = tiny_config(folder, name, audited | changes)
            assert Pair(folder, world).train(config) == 0
    found = [line for line in said if line.startswith("audit: after step 1, ")]
    assert len(found) == 3, said
    assert any("2 layers of experts" in line for line in said), said


@pytest.mark.ci
def test_the_log_says_what_was_compared(tmp_path: Path) -> None:
    run_joined(run_well, (tmp_path,), 2)
