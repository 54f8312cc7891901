"""Process groups of ranks that share a secret, and of ranks that do not."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from laconic.errors import ConfigError
from tests.distributed.processes import run_ranks
from tests.patience import patient

MINE, OTHER = "correct horse battery staple", "another secret of 30 characters"


def _meet(rank: int, folder: str, secrets: tuple[str | None, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.pop("LACONIC_SECRET", None)
    if (secret := secrets[rank]) is not None:
        os.environ["LACONIC_SECRET"] = secret
    store = FileStore(os.path.join(folder, "store"), len(secrets))
    began = time.monotonic()

    def make() -> None:
        dist.init_process_group(
            "laconic:gloo", store=store, rank=rank, world_size=len(secrets), timeout=timedelta(seconds=patient(60))
        )

    if len(set(secrets)) == 1:
        make()
        x = torch.full((1000,), float(rank + 1))
        dist.all_reduce(x)
        assert x.eq(sum(range(1, len(secrets) + 1))).all()
        dist.destroy_process_group()
    else:
        with pytest.raises(ConfigError, match=r"'laconic/settings/.' in the store was written by a process"):
            make()
        assert time.monotonic() - began < patient(30)  # at once, not when the time of the group is over


@pytest.mark.parametrize("secrets", [(MINE, MINE, MINE), (MINE, MINE, OTHER), (None, MINE, None)])
def test_a_group_is_made_just_if_all_ranks_share_the_secret(tmp_path: object, secrets: tuple[str | None, ...]) -> None:
    run_ranks(_meet, (str(tmp_path), secrets), len(secrets))
