"""The chunked loss under DDP and FSDP2, in real processes: loss and gradients of one process, to rounding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.train.launch.worker import leave
from tests.activations.models import gradients_of, loss_of, make_ids, make_model, relative_error
from tests.distributed.processes import run_ranks

WORLD = 2
WRAPPINGS = ("ddp", "root", "head", "root-bf16", "tied")
"""DDP; FSDP2 with the head in the root's group, in a group of its own, in bf16, tied to the embedding."""


def model_of(wrapping: str) -> nn.Module:
    return make_model("llama", tie_word_embeddings=wrapping == "tied")


def wrap(model: nn.Module, wrapping: str) -> nn.Module:
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if wrapping == "root-bf16" else MixedPrecisionPolicy()
    for layer in (*model.model.layers, *([model.lm_head] if wrapping == "head" else [])):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy)
    return model


def work(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    results = {}
    for wrapping in WRAPPINGS:
        model = model_of(wrapping)
        laconic.compress_activations(model, bits=16, loss="chunked")
        wrapped = wrap(model, wrapping)
        ids = make_ids(batch=2 * WORLD)[2 * rank : 2 * rank + 2].clone()
        for _ in range(2):  # gradients accumulate, and what was gathered is gathered again
            output = wrapped(input_ids=ids, labels=ids, use_cache=False)
            assert output.logits.shape[1] == 0
            output.loss.backward()
        loss = output.loss.detach()
        dist.all_reduce(loss)
        found = gradients_of(model)
        results[wrapping] = (
            loss / WORLD,
            {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()},
        )
    if rank == 0:
        torch.save(results, f"{directory}/results.pt")
    dist.barrier()
    leave(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    directory: Path = tmp_path_factory.mktemp("loss")
    run_ranks(work, (str(directory),), WORLD)
    loaded: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = torch.load(directory / "results.pt")
    return loaded


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_loss_and_gradients_are_those_of_one_process(
    wrapping: str, results: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]
) -> None:
    loss, got = results[wrapping]
    model, ids = model_of(wrapping), make_ids(batch=2 * WORLD)
    expected_loss = loss_of(model, ids)
    (2 * expected_loss).backward()
    expected = gradients_of(model)
    bound = 0.05 if wrapping == "root-bf16" else 1e-5
    assert abs(loss.item() - expected_loss.item()) < bound
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative_error(got[name], grad) < bound, name
