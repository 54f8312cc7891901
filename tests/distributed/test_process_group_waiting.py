"""Callbacks that issue collectives, barriers, and groups that end with work under way wait for what gloo waits for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import Lossless, ProcessGroupOptions, Raw, all_reduce
from laconic.errors import CollectiveError, CollectiveTimeoutError
from laconic.train.launch.worker import leave
from tests.distributed import over_backend
from tests.distributed.over_backend import assert_same, join, values
from tests.distributed.processes import finish, free_port, rank_environment, run_ranks, start, start_ranks
from tests.patience import patient

CODED = ProcessGroupOptions(Lossless(), min_nbytes=1)
SMALL_IS_RAW = ProcessGroupOptions(Lossless(), min_nbytes=5000)
"""Of the model's buckets and of PowerSGD's factors some are coded and some are not."""


def started(x: Tensor) -> torch.futures.Future[list[Tensor]]:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work.get_future()


def chain(length: int, x: Tensor) -> Tensor:
    """Adds up `length` all-reduces, each started and waited for in a callback of the one before."""
    future: torch.futures.Future[Any] = started(x.clone())

    def deeper(left: int, done: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        (total,) = done.value()
        if left == 0:
            return [total]
        inner = started(total / 2).then(partial(deeper, left - 1)).wait()
        return [total + inner[0]]

    (found,) = future.then(partial(deeper, length)).wait()
    return found


def chains_beside_others(num_chains: int) -> list[Tensor]:
    """Chains whose callbacks issue collectives of sizes of their own, while the program issues some, too."""
    totals, beside = [], []
    for number in range(num_chains):
        x = values(torch.float32, 3000 + 10 * number, seed=number)

        def second(done: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
            return started(done.value()[0][:1000] * 2).wait()

        def third(done: torch.futures.Future[list[Tensor]], number: int = number) -> Tensor:
            (part,) = done.value()
            return started(part[: 500 + number]).wait()[0]

        totals.append(started(x).then(second).then(third))
        beside.append(values(torch.float32, 2000 + number, seed=100 + number))
        beside.append(started(beside[-1].clone()).wait()[0])
    return [future.wait() for future in totals] + beside


def raises(message: str) -> Callable[[torch.futures.Future[Any]], Tensor]:
    def callback(done: torch.futures.Future[Any]) -> Tensor:
        done.value()
        raise ValueError(message)

    return callback


def callbacks_that_raise() -> None:
    for wait in (lambda future: future.wait(), lambda future: torch.futures.wait_all([future])):
        with pytest.raises((ValueError, RuntimeError), match="on purpose"):
            wait(started(values()).then(raises("on purpose")))
    # The next callback of the chain sees the error, and the one after it has what that made of it.
    after = started(values()).then(raises("first")).then(lambda done: _message(done)).then(lambda done: done.value())
    assert "first" in after.wait()
    both = torch.futures.collect_all([started(values()), started(values())]).then(lambda done: len(done.value()))
    assert both.wait() == 2
    heard = threading.Event()
    started(values()).add_done_callback(lambda done: heard.set())
    assert heard.wait(patient(30))


def _message(done: torch.futures.Future[Any]) -> str:
    try:
        done.value()
    except Exception as error:
        return str(error)
    return ""


def a_hook_that_fails(wrapped: nn.Module) -> None:
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return started(bucket.buffer()).then(raises("in the hook"))

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    wrapped.register_comm_hook(None, hook)
    with pytest.raises((ValueError, RuntimeError), match="in the hook"):
        wrapped(values(torch.float32, 16 * 64).view(16, 64)).sum().backward()


def in_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own hook, which DDP refuses by its name on a machine without GPUs."""
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


in_bfloat16.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}

HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    kind.name.lower(): partial(lambda kind, model: register_ddp_comm_hook(kind, model, dist.group.WORLD), kind)
    for kind in DDPCommHookType
    if kind.name in ("ALLREDUCE", "FP16_COMPRESS", "NOOP")  # those that quantize fail over gloo
} | {
    "power_sgd": lambda model: model.register_comm_hook(PowerSGDState(None, 2, 2), powerSGD_hook),
    "fp16 power_sgd": lambda model: model.register_comm_hook(
        PowerSGDState(None, 1, 2), default_hooks.fp16_compress_wrapper(powerSGD_hook)
    ),
    "bf16": lambda model: model.register_comm_hook(None, in_bfloat16),
    "post_local_sgd": lambda model: model.register_comm_hook(
        PostLocalSGDState(None, dist.new_subgroups(2)[0], start_localSGD_iter=2), post_localSGD_hook
    ),
    "built-in all-reduce": lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
}


