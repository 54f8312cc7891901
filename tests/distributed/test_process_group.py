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

import laconic.collectives.process_group  # noqa: F401  registers the backends
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
    for number, backend in enumerate(("laconic", "laconic:gloo", "cpu:laconic")):
        join(backend, rank, 2, folder, str(number))
        assert dist.get_backend() == backend
        assert type(dist.group.WORLD).__name__ == "ProcessGroupLaconic"
        assert dist.get_backend(dist.new_group()) == backend
        for do in over_backend.EVERYTHING if number == 0 else [over_backend.collectives]:
            assert_same(do(), expected[do.__name__], f"{backend} {do.__name__}")
        if number == 0:
            loaded = over_backend.load(Path(folder, "from-gloo"))
            over_backend.save(Path(folder, "from-laconic"))
        dist.destroy_process_group()
        gc.collect()
    join("gloo", rank, 2, folder, "again")
    assert_same(over_backend.load(Path(folder, "from-laconic")), loaded, "checkpoint")
    dist.barrier()
    leave(0)


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
