"""Checkpoints of runs whose dense part is cut by tensor parallelism, and of pipeline stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from laconic.errors import CheckpointError
from laconic.formats.shards import local_part
from laconic.moe.huggingface import Parallelized, load_sharded, parallelize, save_sharded
from laconic.moe.parallel.grid import Grid
from tests.activations.models import make_ids
from tests.distributed.test_moe_huggingface import close, loss_on, tiny, whole
from tests.moe.worlds import run_world

FAMILY = "qwen2_moe"


def tensor_parallel(model: Any, grid: Grid) -> None:
    """Attention by heads, shared experts by hidden units, over the MP group."""
    plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan["self_attn.o_proj"] = RowwiseParallel()
    plan |= {f"mlp.shared_expert.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan["mlp.shared_expert.down_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        parallelize_module(layer, grid.dense_mesh["mp"], plan)


def started(sizes: tuple[int, int, int] | None, *, cut: bool = False, shard: bool = False, spoil: bool = True) -> Any:
    model = tiny(FAMILY, num_key_value_heads=4)
    if spoil:  # what a checkpoint does not write must not go by unnoticed
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    grid = Grid(*sizes) if sizes else None
    done = parallelize(model, grid)
    if cut and grid is not None:
        tensor_parallel(model, grid)
    if shard:
        done.fully_shard(model.model.layers)
    return done, torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)


def train(done: Parallelized, optimizer: torch.optim.Optimizer, step: int, *, shard: bool = False) -> None:
    grid = done.grid
    ids = make_ids(4, 6, step)
    loss_on(done.model, ids if grid is None else ids.chunk(grid.layout.dp)[grid.dp.rank()]).backward()
    if not shard:
        done.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()


def state_of(done: Parallelized, optimizer: torch.optim.Optimizer, of: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in done.model.named_parameters():
        found[name] = of(parameter.detach()).clone()
        found |= {f"{name} {key}": of(value).clone() for key, value in optimizer.state[parameter].items()}
    return found


def saved_beside_tensor_parallelism(folder: Path) -> None:
    """Two steps with a checkpoint in between; going on in the same layout repeats the second one to the bit."""
    done, optimizer = started((2, 2, 1), cut=True, spoil=False)
    shared: Any = done.model.model.layers[0].mlp.shared_expert
    assert isinstance(shared.up_proj.weight, DTensor)
    train(done, optimizer, 0)
    save_sharded(folder / "0", done.model, optimizer)
    train(done, optimizer, 1)
    expected = state_of(done, optimizer, local_part)
    in_whole = state_of(done, optimizer, whole)
    if dist.get_rank() == 0:
        torch.save(in_whole, folder / "expected.pt")
    dist.barrier()
    again, other = started((2, 2, 1), cut=True)
    load_sharded(folder / "0", again.model, other)
    train(again, other, 1)
    got = state_of(again, other, local_part)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


def goes_on(folder: Path, sizes: tuple[int, int, int] | None, cut: bool, shard: bool) -> None:
    """Another layout has the same state after the same step, up to rounding."""
    done, optimizer = started(sizes, cut=cut, shard=shard)
    load_sharded(folder / "0", done.model, optimizer)
    train(done, optimizer, 1, shard=shard)
    expected = torch.load(folder / "expected.pt")
    for name, tensor in state_of(done, optimizer, whole).items():
        assert close(tensor, expected[name], 1e-6), name


def another_model_is_refused(folder: Path) -> None:
    model = tiny(FAMILY, num_key_value_heads=4, shared_expert_intermediate_size=32)
    grid = Grid(2, 2)
    parallelize(model, grid)
    tensor_parallel(model, grid)
    with pytest.raises(CheckpointError, match=r"shared_expert\.\w+_proj\.weight is \[.*\] there and \[.*\] here"):
        load_sharded(folder / "0", model)


@pytest.mark.ci
def test_a_dense_part_cut_by_tensor_parallelism_goes_on_to_the_bit(tmp_path: Path) -> None:
    run_world([partial(saved_beside_tensor_parallelism, tmp_path), partial(another_model_is_refused, tmp_path)], 4,
              tmp_path)  # fmt: skip


@pytest.mark.slow
def test_a_dense_part_cut_by_tensor_parallelism_goes_on_in_other_layouts(tmp_path: Path) -> None:
    four = [
        partial(saved_beside_tensor_parallelism, tmp_path),
        partial(goes_on, tmp_path, (4, 4, 1), True, False),
        partial(goes_on, tmp_path, (1, 4, 1), False, False),
        partial(goes_on, tmp_path, (2, 2, 1), True, True),
    ]
    run_world(four, 4, tmp_path)
    goes_on(tmp_path, None, False, False)


# --- pipeline stages ---


class Stage(nn.Module):
    """One decoder layer under a name that each stage has, or under the one it has in the whole model."""

    def __init__(self, model: Any, number: int, name: str, embedding: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: model.model.layers[number]})
        if embedding:
            self.embedding = model.model.embed_tokens


def made_stage(number: int, name: str, mesh: Any, embedding: bool = False) -> tuple[Stage, torch.optim.Optimizer]:
    stage = Stage(tiny(FAMILY), number, name, embedding)
    done = parallelize(stage, mesh)
    optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return stage, optimizer


def stages_of_one_name_are_refused(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "ep"))
    number = mesh.get_local_rank("pp")
    stage, optimizer = made_stage(number, "0", mesh)
    match = r"tensors have the same name in several of 2 pipeline stages, but are not the same.*model\.layers\.0\."
    for given in ((stage,), (stage, optimizer)):
        with pytest.raises(CheckpointError, match=match):
            save_sharded(folder / "refused", *given)
    dist.barrier()
    assert not (folder / "refused").exists()


def stages_with_names_of_the_whole_come_back(folder: Path) -> None:
    """An embedding that both stages hold, alike, is no misfit."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "ep"))
    number = mesh.get_local_rank("pp")
    stage, optimizer = made_stage(number, str(number), mesh, embedding=True)
    save_sharded(folder / "stages", stage, optimizer)
    again, other = made_stage(number, str(number), mesh, embedding=True)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_sharded(folder / "stages", again, other)
    for (name, got), expected in zip(again.named_parameters(), stage.parameters(), strict=True):
        assert torch.equal(local_part(got.detach()), local_part(expected.detach())), name


@pytest.mark.ci
def test_stages_that_name_their_experts_alike_are_refused_and_others_come_back(tmp_path: Path) -> None:
    scenarios = [
        partial(stages_of_one_name_are_refused, tmp_path),
        partial(stages_with_names_of_the_whole_come_back, tmp_path),
    ]
    run_world(scenarios, 4, tmp_path)
