"""`laconic train --local-steps`: processes that train apart stop, go on, save and fail together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from laconic.errors import ConfigError
from laconic.gradients import LocalSteps
from laconic.train.checkpoint.export import export
from laconic.train.distributed.world import World
from laconic.train.report.metrics import read_metrics
from tests.distributed.pair import Pair
from tests.distributed.processes import run_joined
from tests.train.runs import AGOQ, exact_metrics, losses, resumed, spoilt, tiny_config, train_alone

LOCAL: dict[str, Any] = {"local_steps": 3, "steps": 11, "eval_every": 4, "batch_size": 6, "verify.every": 1}
STREAMED: dict[str, Any] = LOCAL | {"local_steps": 4, "outer.fragments": 2, "outer.delay": 1}
RUNS: dict[str, dict[str, Any]] = {
    "awaited": LOCAL | {"model.extra": {"attention_dropout": 0.3}, "audit": True},
    "streamed": STREAMED | {"checkpoint.zip": True},
    "compressed": AGOQ | LOCAL | {"accumulation": 3, "gradients.reduce": "native"},
}


def everything(world: World, folder: Path) -> None:
    pair = Pair(folder, world)
    for name, changes in RUNS.items():
        assert pair.train(tiny_config(folder, name, changes)) == 0
        # Process 1 alone is asked to stop in step 4; both do when they meet, after step 6.
        broken = tiny_config(folder, f"{name}-broken", changes)
        assert pair.train(broken, stop_after=4, on_rank=1) == 130
        torch.manual_seed(world.rank + 77)
        assert pair.train(resumed(broken)) == 0
    # From a checkpoint between two synchronizations, with one under way.
    between = tiny_config(folder, "between", STREAMED | {"checkpoint.every": 5, "checkpoint.keep": 9})
    assert pair.train(between) == 0
    pair.copy("between", "between-broken")
    again = replace(between, run_dir=str(folder / "between-broken"), resume=True)
    assert pair.train(replace(again, checkpoint=replace(again.checkpoint, load=5))) == 0
    pair.copy("between", "of three")
    pair.train(tiny_config(folder, "ddp", {name: LOCAL[name] for name in ("steps", "batch_size")}))
    pair.train(tiny_config(folder, "fixed", LOCAL | {"eval_every": 1, "steps": 3}))
    pair.train(tiny_config(folder, "exact", LOCAL | {"outer.bits": 32}))
    with spoilt({1, 3}, world.rank == 1):
        pair.train(tiny_config(folder, "nan", LOCAL))
    with spoilt(set(range(2, 11)), world.rank == 1):
        pair.expect_error("nan-all", tiny_config(folder, "nan-all", LOCAL))
    pair.expect_error("without", resumed(tiny_config(folder, "awaited", {**RUNS["awaited"], "local_steps": 0})))
    pair.expect_error("fragments", resumed(tiny_config(folder, "streamed", {**STREAMED, "outer.fragments": 1})))
    pair.expect_error("corrupt", tiny_config(folder, "corrupt", LOCAL)) if world.rank == 0 else _corrupt(pair)
    pair.expect_error("mixture", tiny_config(folder, "mixture", LOCAL | MIXTURE))


MIXTURE: dict[str, Any] = {
    "model.family": "qwen2_moe",
    "model.extra": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.01},
    },
}


def _corrupt(pair: Pair) -> None:
    """A bit of the common point flips on rank 1."""
    step = LocalSteps.step

    def flipping(self: LocalSteps) -> None:
        step(self)
        if self.steps == 5:
            next(iter(self.common().values())).view(-1)[3] += 1e-3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSteps, "step", flipping)
        pair.expect_error("corrupt", tiny_config(pair.folder, "corrupt", LOCAL))


def three(world: World, folder: Path) -> None:
    """Go on in three processes from what two have saved between two synchronizations."""
    config = tiny_config(folder, "of three", STREAMED | {"checkpoint.every": 5, "checkpoint.keep": 9})
    config = replace(config, resume=True, checkpoint=replace(config.checkpoint, load=5))
    assert Pair(folder, world).train(config) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of two processes, and one that three go on with."""
    folder = tmp_path_factory.mktemp("local")
    tiny_config(folder, "corpus")
    run_joined(everything, (folder,), 2)
    run_joined(three, (folder,), 3)
    return folder


def weights(folder: Path, name: str, target: Path) -> dict[str, torch.Tensor]:
    return load_file(export(folder / name, target / name) / "model.safetensors")


def summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return found


