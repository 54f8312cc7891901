"""A run that is killed before its first checkpoint: what it says to do next works, and ends with the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from laconic.errors import CheckpointError, ConfigError
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.launch_record import Launch
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.train.runs import ALONE, exact_metrics, resumed, tiny_config, train_alone
from tests.trust.killed import killed_at_write

FIRST_WRITES = 45
"""More than a run makes before its first checkpoint is whole."""


def config_of(folder: Path, name: str) -> TrainConfig:
    return tiny_config(folder, name, {"steps": 4, "checkpoint.every": 2, "eval_every": 0, "eval_sequences": 0})


def train(config: TrainConfig) -> None:
    with mock.patch("os.getppid", os.getpid):  # a launcher that goes with it: ours is pytest, which stays
        assert run(config, ALONE, StopRequest(), Launch("killed")) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("early")
    assert train_alone(config_of(made, "undisturbed")) == 0
    return made


def go_on(config: TrainConfig) -> None:
    """Do what a user does: resume, and where that is refused, what the refusal says."""
    try:
        code = train_alone(resumed(config))
    except ConfigError as refused:
        if "a run that was stopped before it wrote one is started again without --resume" not in str(refused):
            raise
        code = train_alone(config)
    assert code == 0


def assert_killed_anywhere_is_mended(folder: Path, numbers: Iterable[int]) -> None:
    checked = 0
    for number in numbers:
        config = config_of(folder, f"killed-{number}")
        if not killed_at_write(Path(str(config.run_dir)), number, train, config):
            break
        go_on(config)
        assert exact_metrics(config.run_dir) == exact_metrics(folder / "undisturbed"), number
        left = [path.name for path in Path(str(config.run_dir)).rglob(".*") if path.name != ".metadata"]
        assert not left, (number, left)
        assert not (Path(str(config.run_dir)) / "lock.json").exists()
        checked += 1
    assert checked


@pytest.mark.ci
def test_a_run_killed_at_a_write_before_its_first_checkpoint_is_gone_on_with(folder: Path) -> None:
    assert_killed_anywhere_is_mended(folder, range(0, FIRST_WRITES, 15))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_any_write_before_its_first_checkpoint_is_gone_on_with(folder: Path) -> None:
    numbers = [number for number in range(FIRST_WRITES) if number % 15]
    assert_killed_anywhere_is_mended(folder, numbers)  # up to the last write that there is


def test_a_run_that_has_lost_its_checkpoints_is_not_begun_anew(folder: Path, tmp_path: Path) -> None:
    """Its metrics are all that is left of it."""
    config = config_of(tmp_path, "lost")
    assert train_alone(config, stop_after=3) == 130
    (tmp_path / "lost" / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "lost" / "summary.json").unlink()
    before = exact_metrics(config.run_dir)
    with pytest.raises(CheckpointError, match="bring its checkpoints back, or start a new run, without --resume"):
        train_alone(resumed(config))
    assert exact_metrics(config.run_dir) == before


def test_a_checkpoint_that_is_asked_for_by_name_has_to_be_there(tmp_path: Path) -> None:
    config = config_of(tmp_path, "named")
    assert killed_at_write(tmp_path / "named", 12, train, config)
    asked = load_config(None, {})
    chosen = replace(resumed(config), checkpoint=replace(config.checkpoint, load=2))
    assert asked.checkpoint.load is None
    with pytest.raises(CheckpointError, match="step-00000002"):
        train_alone(chosen)


def test_what_a_run_that_had_not_begun_left_is_no_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "begun")
    Launch("killed").save(tmp_path)
    (tmp_path / "begun").mkdir()
    for name in (".launch.json.123.tmp", ".config.toml.123.tmp", "launch.json"):
        (tmp_path / "begun" / name).write_text("torn")
    with pytest.raises(ConfigError, match="is started again without --resume"):
        train_alone(resumed(config))
    assert train_alone(config) == 0
    assert not list((tmp_path / "begun").glob(".config.toml.*"))
