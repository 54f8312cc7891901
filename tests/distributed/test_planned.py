"""`laconic plan`, then `laconic train --plan` on as many processes as the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.cli.main import main
from laconic.cost import load_plan
from tests.distributed.processes import environment, finish, start
from tests.train.runs import losses, write_corpus

SIZES = {
    "hidden-size": 64,
    "intermediate-size": 128,
    "num-layers": 4,
    "num-heads": 4,
    "num-kv-heads": 4,
    "vocab-size": 257,
    "sequence-length": 64,
    "batch": 2,
    "micro-batches": 2,
    "precision": "fp32",
}


def planned(folder: Path, *flags: str) -> Path:
    """A plan file that `laconic plan` has written."""
    path = folder / "plan.json"
    sizes = [part for name, size in SIZES.items() for part in (f"--{name}", str(size))]
    assert main(["plan", *sizes, *flags, "--out", str(path)]) == 0
    return path


def train(folder: Path, plan: Path, *flags: str) -> tuple[int, str]:
    corpus = folder / "corpus"
    if not corpus.is_dir():
        write_corpus(corpus)
    fixed = {"data.paths": corpus, "data.cache-dir": folder / "cache", "run-dir": folder / "run", "steps": 4}
    arguments = [part for name, value in fixed.items() for part in (f"--{name}", str(value))]
    ended = finish(start(["-m", "laconic", "train", "--plan", str(plan), *arguments, *flags], environment()))
    return ended.code, ended.out + ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["--stages", "2", "--policy", "agoq"],
        pytest.param(["--stages", "2", "--dp", "2", "--fsdp", "--policy", "uniform8"], marks=pytest.mark.slow),
    ],
    ids=["2 stages", "2 stages of 2"],
)
def test_a_plan_for_several_processes_is_carried_out(layout: list[str], tmp_path: Path) -> None:
    path = planned(tmp_path, *layout)
    plan = load_plan(path)
    code, output = train(tmp_path, path)
    assert code == 0, output
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == plan.job.layout.world_size
    assert len(losses(tmp_path / "run")) == 4
    memory = summary["memory"]
    for kind, nbytes in memory["measured"].items():
        assert memory["predicted"][kind] == pytest.approx(nbytes, rel=0.05), kind


@pytest.mark.slow
def test_every_process_refuses_a_plan_for_another_run(tmp_path: Path) -> None:
    path = planned(tmp_path, "--stages", "2", "--policy", "uniform4")
    code, output = train(tmp_path, path, "--sequence-length", "32")
    assert code == 2, output
    assert "sequence_length" in output
    assert not (tmp_path / "run" / "summary.json").exists()
