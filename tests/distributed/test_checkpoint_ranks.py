"""Checkpoints of several processes: the file system shows each of them something else, or one of them fails."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from laconic.errors import CheckpointError
from laconic.train.checkpoint.save_load import find_checkpoint, load_checkpoint, save_checkpoint
from laconic.train.checkpoint.zipped_storage import CheckpointReader, ZippedWriter
from laconic.train.distributed.world import World, is_peer_lost
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_joined, run_ranks
from tests.patience import patient
from tests.train.runs import ALONE
from tests.train.test_checkpoint import coded, save, stepped, trained


def _find(rank: int, folder: Path) -> None:
    """Rank r looks into `folder`/r for its run directories; the answers must be the same, and come."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=patient(60)))
    world = World(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
    own = folder / str(rank)
    # `latest` is damaged; there are more checkpoints on rank 0 than on rank 1, and the other way round.
    for name in ("more", "fewer"):
        with pytest.raises(CheckpointError, match="The newest good checkpoint is step-00000001"):
            find_checkpoint(own / name, world)
    # Only rank 0 has a pointer, or only rank 1.
    assert find_checkpoint(own / "pointer-0", world).step == 2
    assert find_checkpoint(own / "pointer-1", world).step == 2
    with pytest.raises(CheckpointError, match="is another one on rank 1 than on rank 0"):
        find_checkpoint(own / "differing", world)
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_that_see_different_checkpoints_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first = tmp_path / "0"
    for name in ("more", "fewer", "pointer-0", "pointer-1", "differing"):
        for step in (1, 2, 3) if name in ("more", "fewer") else (1, 2):
            save(first / name, step, keep=9)
    for name in ("more", "fewer"):
        (first / name / "checkpoints" / "step-00000003" / "__0_0.distcp").write_bytes(b"")
    shutil.copytree(first, tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / "more" / "checkpoints" / "step-00000002")
    shutil.rmtree(first / "fewer" / "checkpoints" / "step-00000002")
    (tmp_path / "1" / "pointer-0" / "checkpoints" / "latest").unlink()
    (first / "pointer-1" / "checkpoints" / "latest").unlink()
    shutil.rmtree(tmp_path / "1" / "differing")
    for step in (1, 2):
        save(tmp_path / "1" / "differing", step, seed=8)
    run_ranks(_find, (tmp_path,), 2)


def _fail(of: type, name: str, on_rank: int) -> None:
    """Let a method fail on one rank, wherever in a save or load it is called."""
    method = getattr(of, name)

    def failing(self: object, *args: object, **named: object) -> object:
        if dist.get_rank() == on_rank:
            raise MemoryError("none left")
        return method(self, *args, **named)

    setattr(of, name, failing)


def _told(world: World, folder: Path, of: type, name: str, zipped: bool, at_load: bool) -> None:
    work: Callable[[], object] = partial(save, folder, 1, world=world, zipped=zipped)
    if at_load:
        work()
        work = partial(load_checkpoint, find_checkpoint(folder, world), world, *trained())
    _fail(of, name, 1)
    with pytest.raises(CheckpointError, match=r"step-00000001: rank 1: none left$"):
        work()
    dist.barrier()  # rank 0 tidies up
    assert at_load or not list((folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("of", "name", "zipped", "at_load"),
    [
        (DefaultSavePlanner, "create_local_plan", False, False),
        (FileSystemWriter, "write_data", False, False),
        (ZippedWriter, "write_data", True, False),
        (DefaultLoadPlanner, "create_local_plan", False, True),
        (CheckpointReader, "read_metadata", False, True),
        (CheckpointReader, "read_data", True, True),
    ],
)
def test_what_fails_on_one_rank_is_told_on_all(
    of: type, name: str, zipped: bool, at_load: bool, tmp_path: Path
) -> None:
    run_joined(_told, (tmp_path, of, name, zipped, at_load), 2)


def _betas_seen(folder: Path, world: World, beta2: float) -> tuple[float, ...]:
    model, optimizer = coded(beta2)
    load_checkpoint(find_checkpoint(folder, world), world, model, optimizer)
    seen: tuple[float, ...] = optimizer.param_groups[0]["betas_seen"]
    stepped(model, optimizer, 1)
    save_checkpoint(folder, world, model, optimizer, step=2, identity={}, texts={}, keep=1)
    return seen


def _goes_on_in_two(world: World, folder: Path) -> None:
    assert _betas_seen(folder, world, 0.95) == (0.9, 0.9, 0.999, 0.999)


def test_betas_of_steps_are_known_to_other_numbers_of_processes(tmp_path: Path) -> None:
    model, optimizer = coded(0.999)
    stepped(model, optimizer, 1)
    save_checkpoint(tmp_path, ALONE, model, optimizer, step=1, identity={}, texts={}, keep=1)
    run_joined(_goes_on_in_two, (tmp_path,), 2)
    assert _betas_seen(tmp_path, ALONE, 0.97) == (0.9, 0.9, 0.95, 0.999)


def _between_steps(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    timeout_seconds = patient(200)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_seconds))
    world = World(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
    dist.barrier()
    _fail(_DistWrapper, "gather_object", 1)
    begun = time.monotonic()
    if rank == 1:
        with pytest.raises(CheckpointError, match=r"step-00000001: rank 1: none left$"):
            save(folder, 1, world=world)
    else:
        with pytest.raises(RuntimeError) as raised:
            save(folder, 1, world=world)
        assert is_peer_lost(raised.value)
    assert time.monotonic() - begun < timeout_seconds / 4
    leave(0)


def test_what_fails_between_the_steps_of_dcp_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run_ranks(_between_steps, (tmp_path,), 2)
