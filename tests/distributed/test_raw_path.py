"""Messages that are left raw take the backend's own collectives: its results, its handles, and nothing besides."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import collectives
from laconic.collectives import api, audit
from laconic.collectives.codec import Lossless
from laconic.collectives.engine import transport
from laconic.collectives.policy.selector import prepare, use_rates
from laconic.collectives.process_group.work_handles import PeerWork, RawWork
from laconic.collectives.runtime import background
from laconic.collectives.runtime.background import Work
from laconic.cost.comm.seconds import LOW_RATIO
from laconic.errors import CollectiveError, FormatError
from laconic.train.launch.worker import leave
from tests.collectives.simulated import made_up_rates
from tests.distributed.over_backend import all_gather_single, join, reduce_scatter_single
from tests.distributed.processes import run_ranks, start_ranks, wait_until
from tests.patience import patient

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)
MOVED = (*SUMMED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
NUMELS = (1, 2, 7, 1000, 5000)


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 20
    return x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def native(operation: str, x: Tensor, rank: int, world: int, op: dist.ReduceOp) -> Tensor | None:
    """What gloo computes; types that it does not know are moved as bytes."""
    x = x if x.dtype in SUMMED else bits(x)
    n = x.numel() // world
    if operation == "all_reduce":
        y = x.clone()
        dist.all_reduce(y, op)
    elif operation == "broadcast":
        y = x.clone()
        dist.broadcast(y, world - 1)
    elif operation == "all_gather":
        y = x.new_empty(world * x.numel())
        all_gather_single(y, x)
    elif operation == "reduce_scatter":
        y = x.new_empty(n)
        reduce_scatter_single(y, x, op)
    elif operation == "all_to_all":
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x)
    elif operation == "gather":
        rows = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x, rows, 0)
        return torch.cat(rows) if rows else None
    else:
        y = x.new_empty(n)
        dist.scatter(y, list(x.chunk(world)) if rank == 0 else None, 0)
    return y


def ours(operation: str, x: Tensor, rank: int, world: int, op: str, async_op: bool) -> tuple[Work, Tensor | None]:
    n = x.numel() // world
    if operation == "all_reduce":
        y = x.clone()
        return collectives.all_reduce(y, op=op, async_op=async_op), y
    if operation == "broadcast":
        y = x.clone()
        return collectives.broadcast(y, world - 1, async_op=async_op), y
    if operation == "all_gather":
        y = x.new_empty(world, x.numel())
        return collectives.all_gather(y, x, async_op=async_op), y
    if operation == "reduce_scatter":
        y = x.new_empty(n)
        return collectives.reduce_scatter(y, x.view(world, n), op=op, async_op=async_op), y
    if operation == "all_to_all":
        y = torch.empty_like(x)
        return collectives.all_to_all(y, x, async_op=async_op), y
    if operation == "gather":
        rows = x.new_empty(world * x.numel()) if rank == 0 else None
        return collectives.gather(rows, x, 0, async_op=async_op), rows
    y = x.new_empty(n)
    return collectives.scatter(y, x if rank == 0 else None, 0, async_op=async_op), y


MOVES = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
SUMS = ("all_reduce", "reduce_scatter")


def without_notices() -> None:
    """From here on no message of ours may be announced, and no thread of ours be started."""

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a call that is left raw was announced")

    transport.Wire.__init__ = refuse  # type: ignore[assignment,method-assign]
    background._ThreadExecutor.__init__ = refuse  # type: ignore[assignment,method-assign]


def through_the_functions(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    join("gloo", rank, world, folder, "gloo")
    without_notices()
    audit.reset()
    cases = [(operation, dtype, "sum") for operation in MOVES for dtype in MOVED]
    cases += [(operation, dtype, "sum") for operation in SUMS for dtype in SUMMED]
    cases += [(operation, dtype, "avg") for operation in SUMS for dtype in SUMMED[:3]]
    num_calls = 0
    for operation, dtype, op in cases:
        for numel in NUMELS:
            whole = operation in ("all_to_all", "scatter", "reduce_scatter")
            x = values(numel * (world if whole else 1), dtype, 10 * numel + rank)
            expected = native(operation, x, rank, world, dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM)
            for async_op in (False, True):
                work, found = ours(operation, x, rank, world, op, async_op)
                assert work.wait() is found
                assert work.is_completed()
                where = f"{operation} {dtype} {numel} {op}"
                assert (found is None) == (expected is None), where
                assert found is None or torch.equal(bits(found), bits(expected)), where
                num_calls += 1
    work, found = ours("all_reduce", values(10, torch.float32, rank), rank, world, "sum", True)
    assert work.get_future().wait() is found
    entries = audit.snapshot().entries
    assert sum(entry.num_calls for entry in entries) == num_calls + 1
    assert {entry.codec for entry in entries} == {"raw"}
    (sums,) = (e for e in entries if (e.operation, e.dtype) == ("all_reduce", "bfloat16"))
    # Twice for each op, rounded once per call.
    assert sums.sent_nbytes == 4 * sum(round(2 * 2 * n * (world - 1) / world) for n in NUMELS)
    if rank < 2:
        sends_meet(rank)
    refusals(rank, world)
    dist.barrier()
    leave(0)


def sends_meet(rank: int) -> None:
    """Both first send, waiting later, and messages of one kind keep their order."""
    other = 1 - rank
    sent = [values(1000, torch.bfloat16, seed + rank) for seed in range(6)]
    got = [torch.empty_like(x) for x in sent]
    works = [collectives.send(x, other, async_op=True) for x in sent]
    works += [collectives.recv(x, other, async_op=True) for x in got]
    for work in reversed(works):
        work.wait()
    for seed, x in enumerate(got):
        assert torch.equal(x, values(1000, torch.bfloat16, seed + other))


def refusals(rank: int, world: int) -> None:
    """Arguments that mean nothing are refused before anything is sent."""
    x = torch.zeros(4 * world)
    for call in (
        lambda: collectives.all_gather(x[:3], x),
        lambda: collectives.all_reduce(torch.zeros(4, 4).t()[1:]),
        lambda: collectives.all_to_all(x, x[: 4 * world - 1]),
    ):
        with pytest.raises(FormatError):
            call()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_functions_give_what_the_backend_gives_and_announce_nothing(world: int, tmp_path: Path) -> None:
    run_ranks(through_the_functions, (world, str(tmp_path)), world)


def through_the_group(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    use_rates(made_up_rates(bytes_per_second=12.5e6))  # large messages would be coded
    join("laconic", rank, world, folder, "laconic")
    plain = dist.new_group(backend="gloo")
    gloos = type(dist.all_reduce(torch.zeros(3), group=plain, async_op=True))
    blocking = dist.AllreduceOptions()
    blocking.asyncOp = False
    threads = threading.active_count()
    audit.reset()
    x, rows = torch.randn(100).bfloat16(), torch.randn(100 * world).bfloat16()
    calls: dict[str, Callable[[], dist.Work | None]] = {
        "all_reduce": lambda: dist.all_reduce(x.clone(), async_op=True),
        "broadcast": lambda: dist.broadcast(x, 0, async_op=True),
        "all_gather": lambda: all_gather_single(rows.clone(), x, async_op=True),
        "reduce_scatter": lambda: reduce_scatter_single(x.clone(), rows, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(rows.clone(), rows, async_op=True),
        "gather": lambda: dist.gather(x, list(rows.clone().chunk(world)) if rank == 0 else None, async_op=True),
        "scatter": lambda: dist.scatter(x.clone(), list(rows.chunk(world)) if rank == 0 else None, async_op=True),
        "send": lambda: dist.isend(x, (rank + 1) % world),
        "recv": lambda: dist.irecv(x.clone(), (rank - 1) % world),
    }
    for _ in range(3):
        works = [call() for call in calls.values()]
        for name, work in zip(calls, works, strict=True):
            assert isinstance(work, PeerWork if name in ("send", "recv") else RawWork), name
            work.wait()
    assert type(dist.group.WORLD.allreduce([x.clone()], blocking)) is gloos
    entries = {entry.operation: entry for entry in audit.snapshot().entries}
    assert {name: entry.num_calls for name, entry in entries.items()} == {
        name: 3 + (name == "all_reduce") for name in calls if name != "recv"
    }
    assert entries["all_gather"].sent_nbytes == 3 * 200 * (world - 1)
    assert threading.active_count() == threads
    # Other sizes, reductions and layouts of what is known are decided for themselves.
    audit.reset()
    large = torch.full((1 << 20,), float(rank + 1))
    dist.all_reduce(large)
    assert torch.equal(large, torch.full((1 << 20,), sum(range(1, world + 1)) * 1.0))
    y = torch.full((100,), float(rank))
    dist.all_reduce(y, dist.ReduceOp.MAX)
    assert y[0] == world - 1
    by_codec = {(entry.operation, entry.codec): entry.num_calls for entry in audit.snapshot().entries}
    assert by_codec == {("all_reduce", "tiered"): 1, ("all_reduce", "raw"): 1}
    dist.barrier()
    leave(0)


def functions_over_the_group(rank: int, world: int, folder: str) -> None:
    """The functions take a laconic group for what is inside of it: one lane, one set of rates, in any mixture."""
    torch.set_num_threads(1)
    use_rates(made_up_rates(bytes_per_second=12.5e6))
    join("laconic", rank, world, folder, "laconic")
    x = torch.randn(world, 100_000, generator=torch.Generator().manual_seed(0))
    total = x.sum(0)
    for number in range(8):
        out, mine, other = torch.empty_like(x), x[rank].clone(), x[rank].clone()
        works = [collectives.all_gather(out, x[rank], async_op=bool(number % 2))]
        works.append(dist.all_reduce(mine, async_op=True))
        works.append(collectives.all_reduce(other, async_op=number % 3 == 0))
        small = torch.ones(3)
        dist.all_reduce(small)
        for work in works:
            work.wait()
        assert torch.equal(out, x)
        assert torch.allclose(mine, total, atol=1e-4)
        assert torch.allclose(other, total, atol=1e-4)
    for number in range(2):
        small = torch.ones(3)
        collectives.all_reduce(small)
        assert small[0] == world
        if number == 0:
            api.check_tensors = lambda codec, **tensors: pytest.fail("the call is known")
    dist.barrier()
    leave(0)


def known_calls(rank: int, world: int, folder: str) -> None:
    """What has been left raw before is looked up: arguments that were wrong then are wrong still, in any group."""
    torch.set_num_threads(1)
    join("gloo", rank, world, folder, "known")
    x, part, whole = torch.ones(6), torch.empty(3), torch.empty(6 * world)
    turned = torch.ones(2, 3).T
    wrong: list[tuple[Any, ...]] = [
        (collectives.all_reduce, turned),
        (collectives.all_gather, whole[1:], x),
        (collectives.all_gather, whole.bfloat16(), x),
        (collectives.reduce_scatter, torch.empty(4), x),
        (collectives.reduce_scatter, torch.empty(3, 2)[:, 0], x),
        (collectives.all_to_all, x.bfloat16(), x),
        (collectives.all_to_all, torch.empty(5), x),
        (collectives.gather, whole if rank else None, x, 0),
        (collectives.scatter, part, None if rank == 0 else x, 0),
        (collectives.broadcast, turned, 0),
        (collectives.send, turned, 1 - rank),
    ]
    for number in range(6):
        # A group that is gone leaves its address to a later one, with other members' places.
        ranks = [0, 1] if number % 2 else [1, 0]
        group = dist.new_group(ranks) if number else None
        place = dist.get_group_rank(group, rank) if group is not None else rank
        for _ in range(3):
            y = torch.full((6,), float(rank))
            collectives.all_reduce(y, group)
            assert y.tolist() == [1.0] * 6
            collectives.all_gather(whole, torch.full((6,), float(rank)), group)
            assert whole[6 * place] == rank
            collectives.reduce_scatter(part, x, group)
            assert part.tolist() == [2.0] * 3
            collectives.all_to_all(torch.empty(6), x, group=group)
            for src in range(world):
                y = torch.full((6,), float(rank))
                collectives.broadcast(y, src, group)
                assert y.tolist() == [float(src)] * 6
                collectives.gather(whole if rank == src else None, y, src, group)
                collectives.scatter(part, x if rank == src else None, src, group)
            (collectives.send if rank else collectives.recv)(y, 1 - rank, group)
        for call, *arguments in wrong:
            with pytest.raises(FormatError):
                call(*arguments, group=group)
        if group is not None:
            gone = weakref.ref(group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            assert gone() is None, "what is known of a group keeps it alive"
    leave(0)


def test_calls_that_are_known_are_checked_as_at_first(tmp_path: Path) -> None:
    run_ranks(known_calls, (2, str(tmp_path)), 2)


def refused_calls(rank: int, world: int, folder: str) -> None:
    """Once data has been seen not to shrink, calls go to the backend at once, until one is coded to look again."""
    torch.set_num_threads(1)
    use_rates(made_up_rates(bytes_per_second=12.5e6))
    join("gloo", rank, world, folder, "refused")
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 15,), dtype=torch.int32).view(torch.float32)
    whole, num_planned = x.new_empty(world * x.numel()), 0

    class Counted(api.CollectiveCall):
        def __post_init__(self) -> None:
            nonlocal num_planned
            num_planned += 1
            super().__post_init__()

    api.CollectiveCall = Counted  # type: ignore[misc]
    audit.reset()
    for number in range(80):
        collectives.all_gather(whole, x)
        assert torch.equal(bits(whole[rank * x.numel() :][: x.numel()]), bits(x)), number
    (raw,) = (entry for entry in audit.snapshot().entries if entry.codec == "raw")
    assert raw.reasons == {LOW_RATIO: raw.num_calls}
    num_coded = 80 - raw.num_calls
    assert 2 <= num_coded <= 10, num_coded
    assert num_planned <= num_coded + 4, num_planned  # the first that are refused, and no others
    # Whatever a call that is coded takes, one that is refused takes, too.
    with torch.inference_mode():
        made_there = torch.empty_like(whole)
    collectives.all_gather(made_there, x)
    collectives.all_gather(whole, x.clone().requires_grad_())
    assert torch.equal(bits(made_there), bits(whole))
    # In the background they are chosen for by what the executor's own group has learnt.
    before = num_planned
    collectives.all_gather(whole, x, async_op=True).wait()
    assert num_planned == before + 1
    dist.barrier()
    leave(0)


def test_calls_whose_data_does_not_shrink_go_to_the_backend_at_once(tmp_path: Path) -> None:
    run_ranks(refused_calls, (2, str(tmp_path)), 2)


def test_functions_and_calls_of_a_process_group_mix(tmp_path: Path) -> None:
    run_ranks(functions_over_the_group, (2, str(tmp_path)), 2)


def test_a_process_group_hands_raw_calls_on_and_their_handles_back(tmp_path: Path) -> None:
    run_ranks(through_the_group, (2, str(tmp_path)), 2)


def groups_share(rank: int, world: int, folder: str) -> None:
    """What one group of this process has measured, others of its kind need not."""
    from laconic.collectives.policy import selector as choosing

    torch.set_num_threads(1)
    join("gloo", rank, world, folder, "gloo")
    num_measured = 0
    measure_link, measure_codecs = choosing.brief_link, choosing.brief_codecs

    def count(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            nonlocal num_measured
            num_measured += 1
            return function(*arguments)

        return counted

    choosing.brief_link, choosing.brief_codecs = count(measure_link), count(measure_codecs)  # type: ignore[assignment]
    for number in range(4):
        group = dist.new_group(backend="laconic:gloo") if number % 2 else dist.new_group()
        if not number % 2:
            prepare(group)
        # A link and three codecs at once; the first group of a program pays for all.
        assert num_measured == 2, number
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        prepare(pair)
        assert num_measured == 2
        first = choosing._prepared[pair]["cpu"][1]
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, first.digest, group=pair)
        assert everyone[0] == everyone[1]
    dist.barrier()
    leave(0)


def test_rates_are_measured_once_per_process(tmp_path: Path) -> None:
    run_ranks(groups_share, (3, str(tmp_path)), 3)


def survivor(rank: int, world: int, folder: str, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=4 if fault == "stops" else 60),
    )
    x = torch.randn(1000)
    for step in range(1000):
        if rank == world - 1 and step == 3:
            Path(folder, "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
        try:
            collectives.all_reduce(x.clone(), async_op=bool(step % 2)).wait()
        except CollectiveError as error:
            Path(folder, f"error.{rank}.txt").write_text(str(error))
            time.sleep(5)  # rank 0 has the store
            return


@pytest.mark.parametrize(
    ("fault", "world"),
    [("dies", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("stops", 2), ("dies", 3)))],
)
@pytest.mark.ci
def test_a_rank_that_is_lost_amid_raw_calls_is_named(tmp_path: Path, fault: str, world: int) -> None:
    processes = start_ranks(survivor, (world, str(tmp_path), fault), world)
    try:
        wait_until((tmp_path / "pid").exists, timeout_seconds=300)
        for process in processes[:-1]:
            process.join(timeout=patient(180))
            assert process.exitcode is not None, "still running"
    finally:
        for process in processes:
            process.kill()
    for rank in range(world - 1):
        message = (tmp_path / f"error.{rank}.txt").read_text()
        assert message.startswith(f"all_reduce broke off on rank {rank}: ")
        assert f"; rank {world - 1} ended, stopped, raised an error" in message, message


def frames_to_the_backend(call: Callable[[], object]) -> int:
    """Python frames between `call`, which is not counted, and the first thing that this rank sends."""
    names = {"send", "allreduce", "all_gather_single", "_allgather_base", "broadcast", "alltoall_base"}
    names |= {"all_to_all_single", "reduce_scatter_single", "_reduce_scatter_base"}
    here, depths = sys._getframe(), []

    def profile(frame: FrameType | None, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in names:
            depths.append(0)
            while frame is not None and frame is not here:
                depths[-1] += 1
                frame = frame.f_back

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return depths[0] - 1


def depths(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    use_rates(made_up_rates(bytes_per_second=12.5e6))
    join("laconic", rank, world, folder, "depth")
    plain = dist.new_group(backend="gloo")
    short, many = torch.ones(16), torch.ones(16 * world)
    x, whole = torch.randn(1 << 16).bfloat16(), torch.empty(world << 16).bfloat16()
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 15,), dtype=torch.int32).view(torch.float32)
    randoms = random.new_empty(world * random.numel())
    coded = Lossless()
    raw: list[Callable[[], object]] = [
        lambda: collectives.all_reduce(short, plain),
        lambda: collectives.all_gather(many, short, plain),
        lambda: collectives.all_gather(many, short),
        lambda: collectives.reduce_scatter(short, many, plain, async_op=True).wait(),
        lambda: collectives.all_to_all(torch.empty_like(many), many, group=plain),
        lambda: collectives.broadcast(short, 0, plain),
        lambda: all_gather_single(many, short),
        lambda: dist.all_reduce(short),
        lambda: collectives.all_gather(randoms, random, plain),  # refused by what was learnt
    ]
    shortened: list[Callable[[], object]] = [
        lambda: collectives.all_gather(whole, x, plain, codec=coded),
        lambda: collectives.all_reduce(x, plain, codec=coded),
        lambda: collectives.reduce_scatter(x, whole, plain, codec=coded),
        lambda: collectives.all_to_all(torch.empty_like(whole), whole, group=plain, codec=coded),
        lambda: collectives.broadcast(x, 0, plain, codec=coded),
    ]
    for calls, most in ((raw, 6), (shortened, 10)):
        for number, call in enumerate(calls):
            for _ in range(6):
                call()
            dist.barrier()
            found = frames_to_the_backend(call)
            assert found <= most, (most, number, found)
            dist.barrier()
    leave(0)


def test_few_frames_lie_between_a_call_and_the_backend(tmp_path: Path) -> None:
    run_ranks(depths, (2, str(tmp_path)), 2)
