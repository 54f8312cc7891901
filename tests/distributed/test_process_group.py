"""Programs over the process group, in real processes: what they compute over gloo, they compute over laconic."""

from __future__ import annotations

import gc
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.collectives import audit
from laconic.collectives.codec import Blockwise, Lossless, Raw
from laconic.collectives.process_group.group import ProcessGroupOptions
from laconic.errors import CollectiveError, ConfigError, FormatError
from laconic.formats import BlockFormat
from laconic.train.launch.worker import leave
from tests.distributed import over_backend
from tests.distributed.over_backend import assert_same, join
from tests.distributed.processes import run_ranks
from tests.inductor import needs_inductor

CODED = ProcessGroupOptions(Lossless(), min_nbytes=1)


def beside_gloo(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join("gloo", rank, 2, folder, "gloo")
    expected = {do.__name__: do() for do in over_backend.EVERYTHING}
    over_backend.save(Path(folder, "from-gloo"))
    dist.destroy_process_group()
    for name, backend, options, doing in (
        ("coded", "laconic", CODED, over_backend.EVERYTHING),
        (
            "raw",
            "laconic:gloo",
            ProcessGroupOptions(Raw(), min_nbytes=1),
            (over_backend.collectives, over_backend.points),
        ),
        ("auto", "cpu:laconic", None, (over_backend.collectives, over_backend.at_once)),
    ):
        join(backend, rank, 2, folder, name, pg_options=options)
        assert dist.get_backend() == backend
        audit.reset()
        for do in doing:
            assert_same(do(), expected[do.__name__], f"{name} {do.__name__}")
        check_one_work_of_several_calls(rank)
        if name == "coded":
            check_audit(audit.snapshot())
            assert dist.new_group().options == CODED
            loaded = over_backend.load(Path(folder, "from-gloo"))
            over_backend.save(Path(folder, "from-laconic"))
        dist.destroy_process_group()
        gc.collect()
    join("gloo", rank, 2, folder, "again")
    assert_same(over_backend.load(Path(folder, "from-laconic")), loaded, "checkpoint")
    dist.barrier()
    leave(0)


def check_one_work_of_several_calls(rank: int) -> None:
    """As torch makes one of them for NCCL; from 2.15 on in groups of any class."""
    device = torch.device("cpu")
    group: Any = dist.group.WORLD
    strided = torch.zeros(5000, 2)[:, 1]
    for received in (torch.zeros(5000), torch.zeros(5000), strided):  # what was left raw is known from then on
        sent = torch.arange(5000.0) + rank
        with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as together:
            dist.irecv(received, group_src=1 - rank)
            dist.isend(sent, group_dst=1 - rank)
        assert len(together.works[0]._works) == 2
        together.wait()
        assert torch.equal(received, torch.arange(5000.0) + 1 - rank)
    for x in (torch.full((5000,), 1.0 + rank), torch.full((5000,), 1.0 + rank), torch.ones(5000, 2)[:, 1] + rank):
        with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as together:
            dist.broadcast(x, 1, async_op=True)
        assert together.works[0]._works
        together.wait()
        assert torch.equal(x, torch.full((5000,), 2.0))
    group._start_coalescing(device)
    with pytest.raises(FormatError, match="share memory"):
        dist.irecv(torch.zeros(1).expand(5000), group_src=1 - rank)
    assert group._coalesced is None
    group._end_coalescing(device).wait()


def check_audit(found: audit.Snapshot) -> None:
    """All that may be coded was, and is shorter; what was not has its reason."""
    by_name = {(entry.operation, entry.dtype, entry.codec): entry for entry in found.entries}
    for operation in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "send"):
        assert by_name[operation, "bfloat16", "auto"].ratio > 1.3, operation
        assert by_name[operation, "bfloat16", "auto"].num_calls >= 1
    assert set(by_name["all_reduce", "bfloat16", "raw"].reasons) == {"neither a sum nor an average", "one rank"}
    assert set(by_name["all_reduce", "int32", "raw"].reasons) == {"dtype is not coded"}
    assert set(by_name["gather", "bfloat16", "raw"].reasons) == {"left to the backend"}


def test_programs_compute_the_same_bits_as_over_gloo(tmp_path: Path) -> None:
    run_ranks(beside_gloo, (str(tmp_path),), 2)


