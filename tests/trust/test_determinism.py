"""The same seed gives the same bits, plans do not depend on Python's hash seed, and losses are those kept here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import environment
from tests.grid import slow_but
from tests.patience import patient
from tests.train.runs import AGOQ, exact_metrics, losses, tiny_config, train_alone

MODES: dict[str, dict[str, Any]] = {
    "exact": {"activations.bits": 16},
    "activations": {},
    "agoq": AGOQ,
    "bf16": {"precision": "bf16"},
}
GOLDEN = {
    "exact": [5.5057, 5.4551, 5.3125, 5.2025, 5.1074, 5.0585],
    "activations": [5.5057, 5.4553, 5.3127, 5.2025, 5.1075, 5.0586],
    "agoq": [5.5057, 5.4553, 5.3128, 5.2030, 5.1081, 5.0592],
    "bf16": [5.5058, 5.4553, 5.3128, 5.2027, 5.1076, 5.0587],
}
"""Losses of steps 1 to 6. They change with the numerics only: a commit that edits them says why."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("determinism")


@pytest.mark.parametrize("mode", slow_but(MODES, "agoq", "bf16"))
@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_the_same_seed_gives_the_same_bits(mode: str, num_threads: int, folder: Path) -> None:
    torch.set_num_threads(num_threads)
    names = [f"{mode}-{num_threads}-{number}" for number in range(2)]
    for name in names:
        assert train_alone(tiny_config(folder, name, MODES[mode])) == 0
    found = [exact_metrics(str(folder / name)) for name in names]
    assert found[0] == found[1]
    kept = list(losses(folder / names[0]).values())
    assert kept == pytest.approx(GOLDEN[mode], rel=1e-4), kept  # other processors add in another order


PROGRAMS = {
    "plan": [
        *("-m", "laconic", "plan", "--hidden-size", "512", "--num-layers", "8", "--num-heads", "8", "--json"),
        *("--intermediate-size", "1536", "--sequence-length", "512", "--batch", "8", "--memory", "2GiB"),
        *("--vocab-size", "32000"),
    ],
    "schedules": [
        "-c",
        "from laconic.schedule import SCHEDULES, make_schedule\n"
        "for name in SCHEDULES:\n    print(name, make_schedule(name, 4, 8))",
    ],
    "simulation": [
        "-c",
        "from laconic.schedule.inference import BlockTimes, InferencePlan, inference_plan\n"
        "from laconic.schedule import simulate\n"
        "plan = InferencePlan(num_micro_batches=2, num_slices=2, order='greedy')\n"
        "print(simulate(inference_plan(BlockTimes.uniform(3.0, 1.0, 2.0, 1.5, 1.5, 2), plan, 6, 3)))",
    ],
}


@pytest.mark.parametrize("name", slow_but(PROGRAMS, "simulation"))
def test_plans_and_simulations_do_not_depend_on_the_hash_seed(name: str) -> None:
    found = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, *PROGRAMS[name]],
            env=environment(PYTHONHASHSEED=seed),
            capture_output=True,
            timeout=patient(60),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop()) > 100
