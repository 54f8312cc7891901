"""torch.distributed.checkpoint's async_save while training goes on: it holds the step that it was called in."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.formats.shards import local_part
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.hand_loops import Classic
from tests.integrations.test_hand_loops import batch, loss_of


class Run:
    """A model with compressed activations and AdamW8bit, sharded or with gradients in codes."""

    def __init__(self, sharded: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = Classic()
        laconic.compress_activations(self.model, bits=4)
        self.gradients = None
        if sharded:
            for layer in self.model.transformer["h"]:
                fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.gradients = laconic.compress_gradients(self.model, dist.group.WORLD)
        self.optimizer = laconic.AdamW8bit(self.model.parameters(), lr=3e-3)

    def backward(self, step: int) -> None:
        loss_of(self.model, *batch(10 * step + dist.get_rank())).backward()
        if self.gradients is not None:
            self.gradients.reduce()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def values(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for _, value in sorted(state.items())]
        return [local_part(x.detach()).clone() for x in (*self.model.parameters(), *states)]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _save_while_training(rank: int, port: int, folder: Path, sharded: bool) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's own saving
    dist.init_process_group("gloo")
    run = Run(sharded)
    for step in range(2):
        run.step(step)
    run.backward(2)  # gradients are there, in codes where they are held in codes
    then = run.values()
    future = dcp.async_save(run.state(), checkpoint_id=str(folder / "saved"), process_group=dist.new_group())
    run.optimizer.step()  # in place, while the save goes on
    run.optimizer.zero_grad()
    for step in range(3, 6):
        run.step(step)
    now = run.values()
    assert not _equal(now, then)
    getattr(future, "upload_completion", future).result()

    again = Run(sharded)
    again.step(50)  # makes states to load into, other than those saved
    state = again.state()
    dcp.load(state, checkpoint_id=str(folder / "saved"))
    set_state_dict(again.model, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert _equal(again.values(), then)
    for step in range(2, 6):
        again.step(step)
    assert _equal(again.values(), now)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ci
def test_a_sharded_run_is_saved_as_it_was(tmp_path: Path) -> None:
    run_ranks(_save_while_training, (free_port(), tmp_path, True), 2)


@pytest.mark.ci
def test_a_run_with_gradients_in_codes_is_saved_as_it_was(tmp_path: Path) -> None:
    run_ranks(_save_while_training, (free_port(), tmp_path, False), 2)
