"""A lost rank is named by one class of error, raw and coded, whoever made the group; timeouts may change meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import collectives
from laconic.collectives import Lossless, ProcessGroupOptions
from laconic.collectives.runtime.group_facts import ranks_of, registered_ranks, timeout_of
from laconic.errors import CollectiveError, CollectiveTimeoutError, ConfigError
from laconic.train.launch.worker import leave
from tests.distributed.processes import ROOT, join_ranks, run_ranks, start_ranks
from tests.patience import patient

SMALL, LARGE = 10, 100_000


def named_groups(backend: str, names: list[str]) -> dict[str, Any]:
    lossless = ProcessGroupOptions(codec=Lossless(), min_nbytes=0) if backend == "laconic" else None
    return {name: dist.new_group(pg_options=lossless if name.startswith("coded") else None) for name in names}


def losses_by_call(groups: dict[str, Any], backend: str) -> dict[str, Callable[[], object]]:
    """What each rank calls, having called it once before so that connections are there, on a group of its own."""
    found: dict[str, Callable[[], object]] = {}
    for name, group in groups.items():
        x, how = torch.ones(LARGE if "large" in name else SMALL), name.partition(" ")[2]
        if how.startswith("all_reduce"):
            found[name] = lambda x=x, group=group: dist.all_reduce(x, group=group)
        elif how.startswith("async"):
            found[name] = lambda x=x, group=group: dist.all_reduce(x, group=group, async_op=True).wait()  # type: ignore[union-attr]
        elif how.startswith("future"):
            found[name] = lambda x=x, group=group: (
                dist.all_reduce(x, group=group, async_op=True).get_future().then(lambda f: f.value()).wait()  # type: ignore[union-attr]
            )
        elif how.startswith("gather"):
            rows = [torch.empty_like(x) for _ in range(2)]
            found[name] = lambda x=x, rows=rows, group=group: dist.all_gather(rows, x, group=group)
        elif how.startswith("object"):
            found[name] = lambda group=group: dist.all_gather_object([None, None], "an object", group=group)
        elif how.startswith("barrier"):
            found[name] = lambda group=group: dist.barrier(group)
        elif how.startswith("recv"):
            found[name] = lambda x=x, group=group: (
                dist.recv(x, 1, group) if dist.get_rank() == 0 else dist.send(x, 0, group)
            )
        elif how.startswith("api"):
            found[name] = lambda x=x, group=group: collectives.all_reduce(x, group, async_op=True).wait()
        else:
            model = DistributedDataParallel(nn.Linear(200, 200), process_group=group)
            if how.startswith("zipped"):
                laconic.zip_collectives(model)
            found[name] = lambda model=model: model(torch.ones(2, 200)).sum().backward()
    return found


OF_LACONIC = [
    *(f"raw {how}" for how in ("all_reduce", "async", "future", "gather", "object", "barrier", "recv", "DDP")),
    *(f"coded {how}" for how in ("all_reduce large", "async large", "gather large", "recv large", "zipped DDP")),
]
OF_GLOO = ["raw zipped DDP", "raw api large", "raw api"]


def loses(rank: int, world: int, folder: str, backend: str, names: list[str]) -> None:
    join_ranks(rank, world, folder, backend)
    groups = named_groups(backend, names)
    calls = losses_by_call(groups, backend)
    for name, call in calls.items():
        if name != "raw api large":  # whose first call finds the loss
            call()
            call()  # in whose second DDP makes other buckets
    dist.barrier()
    if rank == 1:
        os._exit(0)
    for name, call in calls.items():
        with pytest.raises(CollectiveError, match="rank 1") as caught:
            call()
        assert isinstance(caught.value, RuntimeError), name
    leave(0)


@pytest.mark.parametrize(("backend", "names"), [("gloo", OF_GLOO), ("laconic", OF_LACONIC)])
def test_a_lost_rank_is_named_by_every_call(tmp_path: Path, backend: str, names: list[str]) -> None:
    processes = start_ranks(loses, (2, str(tmp_path), backend, names), 2)
    for process in processes:
        process.join(patient(120))
        assert process.exitcode == 0


# --- timeouts ---


def shorter_timeouts(rank: int, world: int, folder: str, backend: str) -> None:
    join_ranks(rank, world, folder, backend)
    names = ["raw api large", "coded all_reduce large", "coded async large", "coded recv large"]
    if backend == "gloo":
        names = ["raw api", "raw api large"]
    groups = named_groups(backend, names)
    calls = losses_by_call(groups, backend)
    if backend == "gloo":
        for codec in (None, True):
            group: Any = dist.new_group()
            x = torch.ones(LARGE)
            calls[f"codec {codec}"] = lambda x=x, group=group, codec=codec: collectives.all_reduce(
                x, group, codec=Lossless(), async_op=bool(codec)
            ).wait()
            groups[f"codec {codec}"] = group
    for name, call in calls.items():
        call()  # with the first timeout
        _set_pg_timeout(timedelta(seconds=1), groups[name])
        assert timeout_of(groups[name]) == timedelta(seconds=1)
    dist.barrier()
    for name, call in calls.items():
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(CollectiveError, match="rank 1"):
                call()
            assert 0.9 < time.monotonic() - began < patient(20), name
    if rank == 0:
        Path(folder, "done").touch()
    while not Path(folder, "done").exists():
        time.sleep(0.05)
    leave(0)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "laconic"])
@pytest.mark.ci
def test_a_timeout_that_is_changed_holds_for_coded_calls(tmp_path: Path, backend: str) -> None:
    run_ranks(shorter_timeouts, (2, str(tmp_path), backend), 2)


def waits(rank: int, world: int, folder: str) -> None:
    """A wait that is too short is no OSError, and the call goes on."""
    join_ranks(rank, world, folder, "laconic")
    groups = named_groups("laconic", ["raw", "coded"])
    for group, numel in ((groups["raw"], SMALL), (groups["coded"], LARGE)):
        x = torch.ones(numel)
        dist.all_reduce(x, group=group)
        if rank == 1:
            time.sleep(1.0)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"was not done within 0:00:00\.1\d*; it goes on") as caught:
                work.wait(timedelta(seconds=0.1))
            assert type(caught.value) is CollectiveTimeoutError
            assert isinstance(caught.value, TimeoutError)
        work.wait()
        assert x.eq(4.0).all()
    dist.barrier()
    leave(0)


@pytest.mark.ci
def test_a_wait_that_is_too_short_is_an_error_of_the_same_kind(tmp_path: Path) -> None:
    run_ranks(waits, (2, str(tmp_path)), 2)


# --- groups that torch does not know ---


def strangers(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder, "gloo")
    store = dist.FileStore(f"{folder}/by-hand", world)
    by_hand = dist.ProcessGroup(store, rank, world)
    by_hand._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    by_hand._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, world)
    )
    for codec in ("auto", Lossless()):
        for async_op in (False, True):
            x = torch.ones(LARGE)
            collectives.all_reduce(x, by_hand, codec=codec, async_op=async_op).wait()
            assert x.eq(2.0).all()
            with pytest.raises(ConfigError, match=r"group is none that torch\.distributed knows"):
                collectives.broadcast(x, 0, by_hand, codec=codec, async_op=async_op)
    assert ranks_of(by_hand) == (0, 1)
    destroyed = dist.new_group([1, 0])
    assert isinstance(destroyed, dist.ProcessGroup)
    assert registered_ranks(destroyed) == tuple(dist.get_process_group_ranks(destroyed))
    dist.barrier()
    leave(0)


def test_groups_that_torch_does_not_know_are_used_or_refused_by_name(tmp_path: Path) -> None:
    run_ranks(strangers, (2, str(tmp_path)), 2)


def test_nobody_else_asks_the_registry_of_torch() -> None:
    asks = ("get_process_group_ranks(", "dist.get_global_rank(", "get_group_rank(", "pg_map[")
    found = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "src" / "laconic").rglob("*.py")
        if any(call in file.read_text() for call in asks)
    }
    # The second writes there; no group is asked for.
    assert found == {"src/laconic/collectives/runtime/group_facts.py", "src/laconic/run/zipped_groups.py"}