def compiled(rank: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    found = []
    for name, options in (("gloo", None), ("laconic", CODED)):
        join(name, rank, 2, folder, name, pg_options=options)
        found.append(over_backend.compiled(backend))
        dist.destroy_process_group()
    assert_same(*found, backend)
    leave(0)


@pytest.mark.ci
def test_traced_collectives_compute_the_same_bits(tmp_path: Path) -> None:
    run_ranks(compiled, (str(tmp_path), "aot_eager"), 2)


def compiled_around(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = []
    for name, options in (("gloo", None), ("laconic", CODED), ("laconic", ProcessGroupOptions())):
        join(name, rank, 2, folder, f"{name}{len(found)}", pg_options=options)
        found.append(over_backend.compiled_around())
        dist.destroy_process_group()
    assert len(found[0]["ddp"]) == 7
    assert_same(found[0], found[1], "coded")
    assert_same(found[0], found[2], "default")
    leave(0)


@pytest.mark.ci
def test_collectives_that_compiled_code_leaves_to_python_compute_the_same_bits(tmp_path: Path) -> None:
    run_ranks(compiled_around, (str(tmp_path),), 2)


@pytest.mark.slow
@needs_inductor
def test_compiled_collectives_compute_the_same_bits(tmp_path: Path) -> None:
    run_ranks(compiled, (str(tmp_path), "inductor"), 2)


def odd_tensors() -> None:
    """fp8, which gloo does not know, and tensors that are not contiguous, coded and raw."""
    rank = dist.get_rank()
    for group in (dist.group.WORLD, dist.new_group(backend="laconic:gloo", pg_options=ProcessGroupOptions())):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            x, y = over_backend.values(dtype), torch.empty(over_backend.NUMEL, dtype=dtype)
            rows = torch.empty(2 * x.numel(), dtype=dtype)
            over_backend.all_gather_single(rows, x, group=group)
            assert_same(rows.chunk(2)[rank].clone(), x, "all_gather")
            dist.broadcast(x, 0, group=group)
            assert_same(x, rows.chunk(2)[0].clone(), "broadcast")
            if rank == 0:
                dist.send(x, 1, group=group)
            else:
                dist.recv(y, 0, group=group)
                assert_same(y, x, "recv")
    x = over_backend.values().view(60, 100)
    rows = torch.empty(100, 120, dtype=x.dtype).t()
    over_backend.all_gather_single(rows, x)
    assert_same(rows[60 * rank :][:60].contiguous(), x, "all_gather")
    total = x.t()
    dist.all_reduce(total)
    assert_same(x, rows[:60] + rows[60:], "all_reduce")


def failures(rank: int, folder: str) -> None:
    """What goes wrong is said by the call that waits for it, and the group goes on."""
    torch.set_num_threads(1)
    join("laconic", rank, 2, folder, "failures", pg_options=CODED)
    x = over_backend.values()
    inner = dist.group.WORLD._backend_group

    odd_tensors()

    # Ranks that the default group does not have, which torch does not look up there.
    for call, name in ((dist.send, "dst"), (dist.recv, "src"), (dist.broadcast, "src")):
        with pytest.raises(ConfigError, match=rf"{name} is 99, but the group has 2 ranks, 0 to 1; pass one of them"):
            call(x, 99)

    # A message that was damaged on its way, and one of another type.
    if rank == 0:
        message = Lossless().encode(x)
        message[message.numel() // 2] ^= 4
        inner.send([message], 1, 0).wait()
        dist.send(x.half(), 1)
        dist.send(x, 1)
    else:
        for _ in range(2):
            with pytest.raises(FormatError, match="the message received from rank 0 cannot be decoded"):
                dist.recv(torch.empty_like(x), 0)
        dist.recv(torch.empty_like(x), 0)

    # Ranks that mean different things, in a blocking call, in `wait` and in the future.
    for wait in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        work = dist.all_reduce(x[: 5000 + rank].clone(), async_op=True)
        with pytest.raises(
            (ConfigError, RuntimeError), match=r"numel is 5000 on rank 0 and 5001 on rank 1 in all_reduce"
        ):
            wait(work)
    with pytest.raises(ConfigError, match="dtype is 'bfloat16' on rank 0 and 'float32' on rank 1"):
        dist.all_reduce(x.float() if rank else x)
    dist.all_reduce(x)

    # A call for which another rank is late.
    if rank == 0:
        late = dist.all_reduce(x, async_op=True)
        with pytest.raises(TimeoutError):
            late.wait(timedelta(seconds=0.2))
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        late = dist.all_reduce(x, async_op=True)
    assert late.wait()

    # A rank that is gone.
    dist.barrier()
    if rank == 1:
        leave(0)
    started = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 1"):
        dist.all_reduce(x)
    assert time.monotonic() - started < 30
    dist.destroy_process_group()
    leave(0)


def test_what_goes_wrong_is_said_where_it_is_waited_for(tmp_path: Path) -> None:
    run_ranks(failures, (str(tmp_path),), 2)


def refusals(rank: int, folder: str) -> None:
    for backends in (("laconic", "laconic:gloo"),):
        with pytest.raises(ConfigError, match=r"backend is 'laconic' on rank 0 and 'laconic:gloo' on rank 1"):
            join(backends[rank], rank, 2, folder, "different")
    for number, codecs in enumerate(
        [("auto", Lossless()), (Lossless(), Lossless("tiered")), (Raw(), Lossless("raw")), (Lossless("window"), "auto")]
    ):
        said = [codec if isinstance(codec, str) else f"{type(codec).__name__}({codec.name})" for codec in codecs]
        message = re.escape(f"codec is {said[0]!r} on rank 0 and {said[1]!r} on rank 1")
        with pytest.raises(ConfigError, match=message):
            join("laconic", rank, 2, folder, f"codec-{number}", pg_options=ProcessGroupOptions(codecs[rank]))
    with pytest.raises(ConfigError, match=r"min_nbytes is 1 on rank 0 and 2 on rank 1"):
        join("laconic", rank, 2, folder, "min", pg_options=ProcessGroupOptions(min_nbytes=1 + rank))
    with pytest.raises(ConfigError, match=r"pg_options is a dict, but backend 'laconic' takes"):
        join("laconic", rank, 2, folder, "dict", pg_options={"codec": "zstd"})
    # Before any process group exists.
    with pytest.raises(ConfigError, match="codec is 'zstd', but it must be 'auto' or a codec"):
        ProcessGroupOptions("zstd")
    with pytest.raises(ConfigError, match=r"codec is nf4-b64-bfloat16, but a process group also carries checkpoints"):
        ProcessGroupOptions(Blockwise(BlockFormat("nf4", 64, torch.bfloat16)))
    with pytest.raises(ConfigError, match="min_nbytes is -1"):
        ProcessGroupOptions(min_nbytes=-1)
    leave(0)


def test_groups_of_different_options_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(refusals, (str(tmp_path),), 2)
