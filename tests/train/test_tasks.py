"""Tasks: what each of them refuses, and that a third one is a file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from laconic.errors import CheckpointError
from laconic.train.checkpoint.export import export
from laconic.train.config.tasks import find_task, task_names
from tests.train.runs import exact_metrics

# What `laconic` runs, for each of several commands, with one more folder of tasks.
_WITH_FOLDER = """
import json, sys
from laconic.train import tasks
tasks.__path__.append(sys.argv[1])
from laconic.cli.main import main
for command in json.loads(sys.argv[2]):
    code = main(command)
    assert code == 0, (command, code)
"""


def laconic(folder: Path, *commands: list[str]) -> str:
    command = [sys.executable, "-c", _WITH_FOLDER, str(folder / "tasks"), json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_tasks_is_one() -> None:
    assert task_names() == ("language-modeling", "image-classification", "instruction-tuning")
    assert {find_task(name).unit for name in task_names()} == {"token", "image"}


@pytest.mark.ci
def test_a_third_task_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    shutil.copyfile(Path(__file__).with_name("vector_regression.py"), tmp_path / "tasks" / "vector_regression.py")
    x = np.random.default_rng(0).normal(size=(160, 8))
    np.savez(tmp_path / "data.npz", x=x, y=x[:, 0] - x[:, 1])
    train = ["train", *("--task", "vector-regression", "--data.paths", "data.npz", "--nproc", "1", "--batch-size", "8")]
    train += ["--model.hidden-size", "64", "--activations.mode", "hooks", "--steps", "40", "--eval-every", "0"]
    train += ["--optimizer.learning-rate", "0.01", "--optimizer.warmup-steps", "2", "--checkpoint.every", "20"]
    out = laconic(
        tmp_path,
        [*train, "--run-dir", "whole"],
        [*train, "--run-dir", "cut"],
        ["train", "--resume", "--run-dir", "cut", "--checkpoint.load", "20"],
        ["compare", "whole", "cut"],
    )
    assert "done: 40 of 40 steps" in out
    assert "vectors/s, median" in out
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["validation_loss"] < 0.1  # of a variance of 2
    assert summary["vectors_per_second"] > 0
    assert "laconic export" not in out  # which knows models of transformers only
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        export(tmp_path / "whole", tmp_path / "out")
    assert exact_metrics(tmp_path / "cut") == exact_metrics(tmp_path / "whole")
