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
from tests.damaged import damaged_texts

SAVED: dict[str, Any] = {
    **{"expert_parallel": 2, "num_per_rank": 1, "num_experts": [8, 6]},
    "copies": [[[5, 0], [2, 1]], []],
    "loads": [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0]],
    "busiest": [1.5, 1.25],
}


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_experts, "copy_hot_experts", lambda *args, **named: [])


def restored(text: str | None = None, **changes: Any) -> HotExperts:
    """Copies of 8 and 6 experts on two processes, one of each layer on each, that go on from what is saved."""
    layers = {str(n): MoELayer(SoftmaxGate(n, 16, top_k=2), GatedExperts(n, 16, 8)) for n in (8, 6)}
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    model, grid = SimpleNamespace(layers=layers), SimpleNamespace(ep=group)
    config = MoEConfig(expert_parallel=2, copies=1)
    saved = json.dumps(SAVED | changes) if text is None else text
    return HotExperts(model, grid, config, saved)  # type: ignore[arg-type]  # what it reads


def test_saved_copies_and_loads_are_taken() -> None:
    hot = restored()
    assert hot.copies == [[(5, 0), (2, 1)], []]
    assert json.loads(hot.state()) == SAVED
    assert restored(loads=[], busiest=None).copies == hot.copies


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"copies": [[[5, 7]], []]}, "expert 5 on process 7, but there are 8 experts and 2 processes"),
        ({"copies": [[[5, -1]], []]}, "expert 5 on process -1, but"),
        ({"copies": [[[-1, 0]], []]}, "expert -1 on process 0, but"),
        ({"copies": [[], [[6, 0]]]}, "copies of layer 1 have expert 6 on process 0, but there are 6 experts"),
        ({"copies": [[[5, 0], [6, 0]], []]}, "are 2 on process 0, but moe.copies is 1"),
        ({"copies": [[[5, 1]], []]}, "expert 5 on process 1, which holds it already"),
        ({"copies": [[[5, 0], [5, 0]], []]}, "expert 5 on process 0, which holds it already"),
        ({"copies": [[[5.5, 0]], []]}, "copies.0.0.0 is 5.5, but it must be a valid integer"),
        ({"expert_parallel": None}, "expert_parallel is None, but"),
        ({"copies": [[]]}, "argument 2 is longer"),
        ({"loads": [[1] * 8]}, "argument 2 is longer"),
        ({"loads": [[1] * 6, [1] * 8]}, "loads of layer 0 are .* but there are 8 experts"),
        ({"loads": [[1] * 8, [-1] * 6]}, "loads.1.0 is -1, but it must be greater than or equal to 0"),
        ({"busiest": [float("nan"), 1.0]}, "busiest.0 is nan, but it must be a finite number"),
        ({"busiest": [1.0]}, "busiest.1 is missing"),
    ],
)
def test_saved_copies_that_cannot_be_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"does not say which experts have copies \(.*{why}"):
        restored(**changes)


def test_a_damaged_file_is_refused_or_means_something() -> None:
    for words, text in damaged_texts(SAVED):
        try:
            again = json.loads(restored(text).state())
        except CheckpointError as error:
            assert "does not say which experts have copies" in str(error), words  # noqa: PT017  # of each
        else:
            given = json.loads(text)
            applies = all(given[name] == SAVED[name] for name in ("expert_parallel", "num_per_rank", "num_experts"))
            expected = given if applies else SAVED | {"copies": [[], []], "loads": [], "busiest": None}
            for name in ("copies", "loads"):  # a table without entries is none
                assert [*again[name]] == [[*one] for one in expected[name]], words
            assert again["busiest"] == (expected["busiest"] and expected["busiest"][:2]), words