def losses_of_hooks(bucket_mb: float) -> dict[str, list[float]]:
    found = {}
    for name, register in HOOKS.items():
        model = DistributedDataParallel(over_backend.model(), bucket_cap_mb=bucket_mb)
        register(model)
        found[name] = over_backend.losses(model)
    return found


def assert_alike(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Equal to the last bit, but for PowerSGD, whose products differ in it with the places of its factors in memory."""
    hooks, other_hooks = found.pop("hooks"), expected["hooks"]
    assert_same(found, {name: x for name, x in expected.items() if name != "hooks"}, where)
    assert hooks.keys() == other_hooks.keys()
    for name, losses in hooks.items():
        assert losses == (pytest.approx(other_hooks[name], rel=1e-3) if "power" in name else other_hooks[name]), name


def waiting_callbacks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join("gloo", rank, 2, folder, "gloo")
    # In one bucket: gloo runs callbacks in two threads, so that with more buckets their order differs between ranks.
    expected = {"hooks": losses_of_hooks(25), "chain": chain(1, values(torch.float32))}
    dist.destroy_process_group()
    many_buckets: dict[str, Any] = {}
    for name, options in (
        ("coded", CODED),
        ("partly", SMALL_IS_RAW),
        ("raw", ProcessGroupOptions(Raw(), min_nbytes=1)),
    ):
        join("laconic", rank, 2, folder, name, pg_options=options)
        chain(5, values(torch.float32))
        found = {"hooks": losses_of_hooks(25), "chain": chain(1, values(torch.float32))}
        assert_alike(found, expected, name)
        found = {"hooks": losses_of_hooks(0.01), "chains": chains_beside_others(6)}
        many_buckets = many_buckets or dict(found)
        assert_alike(found, many_buckets, f"{name}, many buckets")
        callbacks_that_raise()
        a_hook_that_fails(DistributedDataParallel(over_backend.model()))
        dist.destroy_process_group()
    leave(0)


@pytest.mark.ci
def test_callbacks_may_wait_for_collectives_and_every_hook_of_torch_computes_what_it_does_over_gloo(
    tmp_path: Path,
) -> None:
    run_ranks(waiting_callbacks, (str(tmp_path),), 2)


def starts() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Works of every kind, each with what `wait` is called of and what has the future."""

    def coalesced() -> tuple[Any, Any]:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(values(torch.float32))
            dist.all_reduce(values(torch.float32))
        return manager, manager.works[-1]

    def alone(start: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
        return lambda: 2 * (start(),)

    x, rows, each = values(torch.float32), torch.empty(2 * over_backend.NUMEL), [torch.empty(over_backend.NUMEL)] * 2
    return {
        "all_reduce": alone(lambda: dist.all_reduce(x.clone(), async_op=True)),
        "short": alone(lambda: dist.all_reduce(x[:5].clone(), async_op=True)),
        "integers": alone(lambda: dist.all_reduce(x.long(), async_op=True)),
        "strided": alone(lambda: dist.all_reduce(x.repeat(2)[::2], async_op=True)),
        "strided integers": alone(lambda: dist.all_reduce(x.long().repeat(2)[::2], async_op=True)),
        "broadcast": alone(lambda: dist.broadcast(x.clone(), 1, async_op=True)),
        "all_gather": alone(lambda: dist.all_gather(each, x, async_op=True)),
        "all_gather_single": alone(lambda: over_backend.all_gather_single(rows, x, async_op=True)),
        "all_to_all": alone(lambda: dist.all_to_all_single(torch.empty_like(x), x, async_op=True)),
        "coalesced": coalesced,
    }


def what_was_called_back(polls: bool) -> dict[str, Any]:
    """What callbacks have done by the time that a work is over, those given to its future before and after."""
    found: dict[str, Any] = {}
    for name, begin in starts().items():
        seen: list[Any] = []
        work, owner = begin()
        future = owner.get_future()

        def slowly(done: torch.futures.Future[Any], seen: list[Any] = seen) -> str:
            time.sleep(0.02)
            seen.append(len(done.value()))
            return "second"

        future.then(slowly).then(lambda done, seen=seen: seen.append(done.value()))
        if polls and name != "coalesced":
            while not work.is_completed():
                time.sleep(0.001)
        work.wait()
        assert future.done()
        before = [*seen]
        owner.get_future().then(lambda done, seen=seen: seen.append("third")).then(
            lambda done, seen=seen: seen.append("fourth")
        )
        found[name] = before, seen
    return found | {f"barrier, {x.dtype}": until_the_barrier(x) for x in (values(), torch.ones(3, dtype=torch.int64))}


def until_the_barrier(x: Tensor) -> list[int]:
    """What callbacks of works that nobody waited for have done by then."""
    seen: list[int] = []
    for number in range(3):
        started(x).then(lambda _, number=number: (time.sleep(0.02), seen.append(number)))
    dist.barrier()
    return sorted(seen)


def callbacks_of_what_was_waited_for(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    expected = None
    for name, options in (
        ("gloo", None),
        ("coded", CODED),
        ("partly", ProcessGroupOptions(Lossless(), min_nbytes=1000)),
        ("raw", ProcessGroupOptions(Raw(), min_nbytes=1)),
    ):
        join("gloo" if name == "gloo" else "laconic", rank, 2, folder, name, pg_options=options)
        found = what_was_called_back(False), what_was_called_back(True)
        expected = expected or found
        assert_same(found, expected, name)
        if options is not None:
            x = values(torch.float32)
            for codec in (Lossless(), Raw(), "auto"):
                seen: list[int] = []
                work = all_reduce(x, codec=codec, async_op=True)
                work.get_future().then(lambda _, seen=seen: (time.sleep(0.02), seen.append(1)))
                work.wait()
                assert seen == [1], codec

            itself: Any = dist.all_reduce(x, async_op=True)
            assert itself.get_future().then(lambda _, itself=itself: itself.wait()).wait()
            itself.wait()
        dist.destroy_process_group()
    leave(0)


@pytest.mark.ci
def test_callbacks_have_run_where_their_work_or_a_barrier_was_waited_for(tmp_path: Path) -> None:
    """As over gloo: programs divide a sum in a callback, wait for the work, and use the quotient."""
    run_ranks(callbacks_of_what_was_waited_for, (str(tmp_path),), 2)


def late_callbacks() -> None:
    """A wait with a timeout ends with it while a callback goes on, and the next wait has the callback behind it."""
    for name, begin in starts().items():
        _, work = begin()
        goes_on, seen = threading.Event(), list[bool]()
        work.get_future().then(lambda _, go=goes_on: go.wait(patient(30))).then(
            lambda done, seen=seen: seen.append(done.value())
        )
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"callback of .*not done within 0:00:00\.2\d*; it goes on"):
            work.wait(timedelta(seconds=0.2))
        assert time.monotonic() - began < patient(10), name
        assert not work.is_completed()
        goes_on.set()
        assert work.wait(timedelta(seconds=patient(30)))
        assert seen == [True], name


def long_chain(x: Tensor) -> None:
    work = dist.all_reduce(x.clone(), async_op=True)
    assert work is not None
    future, seen = work.get_future(), list[int]()
    for number in range(2000):
        future = future.then(lambda _, number=number: seen.append(number))
    del future  # callbacks belong to the work, whoever holds their futures
    work.wait()
    assert seen == [*range(2000)]
    assert work.is_completed()


class Value:
    """What a callback returns."""


def values_that_are_let_go(x: Tensor) -> None:
    """A future that is kept holds nothing of the callbacks that it was given, before and after it was waited for."""
    work = dist.all_reduce(x.clone(), async_op=True)
    assert work is not None
    future, made = work.get_future(), list[ref[Value]]()

    def make(_: object) -> Value:
        value = Value()
        made.append(ref(value))
        return value

    for _ in range(5):
        future.then(make)
    work.wait()
    for _ in range(5):
        future.then(make).wait()
        work.get_future().then(make)
    assert len(made) == 15
    until = time.monotonic() + patient(10)  # the thread that ran a callback lets go of it a moment later
    while any(one() for one in made) and time.monotonic() < until:
        time.sleep(0.01)
    assert [one() for one in made] == [None] * 15


def late_long_and_let_go(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for name, options in (("coded", CODED), ("raw", ProcessGroupOptions(Raw(), min_nbytes=1))):
        join("laconic", rank, 2, folder, name, pg_options=options)
        late_callbacks()
        for x in (values(torch.float32), values(torch.float32).long()):
            long_chain(x)
            gc.disable()
            values_that_are_let_go(x)
            gc.enable()
        dist.destroy_process_group()
    leave(0)


@pytest.mark.ci
def test_callbacks_may_be_late_many_and_give_back_much(tmp_path: Path) -> None:
    run_ranks(late_long_and_let_go, (str(tmp_path),), 2)


def begun(number: int, group: dist.ProcessGroup | None = None) -> tuple[list[Tensor], list[dist.Work]]:
    tensors = [values(torch.float32, 20_000, seed=seed) for seed in range(number)]
    return tensors, [dist.all_reduce(x, group=group, async_op=True) for x in tensors]


def num_undone(works: list[dist.Work]) -> int:
    return sum(not work.is_completed() for work in works)


def endings(folder: str, backend: str, options: ProcessGroupOptions | None) -> dict[str, Any]:
    """What of 30 all-reduces each kind of ending has waited for, and what became of them in the end."""
    rank, found = dist.get_rank(), {}

    def again(name: str) -> None:
        join(backend, rank, 2, folder, f"{backend}-{name}", pg_options=options)

    def wait(tensors: list[Tensor], works: list[dist.Work]) -> tuple[list[bool], list[Tensor]]:
        return [work.wait() for work in works], tensors

    tensors, works = begun(30)
    dist.barrier()
    found["barrier"] = num_undone(works), tensors
    tensors, works = begun(30)
    barrier = dist.barrier(async_op=True)
    assert barrier is not None
    later, later_works = begun(3)
    barrier.wait()
    found["asynchronous barrier"] = num_undone(works), wait(later, later_works)

    group = dist.new_group()
    tensors, works = begun(30, group)
    dist.barrier(group=group)
    found["barrier of a subgroup"] = num_undone(works), tensors
    tensors, works = begun(30, group)
    in_world = begun(30)
    dist.destroy_process_group(group)
    found["end of a subgroup"] = wait(tensors, works), wait(*in_world)
    group = dist.new_group()
    found["next subgroup"] = wait(*begun(2, group))

    tensors, works = begun(30)
    in_group = begun(30, group)
    dist.destroy_process_group()
    found["end of all"] = wait(tensors, works), wait(*in_group), num_undone(works)
    again("second")
    tensors, works = begun(30)
    dist.distributed_c10d._abort_process_group()
    found["abort"] = wait(tensors, works)
    again("third")
    found["after that"] = wait(*begun(3))
    # Futures are done with their works, and callbacks that were registered run, whatever ends.
    futures = [work.get_future().then(lambda done: done.value()[0].sum()) for work in begun(5)[1]]
    dist.destroy_process_group()
    found["futures"] = [future.wait() for future in futures]
    again("fourth")
    return found


def what_nobody_waited_for_is_there_after_a_barrier(rank: int) -> None:
    strided = torch.full((50, 2), 3 + rank)[:, 1]
    averaged, both = torch.full((9,), 3 + rank), torch.full((9, 2), 3 + rank)[:, 1]
    dist.all_reduce(strided, async_op=True)
    dist.all_reduce(averaged, dist.ReduceOp.AVG, async_op=True)
    dist.all_reduce(both, dist.ReduceOp.AVG, async_op=True)
    dist.barrier()
    assert [strided.unique().tolist(), averaged.unique().tolist(), both.unique().tolist()] == [[7], [3], [3]]
    group: Any = dist.group.WORLD
    assert not group._unfinished


def work_under_way(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    expected = None
    for backend, options in (("gloo", None), ("laconic", CODED)):
        join(backend, rank, 2, folder, backend, pg_options=options)
        found = endings(folder, backend, options)
        if options is not None:
            what_nobody_waited_for_is_there_after_a_barrier(rank)
        dist.destroy_process_group()
        if expected is not None:
            assert_same(found, expected, "endings")
        expected = found
    assert expected is not None
    assert expected["barrier"][0] == 0
    leave(0)


@pytest.mark.ci
def test_barriers_and_the_end_of_a_group_wait_for_what_they_wait_for_over_gloo(tmp_path: Path) -> None:
    run_ranks(work_under_way, (str(tmp_path),), 2)


def model_after_group(rank: int, folder: str) -> None:
    """A model is let go after its group, while a thread of gloo is about to free the tensors of its last call."""
    torch.set_num_threads(1)
    join("laconic", rank, 2, folder, "laconic")
    model = DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    group: Any = dist.group.WORLD
    calls_back = threading.Event()
    if rank == 1:
        time.sleep(0.1)  # until rank 0 has its callback
    work = group._backend_group.allreduce([torch.ones(3)], dist.AllreduceOptions())

    def hold_up(_: object) -> None:
        calls_back.set()
        time.sleep(0.3)

    work.get_future().add_done_callback(hold_up)
    calls_back.wait()
    del work, group
    dist.destroy_process_group()
    del model  # which waits for that thread, and must not hold Python's lock meanwhile
    leave(0)


def test_a_model_that_outlives_its_group_ends(tmp_path: Path) -> None:
    processes = start_ranks(model_after_group, (str(tmp_path),), 2)
    for process in processes:
        process.join(timeout=patient(20))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]


LEAVING = """
import torch, torch.distributed as dist
from laconic.collectives import Lossless, ProcessGroupOptions
dist.init_process_group("laconic", pg_options=ProcessGroupOptions(Lossless(), min_nbytes=1))
works = [dist.all_reduce(torch.randn(20_000), async_op=True) for _ in range(20)]
future = works[0].get_future().then(lambda done: dist.all_reduce(torch.randn(6000), async_op=True).get_future().wait())
print("done")
"""

ENDING = """
import torch, torch.distributed as dist
from laconic.collectives import Lossless, ProcessGroupOptions
dist.init_process_group("laconic", pg_options=ProcessGroupOptions(Lossless(), min_nbytes=1))
group = dist.new_group()
x = torch.randn(6000)
dist.all_reduce(x)
dist.all_reduce(x, group=group, async_op=True).wait()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [LEAVING, ENDING], ids=["work", "groups"])
def test_a_program_that_leaves_something_behind_ends(program: str) -> None:
    port = free_port()
    processes = [start(["-c", program], rank_environment(rank, 2, port, PYTHONWARNINGS="default")) for rank in range(2)]
    for ending in [finish(process, 120) for process in processes]:
        assert (ending.code, ending.out) == (0, "done\n"), ending.err


def lost(rank: int, folder: str) -> None:
    """Who did not come to a monitored barrier."""
    torch.set_num_threads(1)
    join("laconic", rank, 2, folder, "barrier", pg_options=CODED)
    dist.monitored_barrier()
    dist.barrier()
    if rank == 0:
        for all_ranks in (False, True):
            with pytest.raises(RuntimeError, match=r"[Rr]anks? 1 failed to pass monitoredBarrier|timeout"):
                dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=all_ranks)
        dist.group.WORLD.get_group_store().set("refused", "1")
    else:
        dist.group.WORLD.get_group_store().wait(["refused"], timedelta(seconds=60))
    dist.destroy_process_group()
    leave(0)


def lost_peer(rank: int, folder: str, options: ProcessGroupOptions) -> None:
    torch.set_num_threads(1)
    # A receive from any rank is told of none that ends: it waits for the timeout.
    join("laconic", rank, 2, folder, f"lost-{options.min_nbytes}", 10, pg_options=options)
    dist.barrier()
    if rank == 1:
        leave(0)
    for source in (1, None):
        with pytest.raises(CollectiveError, match=r"recv of 6000 float32 broke off on rank 0, which waited for"):
            dist.recv(values(torch.float32), source)
    with pytest.raises(CollectiveError, match=r"send of 6000 float32 broke off on rank 0, which waited for rank 1"):
        dist.send(values(torch.float32), 1)
    leave(0)


def test_a_rank_that_is_lost_is_named_by_the_monitored_barrier(tmp_path: Path) -> None:
    run_ranks(lost, (str(tmp_path),), 2)


@pytest.mark.parametrize(
    "options",
    [CODED, pytest.param(ProcessGroupOptions(min_nbytes=1 << 30), marks=pytest.mark.slow)],
    ids=["coded", "raw"],
)
@pytest.mark.ci
def test_a_rank_that_is_lost_is_named_by_sends_and_receives(tmp_path: Path, options: ProcessGroupOptions) -> None:
    run_ranks(lost_peer, (str(tmp_path), options), 2)


def lost_before(rank: int, folder: str) -> None:
    """The first coded collective needs connections, which a rank that has gone will never make."""
    torch.set_num_threads(1)
    join("laconic", rank, 3, folder, "before", pg_options=CODED)
    dist.barrier()
    if rank == 2:
        leave(0)
    group = dist.group.WORLD
    started_at = time.monotonic()
    for call in (lambda: dist.all_reduce(values()), lambda: started(values()).wait()):
        with pytest.raises((CollectiveError, RuntimeError), match=r"connecting .* broke off on rank \d.* rank 2: "):
            call()
    assert time.monotonic() - started_at < 30, "of the 60 seconds of the group"
    # The store's file and its threads end with the last rank.
    group.get_group_store().set(f"named/{rank}", "1")
    group.get_group_store().wait([f"named/{1 - rank}"], timedelta(seconds=60))
    leave(0)


@pytest.mark.ci
def test_a_rank_that_is_lost_before_the_first_coded_collective_is_named_at_once(tmp_path: Path) -> None:
    run_ranks(lost_before, (str(tmp_path),), 3)
