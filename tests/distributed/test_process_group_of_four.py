"""Four processes over the process group: sums in the order of ranks, subgroups, and training that does not depend on
whether messages are coded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, ProcessGroupOptions, Raw
from laconic.train.launch.worker import leave
from tests.distributed import over_backend
from tests.distributed.over_backend import all_gather_single, assert_same, join, reduce_scatter_single, values
from tests.distributed.processes import run_ranks

WORLD = 4


def sum_in_order(rows: Tensor, factor: float = 1.0) -> Tensor:
    """[W, n]: added in fp32, first rank first, rounded once."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return (total * factor).to(rows.dtype)


def sums(group: dist.ProcessGroup | None = None) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = values(dtype, 4 * 1001)
        x[0] = float("nan") if rank == 1 else 1.0
        x[1] = float("inf")
        rows = torch.empty(world * x.numel(), dtype=dtype)
        all_gather_single(rows.view(torch.uint8), x.view(torch.uint8), group=group)  # bytes are never coded
        rows = rows.view(world, -1)
        for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / world)):
            expected = sum_in_order(rows, factor)
            assert expected[0].isnan()
            found = x.clone()
            dist.all_reduce(found, op, group=group)
            assert_same(found, expected, f"all_reduce {op} {dtype}")
            found = torch.empty(x.numel() // world, dtype=dtype)
            reduce_scatter_single(found, x, op, group=group)
            assert_same(found, expected.chunk(world)[rank].contiguous(), f"reduce_scatter {op} {dtype}")


def movements(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    found = over_backend.collectives(group) | over_backend.points(group)
    return {name: x for name, x in found.items() if "reduce" not in name}


def in_subgroups() -> dict[str, Any]:
    """Rows and columns of a 2 x 2 mesh, each with calls of its own; the group of ranks 3 and 1 only."""
    mesh = over_backend.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found: dict[str, Any] = {name: movements(mesh[name].get_group()) for name in ("outer", "inner")}
    odd = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        x = values()
        dist.broadcast(x, src=3, group=odd)
        found["odd"] = x
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join("gloo", rank, WORLD, folder, "gloo")
    expected = {"world": movements(None)} | in_subgroups()
    dist.destroy_process_group()
    losses = {}
    for name, codec in (("raw", Raw()), ("coded", Lossless())):
        join("laconic", rank, WORLD, folder, name, pg_options=ProcessGroupOptions(codec, min_nbytes=1))
        if name == "coded":
            assert_same({"world": movements(None)} | in_subgroups(), expected, "movements")
        sums()
        losses[name] = over_backend.ddp_losses() + over_backend.losses(over_backend.fsdp_model(), steps=2)
        dist.destroy_process_group()
    assert_same(losses["coded"], losses["raw"], "losses")
    leave(0)


@pytest.mark.ci
def test_sums_are_in_the_order_of_ranks_and_training_does_not_see_the_codec(tmp_path: Path) -> None:
    run_ranks(work, (str(tmp_path),), WORLD)
