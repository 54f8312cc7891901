"""Collectives over codecs when messages are damaged, and ranks die or stop: named, in seconds, without a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laconic import collectives
from laconic.collectives.codec import Lossless, Raw
from laconic.collectives.engine import transport
from laconic.errors import CollectiveError, FormatError
from laconic.train.launch.worker import leave
from tests.distributed.processes import is_running, join_ranks, run_ranks, start_ranks, wait_until
from tests.patience import patient


class FlipsBit:
    """Sends messages with one bit wrong, also those inside of notices; the settings in front of these stay."""

    def __init__(self) -> None:
        self.bit = 0
        self._send = transport.Wire.send

    def __call__(self, self_: transport.Wire, peer: int, message: torch.Tensor, tag: int) -> dist.Work:
        start = 0 if tag >= 1 << 30 else 256
        if message.numel() > start:
            message = message.clone()
            bit = self.bit % (8 * (message.numel() - start))
            message[start + bit // 8] ^= 1 << bit % 8
        return self._send(self_, peer, message, tag)


def damaged(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder)
    flips = FlipsBit()
    if rank == 1:
        transport.Wire.send = lambda *arguments: flips(*arguments)  # type: ignore[method-assign]
    # Header, lists of blocks, payload; the last bits. Short enough for a notice, and longer.
    for number, bit in enumerate(
        (*range(0, 8 * 72, 23), *range(8 * 72, 8 * 90, 13), *range(1000, 56_000, 2997), -1, -9)
    ):
        flips.bit = bit
        x = torch.randn((5000, 9000)[number % 2], generator=torch.Generator().manual_seed(0)).bfloat16()
        out, part, rows = x.new_empty(2, x.numel()), torch.empty_like(x), torch.stack((x, x))
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(collectives.all_gather, out, x, codec=Lossless()),
            "reduce_scatter": partial(collectives.reduce_scatter, part, rows, codec=Lossless()),
        }
        for name, call in calls.items():
            if rank == 1:
                call()
                continue
            with pytest.raises(FormatError, match=rf"in {name} of \d+ bfloat16, the message from rank 1: "):
                call()
    dist.barrier()
    leave(0)


def test_flipped_bit_is_reported_where_it_arrives_by_operation_and_rank(tmp_path: Path) -> None:
    run_ranks(damaged, (2, str(tmp_path)), 2)


def out_of_memory(rank: int, world: int, folder: str) -> None:
    """Rank 0 runs out of memory while it decodes what it got; the others have nothing to do with that."""
    join_ranks(rank, world, folder, timeout_seconds=20)
    x = torch.randn(9000).bfloat16()
    decode_into = Lossless.decode_into
    errors = (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    for error in errors:

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        if rank == 0:
            Lossless.decode_into = fail  # type: ignore[method-assign]
            with pytest.raises(type(error), match=str(error)) as caught:
                collectives.all_gather(x.new_empty(world, x.numel()), x, codec=Lossless())
            assert caught.value is error
            Lossless.decode_into = decode_into  # type: ignore[method-assign]
        else:
            collectives.all_gather(x.new_empty(world, x.numel()), x, codec=Lossless())
        dist.barrier()
        out = x.new_empty(world, x.numel())
        collectives.all_gather(out, x, codec=Lossless())  # the group is alive
        assert torch.equal(out[rank], x)
    dist.barrier()
    leave(0)


def test_an_error_of_a_ranks_own_is_no_fault_of_its_peers(tmp_path: Path) -> None:
    run_ranks(out_of_memory, (3, str(tmp_path)), 3)


def survivor(rank: int, world: int, folder: str, fault: str) -> None:
    """The last rank dies or stops in the middle of a loop of all-reduces; the others say so and end."""
    join_ranks(rank, world, folder, timeout_seconds=4 if fault == "stops" else 60)
    x = torch.randn(100_000)
    for step in range(1000):
        if rank == world - 1 and step == 3:
            Path(folder, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
        try:
            codec = Raw() if step % 2 else Lossless()
            collectives.all_reduce(x.clone(), codec=codec, async_op=fault == "dies").wait()
        except CollectiveError as error:
            Path(folder, f"error.{rank}.txt").write_text(str(error))
            return


@pytest.mark.parametrize("fault", ["dies", "stops"])
@pytest.mark.ci
def test_rank_that_dies_or_stops_is_named_in_seconds_and_nobody_hangs(tmp_path: Path, fault: str) -> None:
    processes = start_ranks(survivor, (2, str(tmp_path), fault), 2)
    try:
        wait_until((tmp_path / "pid").exists)
        started = time.monotonic()
        processes[0].join(timeout=patient(40))
        assert processes[0].exitcode is not None, "still running"
        assert time.monotonic() - started < 30
    finally:
        processes[1].kill()
        processes[0].kill()
    message = (tmp_path / "error.0.txt").read_text()
    assert message.startswith("all_reduce of 100000 float32 broke off on rank 0, which waited for rank 1: ")
    assert "ended, stopped" in message


def gone_before(rank: int, world: int, folder: str) -> None:
    """Rank 1 has ended before rank 0 calls: messages to it cannot even be started."""
    join_ranks(rank, world, folder)
    pid, joined = Path(folder) / "pid", Path(folder) / "joined"
    if rank == 1:
        pid.write_text(str(os.getpid()))
        wait_until(joined.exists)  # gloo's connections are made one after the other
        os._exit(0)
    joined.touch()
    wait_until(lambda: pid.exists() and not is_running(int(pid.read_text() or os.getpid())))
    time.sleep(0.2)  # gloo's thread reads that the connection is closed
    x, rows = torch.ones(4096), torch.ones(2, 4096)
    table = [[1, 1], [1, 1]]
    for codec in (Raw(), Lossless(), "auto"):
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(collectives.all_reduce, x.clone(), codec=codec),
            "all_gather": partial(collectives.all_gather, torch.empty_like(rows), x, codec=codec),
            "reduce_scatter": partial(collectives.reduce_scatter, torch.empty_like(x), rows, codec=codec),
            "all_to_all": partial(collectives.all_to_all, torch.empty_like(rows), rows, codec=codec),
            "all_to_all, uneven": partial(
                collectives.all_to_all, torch.empty_like(rows), rows, [1, 1], [1, 1], codec=codec, table=table
            ),
            "broadcast": partial(collectives.broadcast, x, 0, codec=codec),
            "send": partial(collectives.send, x, 1, codec=codec),
            "recv": partial(collectives.recv, x, 1, codec=codec),
        }
        for name, call in calls.items():
            with pytest.raises(CollectiveError) as caught:
                call()
            assert "rank" in str(caught.value), (name, codec)
    leave(0)


def test_a_rank_that_ended_before_a_call_is_named_by_every_collective(tmp_path: Path) -> None:
    run_ranks(gone_before, (2, str(tmp_path)), 2)
