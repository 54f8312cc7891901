"""`wandb = true`: what wandb's files hold offline, of a run, its continuation and its end."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from laconic.errors import ConfigError
from laconic.train.distributed.world import World
from laconic.train.report.metrics import MetricsWriter, read_metrics
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.train.runs import tiny_config, train_alone
from tests.wandb_files import offline_runs, wandb_offline

__all__ = ["wandb_offline"]


@pytest.mark.ci
def test_a_run_and_its_continuation_are_one_run_with_the_numbers_of_metrics_jsonl(
    tmp_path: Path, wandb_offline: Any
) -> None:
    changes = {"wandb": True, "checkpoint.every": 3}
    assert train_alone(tiny_config(tmp_path, "run", changes)) == 0
    train_alone(tiny_config(tmp_path, "run", changes | {"steps": 8, "resume": True}))
    first, second = offline_runs(tmp_path / "run")
    assert first.id == second.id
    assert first.exit_code == second.exit_code == 0
    assert first.column("_step") == [1, 2, 3, 4, 5, 6]
    assert second.column("_step") == [7, 8]
    rows = read_metrics(tmp_path / "run")
    for name in ("loss", "learning_rate", "saved_nbytes", "validation_loss"):
        expected = [row[name] for row in rows if name in row]
        # A continuation evaluates at its own end; wandb keeps one row for each step.
        assert first.column(name) + second.column(name) == expected
        assert len(expected) > 2
    assert first.config["steps"] == "6"
    assert second.config["steps"] == "8"
    assert first.config["model.hidden_size"] == "32"


@pytest.mark.ci
def test_a_run_that_fails_is_a_failed_run(tmp_path: Path, wandb_offline: Any) -> None:
    with contextlib.suppress(KeyError), MetricsWriter(tmp_path, wandb={"a": 1}) as writer:
        writer.write(1, loss=1.0, note="text", flag=True, table=[[1]])
        raise KeyError
    [found] = offline_runs(tmp_path)
    assert found.exit_code == 1
    assert {name for name in found.rows[0] if name[0] != "_"} == {"loss"}


@pytest.mark.ci
def test_starts_within_one_second_do_not_write_over_each_other(tmp_path: Path, wandb_offline: Any) -> None:
    for step in (1, 2, 3):
        with MetricsWriter(tmp_path, wandb={}) as writer:
            writer.write(step, loss=float(step))
    found = offline_runs(tmp_path)
    assert [each.column("loss") for each in found] == [[1], [2], [3]]
    assert len({each.id for each in found}) == 1


@pytest.mark.ci
def test_the_environment_names_project_and_run(
    tmp_path: Path, wandb_offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    with MetricsWriter(tmp_path, wandb={}):
        assert wandb_offline.run.project == "laconic"
        assert wandb_offline.run.name == tmp_path.name
    wandb_offline.teardown()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "this one")
    with MetricsWriter(tmp_path / "other", wandb={}):
        assert (wandb_offline.run.project, wandb_offline.run.name) == ("mine", "this one")
    assert [each.id for each in offline_runs(tmp_path) + offline_runs(tmp_path / "other")] == ["chosen", "chosen"]


@pytest.mark.ci
def test_training_goes_on_where_wandbs_process_dies(
    tmp_path: Path, wandb_offline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    with MetricsWriter(tmp_path, wandb={}) as writer:
        writer.write(1, loss=1.0)
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in started:
            child.kill()
        psutil.wait_procs(started)
        for step in range(2, 50):
            writer.write(step, loss=float(step))
    assert len(started) >= 1
    assert capsys.readouterr().err.count("wandb has failed") == 1
    assert len(read_metrics(tmp_path)) == 49


def test_what_wandb_lacks_is_refused_before_anything_is_written(
    tmp_path: Path, wandb_offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb_offline.teardown()  # it reads the environment once
    with pytest.raises(ConfigError, match=r"no account to log to .*WANDB_MODE=offline"):
        train_alone(tiny_config(tmp_path, "run", {"wandb": True}))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(ConfigError, match=r"pip install 'laconic\[wandb\]'"):
        train_alone(tiny_config(tmp_path, "run", {"wandb": True}))
    assert not (tmp_path / "run").exists()


def test_only_the_first_process_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    other = World(rank=1, size=1, local_rank=0, device=torch.device("cpu"))
    assert run(tiny_config(tmp_path, "run", {"wandb": True, "resume": False}), other, StopRequest()) == 0
