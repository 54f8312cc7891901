"""Generated programs of collectives on three real ranks: over laconic they compute what they compute over gloo.

Groups are made as the program goes on, of any ranks in any order; calls are blocking or waited for later, by each rank
in an order of its own. Values are whole numbers, so no order of a sum changes a bit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.process_group.group import ProcessGroupOptions
from laconic.train.launch.worker import leave
from tests.distributed.over_backend import all_gather_single, assert_same, reduce_scatter_single
from tests.distributed.processes import forkserver_context
from tests.patience import patient

WORLD = 3
CODECS: dict[str, Codec] = {"lossless": Lossless(), "raw": Raw()}
DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8")
SIZES = (0, 1, 7, 300, 6000)
ANSWER_SECONDS = 120.0
Call = dict[str, Any]


# --- in a rank ---


class Rank:
    """Does each call over a gloo group and over a laconic group of the same ranks, and compares."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.groups: dict[int, tuple[list[int], Any, Any]] = {}
        self.pending: dict[int, tuple[Any, Any, Any, Any]] = {}
        self.computed: Counter[str] = Counter()

    def end(self) -> None:
        """End all groups: each has threads and connections of its own."""
        for ranks, plain, ours in self.groups.values():
            if self.rank in ranks:
                dist.destroy_process_group(ours)
                dist.destroy_process_group(plain)
        self.groups.clear()
        gc.collect()

    def do(self, call: Call) -> None:
        what = call["what"]
        if what == "group":
            coded = ProcessGroupOptions(CODECS[call["codec"]], min_nbytes=call["min_nbytes"])
            ranks = call["ranks"]
            plain = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=patient(100)))
            ours = dist.new_group(ranks, backend="laconic", pg_options=coded, timeout=timedelta(seconds=patient(100)))
            self.groups[call["number"]] = (ranks, plain, ours)
        elif what == "wait":
            for number in call["orders"][self.rank]:
                if number in self.pending:
                    works, ours, found, expected = self.pending.pop(number)
                    for work in (*works, *ours):
                        work.wait()
                    assert_same(found, expected, str(call))
        elif self.rank in self.groups[call["group"]][0]:
            self.compare(call, *self.groups[call["group"]])

    def compare(self, call: Call, ranks: list[int], plain: Any, ours: Any) -> None:
        wanted = outcome(lambda: CALLS[call["what"]](plain, call))
        got = outcome(lambda: CALLS[call["what"]](ours, call))
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            assert isinstance(wanted, Exception), got
            assert isinstance(got, Exception), wanted
            return
        (expected, works), (found, our_works) = wanted, got
        self.computed[call["what"]] += 1
        if call.get("number") is None:
            for work in (*works, *our_works):
                work.wait()
            assert_same(found, expected, str(call))
        else:
            self.pending[call["number"]] = (works, our_works, found, expected)


