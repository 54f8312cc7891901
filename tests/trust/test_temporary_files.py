"""Something removes the launcher's temporary files while it runs, as cleaners of /tmp do: a run does without them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from laconic.train.config.toml import save_config
from laconic.train.report.run_dir import latest_name
from tests.distributed.processes import environment, finish, num_steps, start, wait_until, workers_of
from tests.train.runs import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 400


@pytest.mark.parametrize(
    ("number", "restarts", "code", "says"),
    [
        (signal.SIGKILL, 1, 0, "restart 1 of 1 goes on after step-"),
        (signal.SIGKILL, 0, 1, " train --resume --run-dir"),
        (signal.SIGTERM, 0, 143, "stopping after this step, then saving"),
    ],
)
def test_a_run_bears_the_loss_of_its_temporary_files(
    number: signal.Signals, restarts: int, code: int, says: str, tmp_path: Path
) -> None:
    """A rank is killed, or the launcher is asked to stop, after they have gone."""
    changes = {"steps": STEPS, "nproc": 2, "restarts": restarts, "checkpoint.every": 20, "eval_every": 0}
    save_config(tiny_config(tmp_path, "run", changes), tmp_path / "config.toml")
    temporary, run_dir = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    launcher = start(
        ["-m", "laconic", "train", "--config", str(tmp_path / "config.toml")], environment(TMPDIR=str(temporary))
    )
    wait_until(lambda: num_steps(run_dir) > 25)
    while left := [path for path in temporary.iterdir() if path.name.startswith("laconic-")]:
        for path in left:
            shutil.rmtree(path, ignore_errors=True)  # a rank may just be writing
    if number == signal.SIGKILL:
        workers_of(launcher)[1].send_signal(number)
    else:
        launcher.send_signal(number)
    ending = finish(launcher)
    assert ending.code == code, ending.err
    assert says in ending.err
    assert ("rank 1" in ending.err) == ("was killed by SIGKILL" in ending.err) == (number == signal.SIGKILL)
    if code == 0:
        assert latest_name(run_dir) == f"step-{STEPS:08d}"
    elif code == 143:
        assert latest_name(run_dir) == f"step-{num_steps(run_dir):08d}"
    assert not [path for path in temporary.iterdir() if path.name.startswith("laconic-")]
