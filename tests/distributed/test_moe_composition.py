"""Spread experts beside tensor and sequence parallelism of the dense part, and in pipeline stages of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from laconic.errors import CheckpointError, ConfigError
from laconic.moe.huggingface import parallelize
from laconic.moe.parallel.grid import Grid
from tests.activations.models import make_ids
from tests.distributed.test_moe_huggingface import (
    assert_gradients_are_means,
    assert_steps_are_alike,
    average_gradients,
    close,
    tiny,
)
from tests.moe.worlds import run_world


def tensor_parallel(model: Any, grid: Grid, sequences: bool) -> None:
    """Attention by heads over the MP group; with `sequences` norms and residuals by tokens."""
    mesh = grid.dense_mesh["mp"]
    for number, layer in enumerate(model.model.layers):
        plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan["self_attn.o_proj"] = RowwiseParallel(output_layouts=Shard(1) if sequences else Replicate())
        if sequences:
            to_all = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
            to_all["desired_input_kwarg_layouts"] = {"hidden_states": Replicate()}
            plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
            plan["self_attn"] = PrepareModuleInput(**to_all, use_local_output=True)
        parallelize_module(layer, mesh, plan)
        if sequences:
            gather = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
            parallelize_module(layer.mlp, mesh, gather)
            parallelize_module(
                layer.mlp, mesh, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
            )
            if number == 0:
                cut = PrepareModuleInput(
                    input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
                )
                parallelize_module(layer, mesh, cut)
    if sequences:
        parallelize_module(model.model, mesh, {"norm": SequenceParallel()})
        back = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        parallelize_module(model, mesh, {"lm_head": back})


def beside_tensor_parallelism(ep: int, esp: int = 1, sequences: bool = False, shard: bool = False) -> None:
    reference, model = tiny("mixtral"), tiny("mixtral")
    grid = Grid(mp=2, ep=ep, esp=esp)
    done = parallelize(model, grid)
    tensor_parallel(model, grid, sequences)
    if shard:
        done.fully_shard(model.model.layers)
    ids = make_ids(4, 8, 1).chunk(grid.layout.dp)[grid.dp.rank()]
    for attention in (layer.self_attn for layer in model.model.layers):
        assert attention.q_proj.weight.to_local().shape[0] == 32 // (1 if not shard else grid.layout.dp)
    expected = reference(input_ids=ids, use_cache=False).logits
    got = model(input_ids=ids, use_cache=False).logits
    assert close(got, expected)
    for logits in (expected, got):
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    if not shard:
        done.reduce_gradients()
    assert_steps_are_alike(reference, model, done)


def dense_by_tensors_experts_by_processes() -> None:
    beside_tensor_parallelism(2)
    beside_tensor_parallelism(4)
    beside_tensor_parallelism(2, 2)
    beside_tensor_parallelism(2, sequences=True)


class Part(nn.Module):
    """Some layers of a Mixtral, with the embedding in front or the head behind."""

    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if layer == 0 else None
        self.layer, self.rotary = inner.layers[layer], inner.rotary_emb
        self.head = nn.Sequential(inner.norm, model.lm_head) if layer == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, positions))
        return x if self.head is None else self.head(x)


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def stages_with_experts_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage, place = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    reference, part = tiny("mixtral"), Part(tiny("mixtral"), stage)
    # The stages find out shapes by a forward on memory that has not been written.
    done = parallelize(part, mesh, check_logits=False)
    assert done.grid is not None
    assert dist.get_process_group_ranks(done.grid.dp) == [2 * stage, 2 * stage + 1]
    assert done.grid.layout.edp == 1
    ids = make_ids(8, 6, 1).chunk(2)[place]
    pipeline = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(pipeline, n_microbatches=2, loss_fn=loss)
    if stage == 0:
        schedule.step(ids)
    else:
        got = schedule.step(target=ids)
    done.reduce_gradients()

    parts = [Part(reference, number) for number in range(2)]
    logits = parts[1](parts[0](ids))
    assert stage == 0 or close(got, logits)
    loss(logits, ids).backward()
    average_gradients(reference)
    assert_gradients_are_means(parts[stage], part)


def meshes_with_stages_are_checked() -> None:
    for shape, names, dim, ep in (((2, 2), ("ep", "pp"), "ep", 2), ((2, 2, 1), ("dp", "pp", "ep"), "pp", 1)):
        call = rf"pass Grid\(ep={ep}, stages=2\), or order the dimensions \(pp"
        with pytest.raises(ConfigError, match=f"dimension {dim} .* {call}"):
            Grid.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
    with pytest.raises(ConfigError, match="stages is 3, but it must divide the 4 ranks"):
        Grid(stages=3)
    saving = parallelize(tiny("mixtral"), Grid(ep=2, stages=2)).model
    with pytest.raises(CheckpointError, match="one of 2 pipeline stages"):
        saving.save_pretrained("nowhere")
    grid = Grid(ep=2, levels=(2,), stages=2)
    assert [dist.get_process_group_ranks(level.within)[0] // 2 for level in grid.levels] == [dist.get_rank() // 2] * 2


@pytest.mark.ci
def test_tensor_and_sequence_parallelism_beside_experts(tmp_path: Path) -> None:
    run_world([dense_by_tensors_experts_by_processes], 4, tmp_path)


@pytest.mark.ci
def test_pipeline_stages_with_experts(tmp_path: Path) -> None:
    run_world([stages_with_experts_of_their_own, meshes_with_stages_are_checked], 4, tmp_path)


def everything_at_once() -> None:
    beside_tensor_parallelism(2, shard=True)


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_beside_experts(tmp_path: Path) -> None:
    run_world([everything_at_once], 4, tmp_path)
