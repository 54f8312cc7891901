"""Calls and steps leave no cycles of references: buffers, and groups with their threads, would outlive them by far."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic import quantize_gathers, zip_collectives
from laconic.collectives import Lossless, ProcessGroupOptions, Raw
from laconic.gradients import LocalSteps, all_reduce_q8, quantize_reduction
from laconic.train.launch.worker import leave
from tests.distributed import over_backend
from tests.distributed.over_backend import join, values
from tests.distributed.processes import run_ranks
from tests.garbage import left_in_cycles

CODED = ProcessGroupOptions(Lossless(), min_nbytes=1)


def futures() -> None:
    """Callbacks of coded and raw calls, chained and waited for."""
    for x in (values(torch.float32), values(torch.float32)[:1].long()):
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.get_future().then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1).wait()


def step_of(model: nn.Module, after: Callable[[], object] = lambda: None) -> Callable[[], None]:
    def step() -> None:
        model(values(torch.float32, 16 * 64).view(16, 64)).square().sum().backward()
        model.zero_grad()
        after()

    return step


def zipped(model: nn.Module, change: Callable[..., Any], **options: Any) -> nn.Module:
    change(model, **options)
    return model


def in_cycles(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Counter[str]] = {}
    for name, options in (("coded", CODED), ("raw", ProcessGroupOptions(Raw(), min_nbytes=1)), ("auto", None)):
        join("laconic", rank, 2, folder, name, pg_options=options)
        todo: dict[str, Callable[[], object]] = {
            "collectives": over_backend.collectives,
            "points": over_backend.points,
            "futures": futures,
            "8 bits": lambda: all_reduce_q8(values(torch.float32)),
        }
        for what, do in todo.items():
            found[f"{name} {what}"] = left_in_cycles(do)
        dist.destroy_process_group()
    join("gloo", rank, 2, folder, "steps")
    ddp = DistributedDataParallel
    local = over_backend.model()
    steps = LocalSteps(local, every=1)
    todo = {
        "zipped DDP": step_of(zipped(ddp(over_backend.model()), zip_collectives, codec=Lossless())),
        "quantized DDP": step_of(zipped(ddp(over_backend.model()), quantize_reduction, min_nbytes=0)),
        "zipped FSDP2": step_of(zipped(over_backend.fsdp_model(), zip_collectives, codec=Lossless())),
        "quantized FSDP2": step_of(zipped(over_backend.fsdp_model(), quantize_reduction, min_nbytes=0)),
        "quantized gathers": step_of(zipped(over_backend.fsdp_model(), quantize_gathers)),
        "local steps": step_of(local, steps.step),
    }
    for what, do in todo.items():
        found[what] = left_in_cycles(do)
    dist.destroy_process_group()
    wrong = {what: classes for what, classes in found.items() if classes}
    assert not wrong, wrong
    leave(0)


@pytest.mark.ci
def test_calls_and_steps_leave_nothing_for_the_search_for_cycles(tmp_path: Path) -> None:
    run_ranks(in_cycles, (str(tmp_path),), 2)


def groups_that_come_and_go(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    gc.disable()
    threads = []
    for number in range(4):
        join("laconic", rank, 2, folder, str(number), pg_options=CODED)
        over_backend.collectives()
        dist.destroy_process_group()
        threads.append(psutil.Process().num_threads())
    assert len({*threads}) == 1, threads
    leave(0)


def test_a_destroyed_group_takes_its_threads_along(tmp_path: Path) -> None:
    run_ranks(groups_that_come_and_go, (str(tmp_path),), 2)
