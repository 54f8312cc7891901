"""Checkpoints of parallelized models: from before, from other shapes, from elsewhere."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laconic.errors import CheckpointError
from laconic.moe.huggingface import load_sharded, parallelize, save_sharded
from tests.activations.models import loss_of, make_ids, make_model


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> nn.Module:
    loss_of(model, make_ids(1, 8, seed)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_and_moments_of_the_model_before_go_on(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", experts_implementation="eager")
    optimizer = adamw(model)
    save_sharded(tmp_path / "a", trained(model, optimizer, 1), optimizer)
    twin = make_model("qwen3_moe")
    parallelize(twin)
    fresh = adamw(twin)
    load_sharded(tmp_path / "a", twin, fresh)
    assert same(twin, model)
    for mine, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    save_sharded(tmp_path / "b", twin, fresh)
    load_sharded(tmp_path / "b", model, optimizer)


def test_parameters_that_are_parts_of_one_buffer_are_all_stored(tmp_path: Path) -> None:
    model, other = make_model("qwen3_moe"), make_model("qwen3_moe")
    for one, scale in ((model, 1.0), (other, 0.0)):
        vector_to_parameters(scale * parameters_to_vector(one.parameters()), one.parameters())
    save_sharded(tmp_path, model)
    load_sharded(tmp_path, other)
    assert same(other, model)


def test_a_checkpoint_without_some_tensors_is_refused_by_their_names(tmp_path: Path) -> None:
    save_sharded(tmp_path / "one", make_model("mixtral", num_hidden_layers=1))
    model = make_model("mixtral")
    parallelize(model)
    before = values(model)
    with pytest.raises(CheckpointError, match=r"tensors are missing.* model\.model\.layers\.1\.mlp\.experts\.down_p"):
        load_sharded(tmp_path / "one", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_other_sizes_is_refused_with_both(tmp_path: Path) -> None:
    save_sharded(tmp_path / "eight", make_model("mixtral", num_local_experts=8))
    model = make_model("mixtral")
    parallelize(model)
    with pytest.raises(CheckpointError, match=r"down_proj is \[8, 64, 160\] there and \[4, 64, 160\] here"):
        load_sharded(tmp_path / "eight", model)


def test_experts_one_by_one_are_named(tmp_path: Path) -> None:
    model = make_model("olmoe")
    state = dict(model.state_dict())
    for name in [name for name in state if ".experts." in name]:
        for number, expert in enumerate(state.pop(name)):
            state[name.replace(".experts.", f".experts.{number}.") + ".weight"] = expert.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": state}, checkpoint_id=tmp_path / "separate", no_dist=True)
    parallelize(model)
    with pytest.raises(CheckpointError, match=r"has experts one by one \(.*experts\.0\..*from_pretrained"):
        load_sharded(tmp_path / "separate", model)


def test_moments_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    model = make_model("mixtral")
    parallelize(model)
    save_sharded(tmp_path / "weights", model)
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        load_sharded(tmp_path / "weights", model, adamw(model))
    load_sharded(tmp_path / "weights", model)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model = make_model("mixtral")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_sharded(tmp_path / "nowhere", model)
    (tmp_path / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_sharded(tmp_path, model)


def test_a_hostile_index_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    model = torch.nn.Linear(2, 2)
    save_sharded(tmp_path / "dcp", model)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"holds no checkpoint that can be read: .* asks for \S+\.mkdir"):
        load_sharded(tmp_path / "dcp", model)
    assert not (tmp_path / "executed").exists()