def outcome(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:
        return error


def values(group: Any, call: Call, numel: int, salt: int = 0) -> Tensor:
    """Small whole numbers, others on each rank; small enough for any sum or product in any dtype."""
    generator = torch.Generator().manual_seed(100 * call["seed"] + 10 * salt + dist.get_rank(group))
    dtype = getattr(torch, call["dtype"])
    low = 0 if dtype is torch.uint8 else -3
    return torch.randint(low, 4, (numel,), generator=generator).to(dtype)


def later(work: Any) -> list[Any]:
    return [] if work is None else [work]


def all_reduce(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    return x, later(dist.all_reduce(x, getattr(dist.ReduceOp, call["op"]), group=group, async_op=call["later"]))


def all_gather(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    y = x.new_empty(x.numel() * dist.get_world_size(group))
    return [x, y], later(all_gather_single(y, x, group=group, async_op=call["later"]))


def all_gather_list(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    each = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    return each, later(dist.all_gather(each, x, group=group, async_op=call["later"]))


def reduce_scatter(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"] * dist.get_world_size(group))
    y = x.new_empty(call["numel"])
    return y, later(
        reduce_scatter_single(y, x, getattr(dist.ReduceOp, call["op"]), group=group, async_op=call["later"])
    )


def all_to_all(group: Any, call: Call) -> Any:
    """Rank r sends `numel` * (r + 1) elements to each."""
    world, rank, numel = dist.get_world_size(group), dist.get_rank(group), call["numel"]
    x = values(group, call, numel * (rank + 1) * world)
    shares = [numel * (source + 1) for source in range(world)]
    y = x.new_empty(sum(shares))
    splits = [numel * (rank + 1)] * world
    return y, later(dist.all_to_all_single(y, x, shares, splits, group=group, async_op=call["later"]))


def broadcast(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    return x, later(dist.broadcast(x, group_src=call["root"], group=group, async_op=call["later"]))


def reduce(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    work = dist.reduce(x, group_dst=call["root"], group=group, async_op=call["later"])
    return (x if dist.get_rank(group) == call["root"] else None), later(work)  # elsewhere it holds what it holds


def gather(group: Any, call: Call) -> Any:
    x = values(group, call, call["numel"])
    is_root = dist.get_rank(group) == call["root"]
    each = [torch.empty_like(x) for _ in range(dist.get_world_size(group))] if is_root else None
    return each, later(dist.gather(x, each, group_dst=call["root"], group=group, async_op=call["later"]))


def scatter(group: Any, call: Call) -> Any:
    world = dist.get_world_size(group)
    is_root = dist.get_rank(group) == call["root"]
    parts = [values(group, call, call["numel"], salt) for salt in range(world)] if is_root else None
    y = values(group, call, call["numel"])
    return y, later(dist.scatter(y, parts, group_src=call["root"], group=group, async_op=call["later"]))


def tagged(group: Any, call: Call) -> Any:
    """Messages from the root to the next rank, taken in another order by their tags; what is late is later."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    target = (call["root"] + 1) % world
    if world == 1 or rank not in (call["root"], target):
        return [], []
    works, taken = [], []
    for tag in range(3) if rank == call["root"] else call["order"]:
        if rank == call["root"]:
            works.append(
                dist.isend(values(group, call, call["numel"] + tag, tag), group_dst=target, group=group, tag=tag)
            )
        else:
            taken.append(values(group, call, call["numel"] + tag))
            works.append(dist.irecv(taken[-1], group_src=call["root"], group=group, tag=tag))
    return taken, works


def ring(group: Any, call: Call) -> Any:
    """Everyone sends to the next and receives from the one before, in a batch."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    x = values(group, call, call["numel"])
    y = torch.empty_like(x)
    if world == 1:
        return x, []
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world)
    receive = dist.P2POp(dist.irecv, y, group=group, group_peer=(rank - 1) % world)
    return y, dist.batch_isend_irecv([send, receive] if rank % 2 else [receive, send])


def objects(group: Any, call: Call) -> Any:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * call["numel"]}, group=group)
    told = [("from", rank, call["seed"]), list(range(call["numel"] % 50))]
    dist.broadcast_object_list(told, group_src=call["root"], group=group)
    gathered = [None] * world if rank == call["root"] else None
    dist.gather_object((rank, call["seed"]), gathered, group_dst=call["root"], group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [("to", n) for n in range(world)], group_src=call["root"], group=group)
    return [everyone, told, gathered, mine], []


def coalesced(group: Any, call: Call) -> Any:
    a, b = values(group, call, call["numel"]), values(group, call, 7, 1)
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    world = dist.get_world_size(group)
    outs = [x.new_empty(world * x.numel()) for x in (a, b)]
    with dist.distributed_c10d._coalescing_manager(group):
        for out, x in zip(outs, (a, b), strict=True):
            all_gather_single(out, x, group=group)
    return [a, b, outs], []


def barrier(group: Any, call: Call) -> Any:
    return None, later(dist.barrier(group=group, async_op=call["later"]))


CALLS: dict[str, Callable[[Any, Call], Any]] = {
    call.__name__: call
    for call in (
        *(all_reduce, all_gather, all_gather_list, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter),
        *(tagged, ring, objects, coalesced, barrier),
    )
}


def serve(rank: int, folder: str, orders: Connection) -> None:
    """Do what the test says until it says None; answer each with None, or with what went wrong."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    machine = Rank()
    while (call := orders.recv()) is not None:
        if call["what"] == "begin":
            machine.end()
            orders.send(None)
            continue
        if call["what"] == "computed":
            machine.end()
            orders.send((machine.computed, psutil.Process().num_threads()))
            continue
        try:
            machine.do(call)
        except Exception:
            orders.send(traceback.format_exc())
        else:
            orders.send(None)
    dist.barrier()
    leave(0)


# --- in the test ---


class Ranks:
    """Three ranks that do what they are told."""

    def __init__(self, folder: Path) -> None:
        context = forkserver_context()
        pipes = [context.Pipe() for _ in range(WORLD)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve, args=(rank, str(folder), theirs)) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def do(self, call: Call | None) -> None:
        for end in self.ends:
            end.send(call)
        if call is None:
            return
        wrong = {}
        for rank, end in enumerate(self.ends):
            assert end.poll(patient(ANSWER_SECONDS)), f"rank {rank} does not come back from {call}"
            if (answer := end.recv()) is not None:
                wrong[rank] = answer
        assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())

    def computed(self) -> tuple[Counter[str], list[int]]:
        """How often each call was done, over all ranks; and the threads that each has when all groups have ended."""
        for end in self.ends:
            end.send({"what": "computed"})
        found: Counter[str] = Counter()
        num_threads = []
        for end in self.ends:
            counted, threads = end.recv()
            found.update(counted)
            num_threads.append(threads)
        return found, num_threads


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("machine"))
    yield started
    with contextlib.suppress(OSError):
        started.do(None)
    for process in started.processes:
        process.join(patient(30))
        if process.exitcode is None:
            process.kill()
            process.join()


def machine_on(ranks: Ranks) -> type[RuleBasedStateMachine]:
    class Program(RuleBasedStateMachine):
        """`sizes` has the number of ranks of each group, `pending` the calls that are not waited for yet."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []
            self.pending: list[int] = []
            self.numbers = itertools.count()
            ranks.do({"what": "begin"})

        @initialize(codec=st.sampled_from(sorted(CODECS)))
        def begin(self, codec: str) -> None:
            self.make([0, 1, 2], codec, 1)

        def make(self, members: list[int], codec: str, min_nbytes: int) -> None:
            ranks.do(
                {
                    "what": "group",
                    "number": len(self.sizes),
                    "ranks": members,
                    "codec": codec,
                    "min_nbytes": min_nbytes,
                }
            )
            self.sizes.append(len(members))

        @precondition(lambda self: len(self.sizes) < 4)
        @rule(
            members=st.permutations([0, 1, 2]),
            size=st.integers(1, WORLD),
            codec=st.sampled_from(sorted(CODECS)),
            min_nbytes=st.sampled_from((1, 1000)),
        )
        def new_group(self, members: list[int], size: int, codec: str, min_nbytes: int) -> None:
            self.make(sorted(members[:size]), codec, min_nbytes)

        @rule(
            data=st.data(),
            what=st.sampled_from(sorted(CALLS)),
            numel=st.sampled_from(SIZES),
            dtype=st.sampled_from(DTYPES),
            op=st.sampled_from(("SUM", "MAX", "MIN", "PRODUCT", "AVG")),
            seed=st.integers(0, 9),
            order=st.permutations([0, 1, 2]),
            later=st.booleans(),
        )
        def call(
            self,
            data: st.DataObject,
            what: str,
            numel: int,
            dtype: str,
            op: str,
            seed: int,
            order: list[int],
            later: bool,
        ) -> None:
            group = data.draw(st.integers(0, len(self.sizes) - 1), label="group")
            root = data.draw(st.integers(0, self.sizes[group] - 1), label="root")
            if op == "AVG" and (self.sizes[group] == 3 or not dtype.startswith(("float", "bfloat"))):
                op = "SUM"  # a third is rounded, by one after and by the other before the sum
            later = later and what not in ("objects", "coalesced")
            number = next(self.numbers) if later else None
            if number is not None:
                self.pending.append(number)
            ranks.do(
                {
                    "what": what,
                    "group": group,
                    "numel": numel,
                    "dtype": dtype,
                    "op": op,
                    "seed": seed,
                    "root": root,
                    "order": order,
                    "later": later,
                    "number": number,
                }
            )

        @precondition(lambda self: self.pending)
        @rule(data=st.data())
        def wait(self, data: st.DataObject) -> None:
            """Some calls, by each rank in its own order."""
            count = data.draw(st.integers(1, len(self.pending)))
            chosen = self.pending[:count]
            self.pending = self.pending[count:]
            orders = [data.draw(st.permutations(chosen)) for _ in range(WORLD)]
            ranks.do({"what": "wait", "orders": orders})

        def teardown(self) -> None:
            ranks.do({"what": "wait", "orders": [self.pending] * WORLD})

    return Program


@pytest.mark.parametrize("examples", [8, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.ci
def test_a_program_of_collectives_computes_what_it_computes_over_gloo(examples: int, ranks: Ranks) -> None:
    _, before = ranks.computed()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine_on(ranks),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            derandomize=True,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    computed, after = ranks.computed()
    assert computed.keys() == CALLS.keys()  # not only refused by both
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), (before, after)
