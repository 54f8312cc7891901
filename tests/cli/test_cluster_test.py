"""`laconic cluster-test`: what differs or is wrong between ranks is a problem, and two good processes have none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.cli import cluster_test
from laconic.cli.main import main
from tests.distributed.processes import ForkedCommand, free_port, rank_environment

ALONE: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), gather=lambda value: [value])


def test_values_that_are_wrong_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(world: Any, name: str, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        got = inputs[0].clone()
        got[5] += 1
        return got, inputs[0]

    monkeypatch.setattr(cluster_test, "_called", spoilt)
    monkeypatch.setattr(cluster_test, "_COLLECTIVES", ("all_reduce",))
    assert cluster_test._tried(ALONE, "all_reduce")["problem"] == "1 of 262144 values are wrong"
    found = cluster_test._tested(ALONE)
    assert found["problems"] == ["all_reduce on rank 0: 1 of 262144 values are wrong"]
    assert cluster_test._text(found).endswith("PROBLEM: all_reduce on rank 0: 1 of 262144 values are wrong")


def test_other_versions_and_clocks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cluster_test._facts()
    other = own | {"versions": own["versions"] | {"torch": "1.0"}}
    link = {"rank": 1, "trip_seconds": 0.001, "bytes_per_second": 1e9, "clock_seconds": -2.0}
    said: list[list[Any]] = [[own, other, own], [[link], [], []]]
    world = SimpleNamespace(rank=1, size=0, device=torch.device("cpu"), gather=lambda value: said.pop(0))
    monkeypatch.setattr(cluster_test, "_COLLECTIVES", ())
    found = cluster_test._tested(world)
    assert found["problems"] == [f"torch differs: {torch.__version__} on rank 0, 1.0 on rank 1"]
    assert found["notes"] == ["the clock of rank 1 is -2.00 s off rank 0's; synchronize them (NTP)"]


def test_one_process_has_no_links(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in rank_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    assert main(["cluster-test"]) == 2
    assert "links need two processes" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_this_machine_have_no_problem(tmp_path: Path) -> None:
    ending = ForkedCommand(["cluster-test", "--json"], tmp_path / "out").finish()
    assert ending.code == 0, ending.err
    found = json.loads(ending.out)
    assert found["problems"] == []
    assert len(found["collectives"]) == 7
    assert all(0 < one["sent_nbytes"] < one["raw_nbytes"] for one in found["collectives"])
    assert found["links"][0]["bytes_per_second"] > 1e6
    assert abs(found["links"][0]["clock_seconds"]) < 1
