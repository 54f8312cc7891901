"""Coded sums around a ring, in real processes: the documented bits on every rank, and faults that are named."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import collectives
from laconic.collectives import api, audit
from laconic.collectives.engine import call, transport
from laconic.collectives.policy.selector import use_rates
from laconic.cost.comm.rates import RING, Line
from laconic.cost.comm.seconds import AlgorithmChoice
from laconic.errors import CollectiveError, FormatError
from laconic.train.launch.worker import leave
from tests.collectives.simulated import made_up_rates
from tests.distributed.processes import join_ranks, run_ranks, start_ranks, wait_until
from tests.formats.lossless_cases import bits
from tests.patience import patient

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def ring_sum(rows: Tensor, last: int, factor: float) -> Tensor:
    """What docs/collectives.md says of the part of rank `last`, for rows [W, n]."""
    world = len(rows)
    total = rows[(last + 1) % world]
    for hop in range(2, world + 1):
        exact = total.float() + rows[(last + hop) % world].float()
        total = exact.to(rows.dtype)
    return (exact * factor).to(rows.dtype)


def around(num_chunks: int) -> None:
    """From here on all calls go around, in so many chunks, however small they are."""
    api.leaves_raw = lambda *arguments: False  # type: ignore[assignment]
    call.needs_sync = lambda *arguments, **more: False  # type: ignore[assignment]
    choice = AlgorithmChoice("tiered", num_chunks, 1, 0.0, 0.0, "asked for", True)
    call.choose = lambda *arguments, **more: choice  # type: ignore[assignment]


def sums(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder)
    draw = random.Random(1)
    for number in range(60):
        dtype, op = draw.choice(FLOATS), draw.choice(["sum", "avg"])
        numel = draw.choice([1, 2, world - 1, world, 5000, 4096 * world, draw.randint(1, 200_000)])
        around(draw.choice([1, 1, 2, 5]))
        scale = 10.0 ** draw.randint(-3, 3)
        x = (torch.randn(world, numel, generator=torch.Generator().manual_seed(number)) * scale).to(dtype)
        if draw.random() < 0.2:
            x[0, 0] = float("inf")
        factor = 1 / world if op == "avg" else 1.0
        mine = x[rank].clone()
        collectives.all_reduce(mine, op=op, async_op=draw.random() < 0.5).wait()
        everyone = torch.empty(world, mine.nbytes, dtype=torch.uint8)
        dist.all_gather(list(everyone), bits(mine))
        assert all(torch.equal(row, everyone[0]) for row in everyone), "ranks differ"
        # Within the bound of one rounding per hop, and fp32 additions.
        exact = x.double().sum(0) * factor
        unit = torch.finfo(dtype).eps / 2 + 2.0**-23
        bound = ((1 + unit) ** (world + 1) - 1) * x.double().abs().sum(0) * factor + 2 * torch.finfo(dtype).tiny
        finite = exact.isfinite()
        assert ((mine.double() - exact).abs() <= bound)[finite].all(), (dtype, numel)
        rows = x.repeat_interleave(world, 0).view(world, world, numel) * torch.arange(1, world + 1).view(1, -1, 1)
        rows = rows.to(dtype)  # [from, to, n]
        part = torch.empty(numel, dtype=dtype)
        collectives.reduce_scatter(part, rows[rank], op=op)
        expected = ring_sum(rows[:, rank], rank, factor)
        assert torch.equal(bits(part), bits(expected)), f"reduce_scatter {dtype} {numel}"
        if numel >= world:
            assert torch.equal(bits(mine), bits(reference(x, factor, call.choose().num_chunks)))
    # As many bytes as in any other way, less what the codec saves.
    around(2)
    audit.reset()
    x = torch.randn(world << 16).bfloat16()
    collectives.all_reduce(x)
    (entry,) = audit.snapshot().entries
    assert entry.raw_nbytes == 2 * x.nbytes * (world - 1) // world
    assert 1.4 < entry.ratio < 1.52
    damaged(rank, world)
    dist.barrier()
    leave(0)


def reference(x: Tensor, factor: float, num_chunks: int) -> Tensor:
    """x [W, n], cut as the collective cuts it: into chunks, and these into a part per rank."""
    world, numel = x.shape
    part = -(-numel // world)
    chunk_numel = -(-part // num_chunks)
    step = max(1, min(part, -(-chunk_numel // 4096) * 4096)) * world
    found = torch.empty(numel, dtype=x.dtype)
    for start in range(0, numel, step):
        chunk = x[:, start : start + step]
        piece = -(-chunk.shape[1] // world)
        for rank in range(world):
            rows = chunk[:, rank * piece : (rank + 1) * piece]
            found[start + rank * piece : start + rank * piece + rows.shape[1]] = ring_sum(rows, rank, factor)
    return found


def damaged(rank: int, world: int) -> None:
    """Rank 0 sends a wrong bit to the next one, which says so; the others get what they should or break off."""
    send = transport.Wire.send

    def flip(self: transport.Wire, peer: int, message: Tensor, tag: int) -> dist.Work:
        if tag >= 1 << 30 and message.numel() > 1:
            message = message.clone()
            message[message.numel() // 2] ^= 4
        return send(self, peer, message, tag)

    around(1)
    if rank == 0:
        transport.Wire.send = flip  # type: ignore[method-assign]
    group = dist.new_group(timeout=timedelta(seconds=3))
    x, part = torch.randn(world, 30_000), torch.empty(30_000)
    if rank == 1:
        with pytest.raises(FormatError, match=r"in reduce_scatter of \d+ float32, the message from rank 0: "):
            collectives.reduce_scatter(part, x, group)
    else:
        with pytest.raises(CollectiveError, match=r"waited for rank 1: .*; rank 1 ended, stopped, raised"):
            collectives.reduce_scatter(part, x, group)
    transport.Wire.send = send  # type: ignore[method-assign]


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_sums_around_a_ring_have_the_documented_bits_on_every_rank(world: int, tmp_path: Path) -> None:
    run_ranks(sums, (world, str(tmp_path)), world)


def chosen(rank: int, world: int, folder: str) -> None:
    """Where a link carries one stream better than several, all-reduces go around."""
    join_ranks(rank, world, folder)
    rates = made_up_rates(bytes_per_second=12.5e6)
    link = rates.links["across"]
    use_rates(replace(rates, links={"across": replace(link, travels={RING: Line(2e-4, 0.7 / 12.5e6)})}))
    x = torch.randn(world, 1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()
    for async_op in (False, True):
        calls: list[bool] = []
        chunk = call.ring_all_reduce_chunk

        def counted(*arguments: object, chunk: object = chunk, calls: list[bool] = calls) -> object:
            calls.append(True)
            return chunk(*arguments)  # type: ignore[operator]

        call.ring_all_reduce_chunk = counted  # type: ignore[assignment]
        mine = x[rank].clone()
        collectives.all_reduce(mine, async_op=async_op).wait()
        call.ring_all_reduce_chunk = chunk
        assert calls
        everyone = torch.empty(world, mine.nbytes, dtype=torch.uint8)
        dist.all_gather(list(everyone), bits(mine))
        assert all(torch.equal(row, everyone[0]) for row in everyone)
    dist.barrier()
    leave(0)


def test_auto_takes_the_ring_where_that_is_predicted_to_be_faster(tmp_path: Path) -> None:
    run_ranks(chosen, (3, str(tmp_path)), 3)


def survivor(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder)
    around(4)
    x = torch.randn(400_000)
    for step in range(1000):
        if rank == 1 and step == 3:
            Path(folder, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            collectives.all_reduce(x.clone())
        except CollectiveError as error:
            Path(folder, f"error.{rank}.txt").write_text(str(error))
            dist.group.WORLD.get_group_store().set(f"said/{rank}", "")
            if rank == 0:  # which has the store
                for other in range(2, world):
                    dist.group.WORLD.get_group_store().get(f"said/{other}")
            return


@pytest.mark.ci
def test_a_rank_that_dies_amid_a_ring_is_named_by_all(tmp_path: Path) -> None:
    world = 3
    processes = start_ranks(survivor, (world, str(tmp_path)), world)
    try:
        wait_until((tmp_path / "pid").exists, timeout_seconds=300)
        for rank in (0, 2):
            processes[rank].join(timeout=patient(180))
            assert processes[rank].exitcode is not None, "still running"
    finally:
        for process in processes:
            process.kill()
    for rank in (0, 2):
        message = (tmp_path / f"error.{rank}.txt").read_text()
        assert message.startswith(f"all_reduce of 400000 float32 broke off on rank {rank}, which waited for rank ")
        assert "; rank 1 ended, stopped, raised an error" in message, message
