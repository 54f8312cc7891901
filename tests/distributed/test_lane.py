"""Background lanes in real processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.background import Work, run_in_background
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.patience import patient


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init = f"file://{folder}/r"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=patient(30)))
    x = torch.full((4,), float(rank + 1))

    def job(groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
        torch_compat.all_reduce(x, groups[0]).wait()
        return x

    def begin() -> Work[torch.Tensor]:
        assert dist.group.WORLD is not None
        return run_in_background(job, (dist.group.WORLD,), x.device)

    # Rank 1 begins only when it has heard from rank 0, which tells it only when it has begun.
    if rank == 0:
        sum_under_way = begin()
        dist.send(x.clone(), 1)
    else:
        dist.recv(torch.empty(4), 0)
        sum_under_way = begin()
    assert sum_under_way.wait().tolist() == [3.0] * 4
    leave(0)


def test_the_first_job_of_a_lane_keeps_nobody_waiting(tmp_path: Path) -> None:
    run_ranks(work, (str(tmp_path),), 2)
