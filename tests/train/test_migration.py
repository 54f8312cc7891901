"""Places of experts in a run: which saved ones are taken. Runs whose experts move are in tests/distributed."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.cost.moe.swap_period import SwapPeriod
from laconic.errors import CheckpointError
from laconic.moe.experts.modules import GatedExperts
from laconic.moe.gates import SoftmaxGate
from laconic.moe.layer import MoELayer
from laconic.train.config.schema import MoEConfig
from laconic.train.moe import migration
from laconic.train.moe.migration import Migration

PERIODS = [asdict(SwapPeriod(1.0, pairs=pairs)) for pairs in (((0, 3),), ())]
SAVED: dict[str, Any] = {
    **{"expert_parallel": 2, "num_experts": [4, 3], "num_swaps": 5, "periods": PERIODS},
    "slots": [[1, 0, 2, 3], [0, 1, 2]],
}


def restored(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Migration:
    """Places of 4 and 3 experts that go on from what is saved, as one process has them."""
    layers = {str(n): MoELayer(SoftmaxGate(n, 16, top_k=2), GatedExperts(n, 16, 8)) for n in (4, 3)}
    model, grid = SimpleNamespace(layers=layers), SimpleNamespace(ep=None, layout=SimpleNamespace(edp=1))
    monkeypatch.setattr(migration, "MoERates", SimpleNamespace(load=lambda path: None))
    config = MoEConfig(expert_parallel=2, dispatcher="auto", swap_every=1, rates=__file__)
    optimizer = torch.optim.SGD(torch.nn.ModuleDict(layers).parameters())
    return Migration(model, grid, config, optimizer, json.dumps(SAVED | changes))  # type: ignore[arg-type]  # what it reads


def test_saved_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    state = json.loads(restored(monkeypatch).state())
    assert (state["slots"], state["num_swaps"]) == (SAVED["slots"], 5)
    assert [period["pairs"] for period in state["periods"]] == [[[0, 3]], []]


def test_periods_of_fewer_fields_are_taken_and_other_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"cost_seconds": 1.0, "pairs": [[0, 3]]}
    state = json.loads(restored(monkeypatch, periods=[bare, bare | {"pairs": []}]).state())
    assert [period["pairs"] for period in state["periods"]] == [[[0, 3]], []]
    with pytest.raises(CheckpointError, match=r"periods.0.next is not known here"):
        restored(monkeypatch, periods=[bare | {"next": 3}, bare])
    with pytest.raises(CheckpointError, match=r"periods.0.lost_seconds is nan, but it must be a finite number"):
        restored(monkeypatch, periods=[bare | {"lost_seconds": float("nan")}, bare])


def test_places_of_other_numbers_of_processes_or_experts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in ({"expert_parallel": 4}, {"num_experts": [4, 4]}):
        state = json.loads(restored(monkeypatch, **change).state())
        assert (state["slots"], state["num_swaps"]) == ([[0, 1, 2, 3], [0, 1, 2]], 0)