@pytest.mark.ci
@pytest.mark.parametrize("name", [*RUNS, "between"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(folder: Path, name: str, tmp_path: Path) -> None:
    assert exact_metrics(folder / f"{name}-broken") == exact_metrics(folder / name)
    whole, broken = weights(folder, name, tmp_path), weights(folder, f"{name}-broken", tmp_path)
    assert whole.keys() == broken.keys()
    for key, value in whole.items():
        assert torch.equal(value, broken[key]), key


@pytest.mark.ci
def test_a_request_to_stop_waits_until_processes_meet(folder: Path) -> None:
    for name, step in (("awaited", 6), ("streamed", 4)):  # of two fragments one is due in every other step
        saved = sorted((folder / f"{name}-broken" / "checkpoints").glob("step-*"))
        assert saved[0].name == f"step-{step:08d}"


@pytest.mark.ci
def test_three_processes_go_on_where_two_stopped(folder: Path) -> None:
    two, three = losses(folder / "between"), losses(folder / "of three")
    assert list(three) == list(two)
    assert [three[step] for step in range(1, 6)] == [two[step] for step in range(1, 6)]
    assert three[11] == pytest.approx(two[11], abs=0.15)
    assert three[11] < two[5]


@pytest.mark.ci
def test_local_steps_learn_and_send_little(folder: Path) -> None:
    found = {name: summary(folder, name) for name in ("ddp", "exact", "awaited")}
    for name in ("exact", "awaited"):
        assert found[name]["validation_loss"] < found["ddp"]["validation_loss"] + 0.1
        assert found[name]["validation_loss"] < losses(folder / name)[1] - 0.2
    sent = {name: one["wire_nbytes_per_step"] for name, one in found.items()}
    # Four synchronizations in 11 steps; what small messages add is in the second number.
    assert sent["exact"] == pytest.approx(sent["ddp"] * 4 / 11, rel=0.1)
    assert sent["awaited"] == pytest.approx(sent["exact"] * 4.25 / 32, rel=0.1)
    rows = [row["wire_nbytes"] for row in read_metrics(folder / "awaited") if "loss" in row]
    assert [bool(row) for row in rows] == [step in (3, 6, 9, 11) for step in range(1, 12)]


@pytest.mark.ci
def test_validation_and_checkpoint_are_of_the_common_point(folder: Path) -> None:
    """At steps between two synchronizations, too; all votes, of the common point, found the same bits."""
    steps = [row["step"] for row in read_metrics(folder / "between") if "validation_loss" in row]
    assert steps == [4, 8, 11]
    assert summary(folder, "between")["verify"]["votes"] == 11
    losses_of = {
        row["step"]: row["validation_loss"] for row in read_metrics(folder / "fixed") if "validation_loss" in row
    }
    assert losses_of[2] == losses_of[1] != losses_of[3]


@pytest.mark.ci
def test_a_process_leaves_out_its_own_bad_steps(folder: Path) -> None:
    assert summary(folder, "nan")["skipped_steps"] == 0  # rank 0 counts, and skipped none
    assert all(loss == loss for step, loss in losses(folder / "nan").items())
    for rank in (0, 1):
        text = (folder / f"nan-all.{rank}.txt").read_text()
        assert text.startswith("TrainingError: loss or gradient was not finite in 7 steps in a row, 3 to 9"), text


@pytest.mark.ci
def test_refusals_come_on_both(folder: Path) -> None:
    beginnings = {
        "without": "ConfigError: local_steps is 0, but the run that wrote",
        "fragments": "ConfigError: outer.fragments is 1, but the run that wrote",
        "corrupt": "CorruptionError: after step 5, replicas differ: ranks 0 and 1 have different bits",
        "mixture": "ConfigError: local_steps is 3, but routers of a mixture-of-experts model",
    }
    for name, beginning in beginnings.items():
        for rank in (0, 1):
            text = (folder / f"{name}.{rank}.txt").read_text()
            assert text.startswith(beginning), text


def test_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local_steps is 3, but there is 1 process"):
        train_alone(tiny_config(tmp_path, "alone", LOCAL))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "fsdp"}, "parallel is 'fsdp', but it must be ddp with local_steps = 3"),
        ({"pipeline.stages": 2}, "pipeline.stages is 2, but it must be 1 with local_steps = 3"),
        ({"moe.expert_parallel": 1}, "moe.expert_parallel is 1, but it must be left out with local_steps = 3"),
        (
            {"zip": "on"},
            "zip is 'on', but it must be auto or off with local_steps = 3: differences travel as",
        ),
        (
            {"gradients.reduce": "q8"},
            "gradients.reduce is 'q8', but it must be native or left out with local_steps = 3",
        ),
        ({"plan": "plan.json"}, "plan is 'plan.json', but it must be left out with local_steps = 3"),
        ({"outer.fragments": 4}, "outer.fragments is 4, but it must be at most local_steps"),
        ({"outer.delay": 3}, "outer.delay is 3, but it must be below local_steps"),
        ({"outer.bits": 12}, "outer.bits is 12, but it must be 4, 8 or 32"),
        ({"local_steps": 0, "outer.bits": 8}, "outer.bits is 8, but it must be left out without local_steps"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(tmp_path, "refused", LOCAL | changes)
    assert str(raised.value).startswith(message), raised.value
