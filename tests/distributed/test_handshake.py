"""The settings handshake in real processes: what it costs, and that no disagreement hangs or goes unseen.

Over gloo, and over a backend with NCCL's rules (in_order.py).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from laconic import collectives
from laconic.collectives.codec import Blockwise, Codec, Lossless, Raw
from laconic.collectives.engine import device_handshake
from laconic.collectives.engine.device_handshake import DeviceHandshake
from laconic.collectives.engine.handshake import Announcement
from laconic.collectives.runtime import torch_compat
from laconic.errors import ConfigError, LaconicError
from laconic.formats import BlockFormat
from laconic.gradients import all_reduce_q8
from laconic.train.launch.worker import leave
from tests.distributed.in_order import InOrder, is_used_on_cpu
from tests.distributed.processes import run_ranks, wait_until

BACKENDS = ["gloo", "in_order"]
INT8 = Blockwise(BlockFormat("int8", 128, torch.float32))
OPS = ["sum", "avg"]
TIMEOUT_SECONDS = 20.0

T = TypeVar("T")


def groups(backend: str, rank: int, world: int, folder: str, number: int) -> list[dist.ProcessGroup]:
    """Groups of all ranks, one for each program, because one whose ranks disagree may end."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    return [dist.new_group(backend=backend, timeout=timeout) for _ in range(number)]


def path_of(backend: str) -> AbstractContextManager[None]:
    return is_used_on_cpu() if backend == "in_order" else nullcontext()


# --- what it costs ---


