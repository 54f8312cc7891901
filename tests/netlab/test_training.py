"""Training between hosts with shortened collectives: who dies is named by all others."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from laconic.train.config.toml import save_config
from laconic.train.signals import EXIT_PEER_LOST
from netlab import finish
from tests.distributed.processes import ROOT, environment, num_steps, wait_until
from tests.netlab.conftest import MakeLab
from tests.patience import patient
from tests.train.runs import tiny_config


@pytest.mark.slow
def test_a_host_that_dies_in_training_is_named_by_all_others(make_lab: MakeLab, tmp_path: Path) -> None:
    changes = {"parallel": "fsdp", "zip": "on", "steps": 10_000, "batch_size": 6, "eval_every": 0}
    config = tiny_config(tmp_path, "run", changes | {"rank_timeout_seconds": patient(30), "checkpoint.every": 0})
    save_config(config, tmp_path / "config.toml")
    command = [sys.executable, "-m", "laconic", "train", "--config", str(tmp_path / "config.toml")]
    ranks = make_lab(3, 1e9).start_ranks(command, environment(), cwd=ROOT)
    wait_until(lambda: num_steps(config.run_dir) >= 3 or any(rank.code is not None for rank in ranks))
    ranks.pop(1).signal(signal.SIGKILL)
    for ending in finish(ranks, patient(25)):
        assert ending.code == EXIT_PEER_LOST, ending.err
        last = ending.err.strip().splitlines()[-1]
        assert last.startswith("laconic: rank "), ending.err
        assert " lost contact with another process: " in last
        assert "; rank 1 ended, stopped, raised an error" in last
