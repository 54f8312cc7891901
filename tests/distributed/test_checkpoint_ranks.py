"""Checkpoints as several processes see them when the file system shows each of them something else."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laconic.errors import CheckpointError
from laconic.train.checkpoint.save_load import find_checkpoint
from laconic.train.distributed.world import World
from tests.distributed.processes import run_ranks
from tests.patience import patient
from tests.train.test_checkpoint import save


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
