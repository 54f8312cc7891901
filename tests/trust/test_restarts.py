"""A run whose processes die, fail or hang starts again by itself and ends with the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trust.faults import SAVING, Fault
from tests.trust.trial import Trial, trial_config, undisturbed

FAULTS = {
    "kill": [Fault("between", "kill", 1, 3, 0.02), Fault("reduce", "kill", 0, 6)],
    "saving": [
        Fault(moment, "kill", 0, step) for moment, step in zip(("shards", *SAVING), (3, 7, 11, 15), strict=True)
    ],
    "exceptions": [Fault("update", "exit", 1, 5), Fault("forward", "raise", 0, 7), Fault("forward", "memory", 1, 9)],
    "hanging": [Fault("between", "stop", 0, 2, 0.05), Fault("start", "stop", 1, 0), Fault("reduce", "spin", 1, 9)],
    "spinning": [Fault("forward", "spin", 1, 3)],
    "launcher": [
        Fault("shards", "launcher", 1, 8),
        Fault("update", "kill", 1, 10),
        Fault("between", "launcher", 0, 13),
    ],
    "start": [Fault("start", "kill", 1, 0), Fault("start", "kill", 0, 0)],
    "early launcher": [
        Fault("start", "launcher", 1, 0),
        Fault("forward", "launcher", 0, 2),
        Fault("shards", "launcher", 1, 4),
        Fault("renamed", "launcher", 0, 4),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ddp", "kill"),
        *(pytest.param("ddp", name, marks=pytest.mark.slow) for name in FAULTS if name != "kill"),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind in ("fsdp", "pipeline", "ep")
            for name in ("saving", "spinning")
        ),
    ],
)
@pytest.mark.ci
def test_the_run_ends_as_if_nothing_had_happened(kind: str, name: str, folder: Path) -> None:
    expected = undisturbed(folder, kind)
    trial = Trial(folder, trial_config(folder, f"{kind}-{name}", kind), FAULTS[name])
    trial.run()
    assert len(trial.outcome.faults) == len(FAULTS[name])
    trial.check_same(expected)
