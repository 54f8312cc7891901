"""A flipped bit or a cut in any file of a checkpoint is refused by name; a run that restarts takes the one before."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import CheckpointError, ConfigError
from laconic.train.checkpoint.save_load import find_checkpoint, newest_good_checkpoint
from laconic.train.launch_record import Launch
from laconic.train.report.run_dir import checkpoint_names, latest_name
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.train.runs import ALONE, exact_metrics, tiny_config

RUNS: dict[str, dict[str, Any]] = {"plain": {}, "zipped": {"checkpoint.zip": True, "optimizer.kind": "adamw8bit"}}
NUM_FLIPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with checkpoints after steps 3 and 6, begun by the launch "one"."""
    made = tmp_path_factory.mktemp("disk")
    for name, changes in RUNS.items():
        assert run(tiny_config(made, name, {"checkpoint.every": 3} | changes), ALONE, StopRequest(), Launch("one")) == 0
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_flipped_bit_or_a_cut_anywhere_is_refused(name: str, folder: Path) -> None:
    newest = folder / name / "checkpoints" / "step-00000006"
    files = sorted(newest.iterdir())
    assert {".metadata", "manifest.json", "config.json"} < {file.name for file in files}
    rng = random.Random(0)
    for number in range(NUM_FLIPS):
        file = files[number % len(files)]
        whole = file.read_bytes()
        place = rng.randrange(8 * len(whole))
        damaged = bytearray(whole)
        if number % 4 == 3:
            del damaged[place // 8 :]
        else:
            damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"newest good checkpoint is step-00000003") as refused:
            find_checkpoint(folder / name, ALONE)
        assert file.name in str(refused.value), (place, str(refused.value))
        found = newest_good_checkpoint(folder / name, ALONE)
        assert found is not None
        assert found.step == 3
        file.write_bytes(whole)
        (folder / name / "checkpoints" / "latest").write_text("step-00000006\n")
    assert find_checkpoint(folder / name, ALONE).step == 6


def test_a_restart_passes_over_damage_and_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, "run", {"checkpoint.every": 2})
    assert run(config, ALONE, StopRequest(), Launch("one")) == 0
    expected = exact_metrics(config.run_dir)
    root = tmp_path / "run" / "checkpoints"
    shard = next((root / "step-00000006").glob("__0_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (root / ".tmp-step-00000008").mkdir()
    with caplog.at_level(logging.WARNING):
        assert run(config, ALONE, StopRequest(), Launch("one")) == 0
    assert "step-00000006" in caplog.text
    assert "trying the one before" in caplog.text
    assert exact_metrics(config.run_dir) == expected
    assert latest_name(tmp_path / "run") == "step-00000006-2"
    assert not list(root.glob(".*"))


def test_a_restart_after_loading_an_older_checkpoint_does_not_take_what_was_given_up(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"checkpoint.every": 2, "checkpoint.keep": 9})
    assert run(config, ALONE, StopRequest(), Launch("one")) == 0
    again = tiny_config(
        tmp_path, "run", {"checkpoint.every": 0, "checkpoint.keep": 9, "resume": True, "checkpoint.load": 2}
    )

    class Killed(Exception):
        pass

    def die(step: int) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        run(again, ALONE, StopRequest(), Launch("two"), die)
    assert Launch("two").in_directory(tmp_path / "run").abandoned == ("step-00000006", "step-00000004")
    begun: list[int] = []
    assert run(again, ALONE, StopRequest(), Launch("two"), begun.append) == 0
    assert begun == [3, 4, 5, 6]
    assert checkpoint_names(tmp_path / "run")[0] == "step-00000006-2"


def test_a_run_that_was_killed_before_its_summary_gets_one(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run")
    assert run(config, ALONE, StopRequest(), Launch("one")) == 0
    summary = tmp_path / "run" / "summary.json"
    summary.unlink()
    assert run(config, ALONE, StopRequest(), Launch("one")) == 0
    assert summary.is_file()


def test_a_run_of_another_launch_is_not_touched(folder: Path) -> None:
    with pytest.raises(ConfigError, match="which is not empty; continue that run with --resume"):
        run(tiny_config(folder, "plain"), ALONE, StopRequest(), Launch("another"))
