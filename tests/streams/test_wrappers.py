"""torch's own FSDP2 and DDP objects with this package's collectives, two ranks, in many orders of their streams."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import background
from laconic.collectives.runtime.device_streams import Ready
from laconic.moe.pipeline.grad_reduce import DenseGradients
from tests.distributed.processes import run_ranks
from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import Device, RaceError
from tests.streams.echo import echo
from tests.streams.programs import (
    DDP,
    FSDP2,
    Program,
    ddp_given_back,
    ddp_quantized,
    native,
    quantized,
    reduced_in_slots,
    reduced_in_whole_slots,
)
from tests.streams.ranks import ranks
from tests.streams.reducer import reducer_on

ORDERS = 25
"""Of each program, tried by each of the two ranks from seeds of its own."""


def compared(rank: int, programs: list[Program], folder: Path) -> None:
    """Over gloo on the CPU and on the device: the same bits, and the same in all orders."""
    with gloo(rank, folder / "cpu") as group:
        expected = [program(torch.device("cpu"), group, rank) for program in programs]
    for number, program in enumerate(programs):
        device, found = recorded(rank, program, folder / str(number))
        for one, right in zip(found, expected[number], strict=True):
            assert torch.equal(one, right), f"{program.__name__}: {one} and on the CPU {right}"
        try:
            device.check(ORDERS, seed=rank * ORDERS)
        except RaceError as race:
            raise AssertionError(f"{program.__name__}: {race}") from None


@contextmanager
def gloo(rank: int, store: Path) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def recorded(rank: int, program: Program, store: Path) -> tuple[Device, list[Tensor]]:
    with cuda() as device, ranks(device, store, rank, 2) as group, reducer_on(device):
        return device, program(CUDA, group, rank)


@pytest.mark.parametrize("programs", [FSDP2, DDP], ids=["fsdp2", "ddp"])
@pytest.mark.ci
def test_two_ranks(programs: list[Program], tmp_path: Path) -> None:
    run_ranks(compared, (programs, tmp_path), 2)


@pytest.mark.parametrize(
    ("program", "functions"),
    [
        (quantized, ["foreach_all_gather"]),  # the gather for the copy into its buffer
        (quantized, ["foreach_all_gather_copy_out"]),  # computation for the gather
        # The next gather for the copy out of the buffer it gets. torch 2.15 has other names for this and the end.
        (quantized, ["_wait_all_gather_streams_on_event", "wait_all_gather_streams_on_event"]),
        (quantized, ["foreach_reduce"]),  # the reduction for the gradients
        # The optimizer for the division behind the reduction; natively either of the first two would be enough.
        (quantized, ["finalize_backward", "_end_backward_iteration"]),
        (native, ["finalize_backward", "_root_post_backward_final_callback", "_end_backward_iteration"]),
        (quantized, ["collect"]),  # of this package: announcements
        (quantized, ["wait_all"]),  # messages
        (reduced_in_slots, ["wait"]),  # the caller for the link, and the link for the stream of the gradients
        (ddp_quantized, ["_run"]),  # the executor for the bucket
        (ddp_quantized, ["reducer_waits"]),  # the reducer for the hook's future
        (ddp_given_back, ["zip_hook"]),
    ],
)
def test_a_wait_that_is_lost_is_found(program: Program, functions: list[str]) -> None:
    """Here the other rank has what this one has: one process is enough."""
    with lost_waits(*functions) as dropped, cuda() as device, echo() as group, reducer_on(device):
        program(CUDA, group, 0)
    assert dropped
    with pytest.raises(RaceError):
        device.check()


def test_buffers_of_slots_that_nobody_holds_are_found() -> None:
    def forget(self: DenseGradients, *tensors: Tensor) -> None:
        pass

    with mock.patch.object(DenseGradients, "hold", forget):
        found_in(reduced_in_whole_slots)


def test_what_a_job_uses_and_nobody_holds_is_found() -> None:
    def forget(self: background._Held, what: object, device: torch.device, before: object = None) -> None:
        self._what, self._device, self._before, self._issuer = None, device, None, torch.cuda.current_stream()

    with mock.patch.object(background._Held, "__init__", forget):
        found_in(ddp_quantized)


def test_a_buffer_that_its_stream_has_not_got_yet_is_found() -> None:
    """FSDP2 allocates a reduced shard on its own stream, and the link's writes to it."""

    def go_on(self: Ready) -> None:
        pass

    with mock.patch.object(Ready, "wait", go_on):
        found_in(reduced_in_slots)


def found_in(program: Program) -> None:
    with cuda() as device, echo() as group, reducer_on(device):
        program(CUDA, group, 0)
    with pytest.raises(RaceError):
        device.check()
