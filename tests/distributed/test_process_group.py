"""Programs over the process group, in real processes: what they compute over gloo, they compute over laconic."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from laconic.collectives import audit
from laconic.collectives.codec import Lossless, Raw
from laconic.collectives.process_group import ProcessGroupOptions
from laconic.errors import ConfigError
from laconic.train.worker import leave
from tests.distributed import over_backend


def join(backend: str, rank: int, world: int, folder: str, name: str, **options: Any) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        **options,
    )


def assert_same(a: Any, b: Any, where: str) -> None:
    """Equal to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where} {number}")
    else:
        assert a == b, where


def beside_gloo(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join("gloo", rank, 2, folder, "gloo")
    expected = {do.__name__: do() for do in over_backend.EVERYTHING}
    over_backend.save(Path(folder, "from-gloo"))
    dist.destroy_process_group()
    coded, raw = (ProcessGroupOptions(codec, min_nbytes=1) for codec in (Lossless(), Raw()))
    for name, backend, options, doing in (
        ("coded", "laconic", coded, over_backend.EVERYTHING),
        (
            "raw",
            "laconic:gloo",
            raw,
            (over_backend.collectives, over_backend.points),
        ),
        ("auto", "cpu:laconic", None, (over_backend.collectives, over_backend.at_once)),
    ):
        join(backend, rank, 2, folder, name, pg_options=options)
        assert dist.get_backend() == backend
        audit.reset()
        for do in doing:
            assert_same(do(), expected[do.__name__], f"{name} {do.__name__}")
        if name == "coded":
            check_audit(audit.snapshot())
            assert dist.new_group().options == options
            loaded = over_backend.load(Path(folder, "from-gloo"))
            over_backend.save(Path(folder, "from-laconic"))
        dist.destroy_process_group()
        gc.collect()
    join("gloo", rank, 2, folder, "again")
    assert_same(over_backend.load(Path(folder, "from-laconic")), loaded, "checkpoint")
    dist.barrier()
    leave(0)


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
    mp.spawn(beside_gloo, args=(str(tmp_path),), nprocs=2)


def refusals(rank: int, folder: str) -> None:
    for backends in (("laconic", "laconic:gloo"),):
        with pytest.raises(ConfigError, match=r"backend is 'laconic' on rank 0 and 'laconic:gloo' on rank 1"):
            join(backends[rank], rank, 2, folder, "different")
    with pytest.raises(ConfigError, match=r"pg_options is a dict, but backend 'laconic' takes"):
        join("laconic", rank, 2, folder, "dict", pg_options={"codec": "zstd"})
    leave(0)


def test_groups_of_different_options_are_refused_on_all_ranks(tmp_path: Path) -> None:
    mp.spawn(refusals, args=(str(tmp_path),), nprocs=2)
