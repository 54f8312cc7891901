"""Worlds of gloo processes for tests of expert parallelism."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.patience import patient

Scenario = Callable[[], None]


def run_world(scenarios: Sequence[Scenario], world: int, folder: Path) -> None:
    """Run module-level functions, one after the other, in `world` processes; fails if one of them raises anywhere."""
    run_ranks(_work, (world, str(folder), tuple(scenarios)), world)


def _work(rank: int, world: int, folder: str, scenarios: Sequence[Scenario]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patient(60)))
    for scenario in scenarios:
        started = time.perf_counter()
        torch.manual_seed(0)
        scenario()
        dist.barrier()
        if rank == 0:
            print(f"{world} ranks, {scenario}: {time.perf_counter() - started:.2f} s")
    dist.destroy_process_group()
    leave(0)