def uneven(rank: int, world: int, folder: str, backend: str) -> None:
    (group,) = groups(backend, rank, world, folder, 1)
    gathered, reads = [0], [0]
    all_gather, read = torch_compat.all_gather, DeviceHandshake.read

    def count_gathered(*arguments: object) -> object:
        gathered[0] += 1
        return all_gather(*arguments)  # type: ignore[arg-type]

    def count_reads(self: DeviceHandshake) -> dict[int, bytes]:
        reads[0] += 1
        return read(self)

    generator = torch.Generator().manual_seed(0)
    with (
        path_of(backend),
        mock.patch.object(torch_compat, "all_gather", count_gathered),
        mock.patch.object(DeviceHandshake, "read", count_reads),
        mock.patch.object(DeviceHandshake, "are_here", False),
        mock.patch.object(device_handshake, "_compare_those_here"),
    ):
        for step in range(50):
            table = torch.randint(0, 200, (world, world), generator=generator)
            sent, expected = table[rank].tolist(), table[:, rank].tolist()
            x = torch.arange(2 * sum(sent)).view(-1, 2) + 1000.0 * rank
            out = torch.empty(sum(expected), 2)
            known = table.tolist() if step % 2 or backend == "in_order" else None
            codec = Lossless(capacity_bits=40.0)
            collectives.all_to_all(out, x, expected, sent, group, codec=codec, table=known)
            starts = [2 * int(table[peer, :rank].sum()) + 1000 * peer for peer in range(world)]
            right = [torch.arange(n * 2).view(-1, 2) + s for n, s in zip(expected, starts, strict=True)]
            assert torch.equal(out, torch.cat(right).float())
    assert gathered[0] == 0
    if backend == "in_order":
        carrier = group if isinstance(group, InOrder) else group._get_backend(torch.device("cpu"))
        assert carrier.num_calls["all_gather"] == 0
        assert reads[0] == 1  # by the first call; with 49 others the host does not wait
        assert len(device_handshake._known[group]) == 1
        assert len(device_handshake._pending) <= 50
        device_handshake.poll(group)
        assert not device_handshake._pending
    dist.barrier()
    leave(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_exchanges_of_new_sizes_gather_nothing_and_remember_one_kind_of_call(
    tmp_path: Path, backend: str
) -> None:
    run_ranks(uneven, (2, str(tmp_path), backend), 2)


def many_kinds(rank: int, world: int, folder: str) -> None:
    (group,) = groups("in_order", rank, world, folder, 1)
    x = torch.ones(4)
    with (
        path_of("in_order"),
        mock.patch.object(DeviceHandshake, "are_here", False),
        mock.patch.object(device_handshake, "_MAX_KINDS", 8),
        mock.patch.object(device_handshake, "_MAX_PENDING", 8),
    ):
        for number in range(20):
            collectives.all_gather(torch.empty(8), x, group, codec=Lossless(capacity_bits=40 + number))
            assert 0 < len(device_handshake._known[group]) <= 8
        for _ in range(20):
            collectives.all_gather(torch.empty(8), x, group, codec=Raw())
            assert len(device_handshake._pending) <= 9
    dist.barrier()
    leave(0)


def test_what_is_remembered_and_what_is_not_read_yet_is_bounded(tmp_path: Path) -> None:
    run_ranks(many_kinds, (2, str(tmp_path)), 2)


def test_a_broken_device_leaves_nothing_to_compare_and_the_thread_alive() -> None:
    class Broken:
        @property
        def are_here(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Group:
        pass

    group, announcement = Group(), Announcement({"function": "all_reduce"})
    for _ in range(2):
        device_handshake.watch(group, Broken(), announcement, [0, 1])  # type: ignore[arg-type]
        wait_until(lambda: not device_handshake._pending, 10)
    assert device_handshake._thread is not None
    assert device_handshake._thread.is_alive()


@pytest.mark.parametrize("line", [b"", b"\xff" * 300, b"[1, 2]", b'"function"', b"1e5"])
def test_what_is_no_announcement_is_a_disagreement(line: bytes) -> None:
    mine = Announcement({"function": "all_reduce", "numel": 3})
    fronts = {0: mine.pack(), 1: line.ljust(len(mine.pack()))}
    with pytest.raises(
        ConfigError, match="function is 'all_reduce' on rank 4 and 'a message of another call' on rank 5"
    ):
        mine.check(fronts, [4, 5])


# --- programs in which a rank does something else ---


class Step(NamedTuple):
    """A call that all ranks make; `change` is what one of them does instead."""

    kind: str
    numel: int
    codec: Codec
    op: str = "sum"
    seed: int = 0


def run(step: Step, group: dist.ProcessGroup) -> Callable[[], bool]:
    """Make the call; return whether the result is right."""
    rank, world, n = group.rank(), group.size(), step.numel
    everyones = [
        torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(r + step.seed)) for r in range(world)
    ]
    x = everyones[rank].float()
    total = torch.stack(everyones).float().sum(0) * (1 / world if step.op == "avg" else 1)
    atol = 0.0 if step.codec.lossless else 1.5  # 4 bits of 8
    if step.kind == "all_reduce":
        collectives.all_reduce(x, group, op=step.op, codec=step.codec)  # type: ignore[arg-type]
        return lambda: torch.allclose(x, total, atol=atol)
    if step.kind == "all_reduce_q8":
        all_reduce_q8(x, group, op=step.op, min_nbytes=0)  # type: ignore[call-overload]
        return lambda: torch.allclose(x, total, atol=1.0)
    if step.kind == "all_gather":
        out = torch.empty(world, n)
        collectives.all_gather(out, x, group, codec=step.codec)
        return lambda: torch.allclose(out, torch.stack(everyones).float(), atol=atol)
    if step.kind == "broadcast":
        collectives.broadcast(x, step.seed % world, group, codec=step.codec)
        return lambda: torch.allclose(x, everyones[step.seed % world].float(), atol=atol)
    table = [[(step.seed + 3 * source + 5 * target) % (n + 1) for target in range(world)] for source in range(world)]
    return exchange(table, group, step.codec, told=step.kind == "all_to_all with a table")


def exchange(table: Sequence[Sequence[int]], group: dist.ProcessGroup, codec: Codec, told: bool) -> Callable[[], bool]:
    rank = group.rank()
    expected = [row[rank] for row in table]
    x, out = torch.full((sum(table[rank]),), float(rank)), torch.empty(sum(expected))
    known = table if told else None
    collectives.all_to_all(out, x, expected, list(table[rank]), group, codec=codec, table=known)
    right = torch.repeat_interleave(torch.arange(len(expected)).float(), torch.tensor(expected))
    return lambda: torch.allclose(out, right, atol=0.0 if codec.lossless else 1.0)


A = Step("all_reduce", 300, Lossless())
B = Step("all_reduce", 300, Lossless("window"))
OTHER_NUMEL = A._replace(numel=301)
FIXED = Step("all_reduce", 4000, INT8)
LONGER = FIXED._replace(numel=4400)
AVERAGE = FIXED._replace(op="avg")
INT4, NF4 = (
    Step("all_gather", 4000, Blockwise(BlockFormat(code, 128, torch.float32)))  # messages of one length
    for code in ("int4", "nf4")
)
SCATTERED = Step("all_to_all", 70, Raw(), seed=1)
TOLD = Step("all_to_all with a table", 70, INT8, seed=1)
Q8 = Step("all_reduce_q8", 1000, Raw())

PROGRAMS: dict[str, tuple[list[Step], list[Step], str]] = {
    # What every rank but the last does, what the last does, and the field by which they differ.
    "new on one": ([A, A, A], [A, A, B], "codec is"),
    "back to what all know": ([A, B, A], [A, B, B], "codec is"),
    "one goes back, one goes on": ([A, B, A], [A, B, OTHER_NUMEL], "numel is"),
    "another operation": ([A, A, Q8], [A, A, A], "function is"),
    "known lengths, others": ([FIXED, FIXED, FIXED], [FIXED, FIXED, LONGER], "numel is"),
    "known lengths, the same": ([FIXED, AVERAGE, FIXED], [FIXED, AVERAGE, AVERAGE], "factor is"),
    "known lengths, another code": ([INT4, NF4, INT4], [INT4, NF4, NF4], "codec is"),
    "from the first call on": ([FIXED], [AVERAGE], "factor is"),
    "sizes": ([SCATTERED, SCATTERED], [SCATTERED, SCATTERED._replace(seed=2)], "sends .* elements to rank"),
    "sizes of a table": ([TOLD, TOLD], [TOLD, TOLD._replace(seed=2)], "sends .* elements to rank|splits is"),
    "8 bits": ([Q8, Q8], [Q8, Q8._replace(numel=1100)], "numel is"),
}


def carry_out(program: Sequence[Step], group: dist.ProcessGroup) -> tuple[int, str]:
    """The number of calls that were right before one raised, and what it raised."""
    number = 0
    try:
        for step in program:
            is_right = run(step, group)
            number += 1
            assert is_right(), (number, step)
        run(program[0], group)  # what is noticed late is noticed here
    except LaconicError as error:
        return number, f"{type(error).__name__}: {error}"
    except AssertionError:
        # Values that a disagreeing rank has sent; the group says so as soon as it can.
        time.sleep(0.3)
        try:
            run(program[0], group)
        except ConfigError as error:
            return number - 1, f"{type(error).__name__}: {error}"
        raise
    return number, "nothing"


def disagreeing(rank: int, world: int, folder: str, backend: str, arrives_late: bool) -> None:
    everyones = groups(backend, rank, world, folder, len(PROGRAMS))
    started = time.monotonic()
    late = mock.patch.object(DeviceHandshake, "are_here", _Late()) if arrives_late else nullcontext()
    with path_of(backend), late:
        for group, (name, (most, last, field)) in zip(everyones, PROGRAMS.items(), strict=True):
            number, error = carry_out(last if rank == world - 1 else most, group)
            dist.barrier()
            assert error.startswith("ConfigError: "), (name, rank, error)
            assert re.search(field, error), (name, rank, error)
            assert f"rank {world - 1}" in error, (name, rank, error)
            assert number in (len(most) - 1, len(most)), (name, rank, number, error)
            goes_on = backend == "gloo" or len(most) == 1  # nobody knew the settings: all have waited
            assert ("no result was written" if goes_on else "the group was ended") in error, (name, rank, error)
            if not goes_on:
                with pytest.raises(ConfigError, match=field):
                    run(A, group)
            if goes_on:
                assert number == len(most) - 1
                assert run(A, group)()
    assert time.monotonic() - started < TIMEOUT_SECONDS
    dist.barrier()
    leave(0)


class _Late:
    """Announcements are there 0.1 s after they are asked for: values have met by then."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[float, object]] = {}

    def __get__(self, handshake: DeviceHandshake, owner: type) -> bool:
        since, _ = self._asked.setdefault(id(handshake), (time.monotonic(), handshake))
        return time.monotonic() - since > 0.1


@pytest.mark.parametrize(
    ("backend", "arrives_late"), [("gloo", False), ("in_order", False), ("in_order", True)], ids=str
)
def test_a_rank_that_does_something_else_is_an_error_on_every_rank_that_names_it(
    tmp_path: Path, backend: str, arrives_late: bool
) -> None:
    run_ranks(disagreeing, (2, str(tmp_path), backend, arrives_late), 2)


# --- generated programs ---

KINDS = ["all_reduce", "all_reduce_q8", "all_gather", "broadcast", "all_to_all", "all_to_all with a table"]
CODECS = [Lossless(), Lossless("window"), Lossless(capacity_bits=20.0), INT8, Raw()]
SIZES = [1, 40, 300, 4000, 20_000]

Change = tuple[str, Callable[[random.Random, Step], Step]]

CHANGES: dict[str, Change] = {
    "numel": ("numel is", lambda chance, step: step._replace(numel=step.numel + chance.randint(1, 50))),
    "codec": ("codec is", lambda chance, step: step._replace(codec=other(chance, CODECS[:4], step.codec))),
    "op": ("factor is|op is", lambda _, step: step._replace(op="avg" if step.op == "sum" else "sum")),
    "root": ("src is", lambda _, step: step._replace(seed=step.seed + 1)),
    "splits": ("sends .* elements to rank|splits is", lambda _, step: step._replace(seed=step.seed + 1)),
    "kind": ("function is", lambda chance, step: step._replace(kind=other(chance, KINDS[:4], step.kind))),
}
CHANGES_OF = {
    "all_reduce": ("numel", "codec", "op", "kind"),
    "all_reduce_q8": ("numel", "op", "kind"),
    "all_gather": ("numel", "codec", "kind"),
    "broadcast": ("numel", "codec", "root", "kind"),
    "all_to_all": ("codec", "splits", "kind"),
    "all_to_all with a table": ("codec", "splits", "kind"),
}


def other(chance: random.Random, choices: list[T], one: T) -> T:
    return chance.choice([choice for choice in choices if choice != one])


def generated(chance: random.Random, world: int) -> tuple[list[Step], list[Step], int, int, str]:
    """What most ranks do, what one does, which, from which call on, and the field by which it differs."""
    kinds = [
        # Over Raw with a table only rows travel: nothing is compared.
        Step(kind, chance.choice(SIZES), chance.choice(CODECS[:4] if "table" in kind else CODECS), chance.choice(OPS))
        for kind in chance.choices(KINDS, k=3)
    ]
    # Most calls are known before the one that differs.
    most = [chance.choice(kinds)._replace(seed=chance.randrange(10)) for _ in range(chance.randint(1, 8))]
    position = chance.randrange(len(most))
    if chance.random() < 0.2:
        return most, most, 0, 0, ""
    field, change = CHANGES[chance.choice(CHANGES_OF[most[position].kind])]
    one = [*most[:position], change(chance, most[position]), *most[position + 1 :]]
    return most, one, chance.randrange(world), position, field


def generated_programs(rank: int, world: int, folder: str, backend: str, seeds: range) -> None:
    everyones = groups(backend, rank, world, folder, len(seeds))
    for seed, group in zip(seeds, everyones, strict=True):
        chance = random.Random(seed)
        most, one, odd, position, field = generated(chance, world)
        late = mock.patch.object(DeviceHandshake, "are_here", _Late()) if chance.random() < 0.5 else nullcontext()
        started = time.monotonic()
        with path_of(backend), late:
            number, error = carry_out(one if rank == odd else most, group)
        where = f"seed {seed}, rank {rank}: {odd} does {one} instead of {most}; {number} calls, then {error}"
        assert time.monotonic() - started < TIMEOUT_SECONDS / 2, where
        if one == most:
            assert (number, error) == (len(most), "nothing"), where
            continue
        assert error.startswith("ConfigError: "), where
        assert re.search(field, error), where
        assert f"rank {odd}" in error, where
        assert number == position if backend == "gloo" else position <= number, where
        dist.barrier()
        if backend == "gloo":
            assert run(A, group)(), where
    dist.barrier()
    leave(0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 150), marks=pytest.mark.slow)], ids=["few", "many"])
def test_generated_programs_with_a_disagreement_end_with_its_name_on_every_rank(
    tmp_path: Path, backend: str, seeds: range
) -> None:
    run_ranks(generated_programs, (3, str(tmp_path), backend, seeds), 3)
