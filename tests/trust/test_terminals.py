"""Terminals that are closed, readers that leave, and streams that were never open: runs end in order, or go on."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laconic.train.checkpoint.save_load import find_checkpoint
from laconic.train.report.run_dir import latest_name
from tests.distributed.processes import environment, num_steps, wait_until
from tests.patience import patient
from tests.train.runs import ALONE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# The suite itself may run under nohup.
_HEEDING = (
    "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "from laconic.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def train(*more: str, program: tuple[str, ...] = ("-m", "laconic")) -> list[str]:
    small = ["--sequence-length", "32", "--eval-sequences", "4", "--model.num-hidden-layers", "1", "--log-every", "2"]
    unsaved = ["--checkpoint.every", "100000"]
    return [sys.executable, *program, "train", "--run-dir", "run", *small, *unsaved, *more]


def first_steps(folder: Path) -> Callable[[], bool]:
    return lambda: num_steps(folder / "run") > 2


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_whose_terminal_is_closed_saves_and_leaves(nproc: int, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *train("--steps", "100000", "--nproc", str(nproc), program=("-c", _HEEDING))],
        cwd=tmp_path, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    try:
        wait_until(first_steps(tmp_path), 120)
    finally:
        os.close(ours)
    assert process.wait(timeout=patient(120)) == 129
    name = latest_name(tmp_path / "run")
    assert name is not None
    saved = json.loads((tmp_path / "run" / "checkpoints" / name / "manifest.json").read_text())["step"]
    assert saved == num_steps(tmp_path / "run")


@pytest.mark.parametrize("nproc", [1, 2])
def test_nohup_keeps_a_run_through_the_end_of_its_terminal(nproc: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", *train("--steps", "200", "--nproc", str(nproc))],
        cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    wait_until(first_steps(tmp_path), 120)
    os.killpg(process.pid, signal.SIGHUP)
    _, error = process.communicate(timeout=patient(120))
    assert process.returncode == 0, error
    assert num_steps(tmp_path / "run") == 200


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_goes_on_when_nobody_reads_its_progress_any_more(nproc: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        train("--steps", "200", "--nproc", str(nproc)),
        cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    wait_until(first_steps(tmp_path), 120)
    process.stderr.close()
    assert process.wait(timeout=patient(120)) == 0
    assert num_steps(tmp_path / "run") == 200


COMMANDS = {
    "train": train("--steps", "3"),
    "train, two processes": train("--steps", "3", "--nproc", "2"),
    "doctor": [sys.executable, "-m", "laconic", "doctor"],
}


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("train", (2,)),
        ("train", (0, 1, 2)),
        ("train, two processes", (1,)),
        ("train, two processes", (0, 1, 2)),
        ("doctor", (0,)),
        ("doctor", (1, 2)),
    ],
)
def test_a_command_bears_streams_that_are_closed(name: str, closed: tuple[int, ...], tmp_path: Path) -> None:
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    command = ["bash", "-c", f'exec "$@" {redirections}', "bash", *COMMANDS[name]]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(200), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if name != "doctor":  # nothing was printed into a file
        assert find_checkpoint(tmp_path / "run", ALONE).step == 3
        assert all(json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
