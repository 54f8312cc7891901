"""Runs whose optimizer updates in backward: the bits of other runs, less memory, and no step of half of the updates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.cli.flags import parse_flags
from laconic.errors import ConfigError, TrainingError
from laconic.optim import AdamW8bit
from laconic.optim.in_backward import UsedGradient
from laconic.train import trainer
from laconic.train.config.schema import TrainConfig
from laconic.train.moe.router_balance import Routers
from laconic.train.report.metrics import read_metrics
from laconic.train.report.run_dir import latest_name
from tests.activations.models import alive_gradients
from tests.train.runs import exact_metrics, losses, resumed, spoilt, tiny_config, train_alone

AFTER: dict[str, Any] = {"optimizer.kind": "adamw8bit", "optimizer.clip_norm": 0.0}
DURING = AFTER | {"optimizer.update_in_backward": True}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"audit": True, "model.extra": {"attention_dropout": 0.3}},
    "bf16": {"precision": "bf16", "optimizer.kind": "adamw4bit", "activations.loss": "chunked"},
    "exact": {"activations.bits": 16, "model.tie_word_embeddings": False},
    "mixture": {
        **{"model.family": "mixtral", "activations.attention": "recompute"},
        "model.extra": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    },
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_the_bits_of_updates_after_backward_and_so_has_one_that_is_resumed(kind: str, tmp_path: Path) -> None:
    after = tiny_config(tmp_path, "after", AFTER | KINDS[kind])
    during = tiny_config(tmp_path, "during", DURING | KINDS[kind])
    assert train_alone(after) == train_alone(during) == 0
    assert exact_metrics(during.run_dir) == exact_metrics(after.run_dir)  # the last validation is after the last step
    parts = tiny_config(tmp_path, "parts", DURING | KINDS[kind] | {"checkpoint.every": 2})
    train_alone(parts, stop_after=3)
    torch.manual_seed(77)
    assert train_alone(resumed(parts)) == 0
    assert exact_metrics(parts.run_dir) == exact_metrics(after.run_dir)


def test_one_gradient_is_there_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: list[int] = []
    make = trainer.make_optimizer

    def watched(model: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
        nonlocal counts
        counts = alive_gradients(model)
        return make(model, config)

    monkeypatch.setattr("laconic.train.steps.make_optimizer", watched)
    assert train_alone(tiny_config(tmp_path, "during", DURING)) == 0
    assert len(counts) == 6 * 20
    assert max(counts) == 1
    assert ", optimizer" in (line := memory_line(capsys.readouterr().err))
    assert "gradients" not in line


def memory_line(words: str) -> str:
    return next(line for line in words.splitlines() if line.startswith("memory: saved per micro-batch"))


def test_a_step_whose_loss_is_not_finite_is_left_out(tmp_path: Path) -> None:
    with spoilt({2, 4}):
        for name, changes in (("after", AFTER), ("during", DURING)):
            assert train_alone(tiny_config(tmp_path, name, changes)) == 0
    rows = [row for row in read_metrics(tmp_path / "during") if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [math.isnan(row["grad_norm"]) for row in rows] == [False, False, True, False, True, False]
    assert exact_metrics(tmp_path / "during") == exact_metrics(tmp_path / "after")


def test_a_step_is_left_out_if_only_a_loss_of_routers_overflows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, loss_of = [0], Routers.loss

    def loss(self: Routers) -> torch.Tensor | None:
        calls[0] += 1
        value = loss_of(self)
        assert value is not None
        return value + float("inf") if calls[0] == 3 else value  # whose gradient is finite

    monkeypatch.setattr(Routers, "loss", loss)
    assert train_alone(tiny_config(tmp_path, "run", DURING | KINDS["mixture"])) == 0
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1]


@pytest.mark.ci
def test_gradients_that_are_not_finite_end_the_run_before_anything_is_saved(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", DURING | {"checkpoint.every": 1})
    with spoilt({3}, gradients=True):
        with pytest.raises(TrainingError, match=r"a gradient of step 4 is not finite, .*--resume and --no-optimizer"):
            train_alone(config)
        assert latest_name(tmp_path / "run") == "step-00000003"
        after = replace(resumed(config), optimizer=replace(config.optimizer, update_in_backward=False))
        assert train_alone(after) == 0
    assert [row["skipped_steps"] for row in read_metrics(tmp_path / "run") if "loss" in row] == [0, 0, 0, 1, 1, 1]
    flag = parse_flags(TrainConfig, ["--no-optimizer.update-in-backward"], (), prog="laconic train")
    assert flag == {"optimizer.update_in_backward": False}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo
@pytest.mark.ci
def test_compiled_layers_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: original(self, backend="aot_eager"))
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    torch._dynamo.reset()
    short = DURING | {"model.num_hidden_layers": 1, "steps": 4, "eval_every": 0, "eval_sequences": 0}
    config = tiny_config(tmp_path, "eager", short)
    assert train_alone(config) == 0
    assert train_alone(replace(config, compile=True, run_dir=str(tmp_path / "compiled"))) == 0
    torch._dynamo.reset()
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.kind": "adamw"}, "optimizer.kind is 'adamw', but it must be adamw8bit or adamw4bit with"),
        ({"optimizer.clip_norm": 1.0}, "optimizer.clip_norm is 1.0, but it must be 0 with"),
        ({"accumulation": 2}, "accumulation is 2, but it must be 1 with"),
        ({"gradients.bits": 8}, "gradients.bits is 8, but it must be 32 with"),
        ({"pipeline.stages": 2}, "pipeline.stages is 2, but it must be 1 with"),
        ({"local_steps": 2}, "local_steps is 2, but it must be 0 with"),
        ({"moe.expert_parallel": 1}, "moe.expert_parallel is 1, but it must be left out with"),
    ],
)
def test_what_needs_all_gradients_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(tmp_path, "refused", DURING | changes)
    assert str(raised.value).startswith(f"{message} optimizer.update_in_backward"), raised.value


def test_the_audit_of_a_hosts_first_step_says_that_the_updates_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    from laconic.auditing.first_call import _first_step_of

    model = torch.nn.Linear(64, 64)
    optimizer = AdamW8bit(model.parameters())
    optimizer.update_in_backward()
    first = _first_step_of(model)
    first.was_called = True
    model(torch.randn(4, 64)).square().mean().backward()
    assert isinstance(model.weight.grad, UsedGradient)
    optimizer.step()
    assert "updates of 2 parameters, as update_in_backward() made them before step()" in capsys.readouterr().err
