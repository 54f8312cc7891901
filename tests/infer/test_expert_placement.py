"""Copies of experts on expert workers: by measured loads, rows divided between them, every expert computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laconic.errors import ConfigError
from laconic.infer import Engine, InferencePlan
from laconic.infer.expert_placement import check_expert_placement, place_experts, save_loads
from laconic.infer.expert_share import ExpertShare
from laconic.infer.remote_experts import RemoteExperts
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.moe.huggingface.experts import FusedExperts
from laconic.schedule.inference import Slicing
from tests.infer.models import make
from tests.infer.test_remote_experts import NUM_EXPERTS, ORIGINAL, WIDTH, CountingLink, run


def remote(held: list[list[int]], plan: InferencePlan) -> tuple[RemoteExperts, list[CountingLink]]:
    links = []
    for experts in held:
        part = {name: nn.Parameter(p[experts]) for name, p in ORIGINAL.named_parameters()}
        links.append(CountingLink(ExpertShare([FusedExperts(ORIGINAL, part)])))
    return RemoteExperts(links, [held], plan), links


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["tokens", "experts"]),
    st.randoms(use_true_random=False),
)
def test_sums_are_those_of_all_experts_wherever_copies_are(
    num_rows: int, top_k: int, num_workers: int, num_slices: int, slicing: Slicing, random: Any
) -> None:
    held = [{e for e in range(NUM_EXPERTS) if random.random() < 0.4} for _ in range(num_workers)]
    for expert in range(NUM_EXPERTS):
        held[random.randrange(num_workers)].add(expert)
    held = [sorted(worker or {0}) for worker in held]
    experts, links = remote(held, InferencePlan(num_slices=num_slices, slicing=slicing))
    hidden, weights = torch.randn(num_rows, WIDTH), torch.rand(num_rows, top_k)
    index = torch.tensor([random.sample(range(NUM_EXPERTS), top_k) for _ in range(num_rows)])
    got = run(experts, (hidden, index, weights), num_rows)
    assert torch.allclose(got, ORIGINAL(hidden, index, weights), rtol=1e-5, atol=1e-5)
    assert sum(int((rows.experts >= 0).sum()) for link in links for rows in link.sent) == num_rows * top_k
    assert experts.loads == [index.flatten().bincount(minlength=NUM_EXPERTS).tolist()]
    # Which copies a row takes, and so the bits of its sum, do not depend on the batch that it is in.
    owners = experts._places[0].owners_of(hidden, index)
    assert torch.equal(owners[-1:], experts._places[0].owners_of(hidden[-1:], index[-1:]))
    assert all(index[row, choice] in held[owners[row, choice]] for row in range(num_rows) for choice in range(top_k))


def test_copies_share_the_rows_of_a_hot_expert() -> None:
    held = [[0, 1], [0, 2], [0, 3], [0, *range(4, NUM_EXPERTS)]]
    experts, links = remote(held, InferencePlan())
    hot = torch.zeros(400, 1, dtype=torch.int64)
    run(experts, (torch.randn(400, WIDTH), hot, torch.ones(400, 1)), 400)
    assert all(70 < sum(len(rows.hidden) for rows in link.sent) < 130 for link in links)
    experts.forget_loads()
    assert experts.loads == [[0] * NUM_EXPERTS]


def test_a_plain_forward_asks_each_expert_once() -> None:
    experts, links = remote([[*range(NUM_EXPERTS)], [0, 2]], InferencePlan())
    weights, index = torch.rand(20, NUM_EXPERTS).topk(2)
    hidden = torch.randn(20, WIDTH)
    experts.begin_forward(None)
    try:
        got = experts.run(0, hidden, index, weights)
    finally:
        experts.end_forward()
    torch.testing.assert_close(got, ORIGINAL(hidden, index, weights), rtol=1e-5, atol=1e-5)
    assert not links[1].sent
    assert experts.loads == [[0] * NUM_EXPERTS]


def test_loads_place_experts_and_say_what_that_gains(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    held, note = place_experts(EngineSplit(1, 2), (4,), path, 2)
    assert held is None
    assert "is not there yet" in note
    save_loads(path, [[0, 0, 0, 0]])
    assert not path.exists()  # nothing was measured
    save_loads(path, [[90, 10, 5, 5], [1, 1, 1, 1]])
    held, note = place_experts(EngineSplit(1, 2), (4, 4), path, 2)
    assert held is not None
    for layer in held:
        assert {expert for worker in layer for expert in worker} == {0, 1, 2, 3}
        assert all(worker == sorted({*worker}) for worker in layer)
    assert all(0 in worker for worker in held[0])
    assert "has 1.00 times the mean, in place of" in note
    assert WorkerSettings.from_json(WorkerSettings(0, "", "", held=held).to_json()).experts_of(0, 1, 4) == held[0][1]
    assert place_experts(EngineSplit(1, 0), (4, 4), path, 0)[0] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "are not JSON.*let the engine write one"),
        ("{}", "is no laconic expert loads file"),
        ('{"format": "laconic expert loads", "version": 1, "loads": [], "lods": []}', "lods is not known here"),
        (json.dumps({"format": "laconic expert loads", "version": 2}), "version is 2"),
        (
            json.dumps({"format": "laconic expert loads", "version": 1, "loads": [[1, -1]]}),
            "loads.0.1 is -1, but it must be greater than",
        ),
        (json.dumps({"format": "laconic expert loads", "version": 1, "loads": [[1, 1]]}), "name another file"),
    ],
)
def test_a_file_that_is_none_or_of_another_model_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        place_experts(EngineSplit(1, 2), (4,), path, 0)


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redundant_experts is -1, but"):
        check_expert_placement(tmp_path / "a", -1)
    with pytest.raises(ConfigError, match="redundant_experts is 2, but copies go to experts that have most to do"):
        check_expert_placement(None, 2)
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_expert_placement(tmp_path / "none" / "a", 0)
    with pytest.raises(ConfigError, match="have 4 copies; give at most as many"):
        place_experts(EngineSplit(1, 2), (4,), tmp_path / "a", 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_engine_with_copies_says_the_same_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, loads = make(family, tmp_path / "model"), tmp_path / "loads.json"
    prompts, options = [[3, 1, 4, 1, 5], [9, 2, 6]], {"dtype": "float32", "expert_loads": loads}
    monkeypatch.chdir(tmp_path)
    with Engine(path, experts=2, **options | {"expert_loads": "loads.json"}) as engine:
        monkeypatch.chdir(path)  # relative paths are those of the start
        wanted = engine.generate(prompts, max_new_tokens=6)
        measured = engine.expert_loads()
    assert json.loads(loads.read_text())["loads"] == measured
    with Engine(path, experts=2, redundant_experts=2, plan=InferencePlan(num_slices=2), **options) as engine:
        assert any("experts are placed by" in note for note in engine.notes)
        assert engine.generate(prompts, max_new_tokens=6) == wanted
        held = [worker.nbytes for worker in engine.workers if worker.role == "expert"]
        assert engine.expert_loads() == measured
    assert sum(held) > 0
