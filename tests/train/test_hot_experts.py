"""Copies of experts in a run: which saved ones are taken. Runs with copies are in tests/distributed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.errors import CheckpointError
from laconic.moe.experts.modules import GatedExperts
from laconic.moe.gates import SoftmaxGate
from laconic.moe.layer import MoELayer
from laconic.train.config.schema import MoEConfig
from laconic.train.moe import hot_experts
from laconic.train.moe.hot_experts import HotExperts

SAVED: dict[str, Any] = {
    **{"expert_parallel": 2, "num_per_rank": 1, "num_experts": [8, 6]},
    "copies": [[[5, 0], [2, 1]], []],
    "loads": [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0]],
    "busiest": [1.5, 1.25],
}


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_experts, "copy_hot_experts", lambda *args, **named: [])


def restored(**changes: Any) -> HotExperts:
    """Copies of 8 and 6 experts on two processes, one of each layer on each, that go on from what is saved."""
    layers = {str(n): MoELayer(SoftmaxGate(n, 16, top_k=2), GatedExperts(n, 16, 8)) for n in (8, 6)}
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    model, grid = SimpleNamespace(layers=layers), SimpleNamespace(ep=group)
    config = MoEConfig(expert_parallel=2, copies=1)
    return HotExperts(model, grid, config, json.dumps(SAVED | changes))  # type: ignore[arg-type]  # what it reads


def test_saved_copies_and_loads_are_taken() -> None:
    hot = restored()
    assert hot.copies == [[(5, 0), (2, 1)], []]
    assert json.loads(hot.state()) == SAVED
    assert restored(loads=[], busiest=None).copies == hot.copies


def test_what_another_release_saved_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"does not say which experts have copies \(copies.0.0.0 is 5.5, but"):
        restored(copies=[[[5.5, 0]], []])


def test_copies_of_other_numbers_of_processes_or_experts_are_left_out() -> None:
    for change in ({"expert_parallel": 4}, {"num_per_rank": 2}, {"num_experts": [8, 8]}):
        assert restored(**change).copies == [[], []]
