"""FSDP2 with updates in backward: two processes have the bits of updates after it, and leave steps out together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.errors import ConfigError
from laconic.train.distributed.parallel_state import check_division
from laconic.train.distributed.world import World
from laconic.train.report.metrics import read_metrics
from tests.distributed.pair import DROPOUT, FSDP, Pair
from tests.distributed.processes import run_joined
from tests.train.runs import exact_metrics, resumed, spoilt, tiny_config, train_alone
from tests.train.test_updates_in_backward import AFTER, DURING

pytestmark = pytest.mark.ci  # a dozen trainings of two processes

RUNS: dict[str, dict[str, Any]] = {
    "fp32": FSDP | DROPOUT,
    "bf16": FSDP | {"precision": "bf16", "model.tie_word_embeddings": False, "optimizer.kind": "adamw4bit"},
    "q8": FSDP | {"gradients.reduce": "q8", "zip": "on"},
}


def everything(world: World, folder: Path) -> None:
    pair = Pair(folder, world)
    for name, changes in RUNS.items():
        assert pair.train(tiny_config(folder, f"{name}-after", AFTER | changes)) == 0
        assert pair.train(tiny_config(folder, name, DURING | changes)) == 0
    pair.interrupted_runs({"again": DURING | RUNS["fp32"]})
    with spoilt({1, 3}, world.rank == 1):
        assert pair.train(tiny_config(folder, "nan-after", AFTER | FSDP)) == 0
        assert pair.train(tiny_config(folder, "nan", DURING | FSDP)) == 0
    pair.train(tiny_config(folder, "more", DURING | FSDP | {"checkpoint.every": 3}), stop_after=3)
    pair.expect_error("ddp", tiny_config(folder, "ddp", DURING))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in_backward")
    tiny_config(folder, "corpus")
    run_joined(everything, (folder,), 2)
    return folder


@pytest.mark.parametrize("name", [*RUNS, "nan"])
def test_runs_have_the_bits_of_updates_after_backward(folder: Path, name: str) -> None:
    assert exact_metrics(folder / name) == exact_metrics(folder / f"{name}-after")


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(folder: Path) -> None:
    assert exact_metrics(folder / "again-broken") == exact_metrics(folder / "again") == exact_metrics(folder / "fp32")


def test_a_step_that_is_not_finite_on_one_process_is_left_out_on_both(folder: Path) -> None:
    rows = [row["skipped_steps"] for row in read_metrics(folder / "nan") if "loss" in row]
    assert rows == [0, 1, 1, 2, 2, 2]


def test_one_process_goes_on_where_two_stopped(folder: Path) -> None:
    assert train_alone(resumed(tiny_config(folder, "more", DURING | FSDP))) == 0
    assert [row["step"] for row in read_metrics(folder / "more") if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_ddp_over_several_processes_is_refused(folder: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        text = (folder / f"ddp.{rank}.txt").read_text()
        assert text.startswith("ConfigError: optimizer.update_in_backward is True, but it must be false with"), text
    assert train_alone(tiny_config(tmp_path, "alone", DURING | {"parallel": "ddp", "steps": 1})) == 0
    two = tiny_config(tmp_path, "two", DURING)
    with pytest.raises(ConfigError, match="on 2 processes"):  # before any is started
        check_division(two, 2)
