"""What a checkpoint keeps of how a run's sums travel: taken as it is, refused where it says something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import CheckpointError
from laconic.train.config.toml import load_config
from laconic.train.distributed.comm_compression import zip_model
from tests.damaged import damaged_texts
from tests.train.runs import ALONE

SAVED = {"num_replicas": 1, "coded": False, "reason": "for 1.00 MB torch's took 1.0 ms"}


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(2, 2))
    dist.destroy_process_group()


def test_a_damaged_file_is_refused_or_means_something(ddp: DistributedDataParallel) -> None:
    config, state = load_config(None, {"zip": "auto"}), SimpleNamespace(stage_group=dist.group.WORLD, num_replicas=1)

    def kept(saved: str) -> tuple[list[str], str | None]:
        return zip_model([ddp], config, ALONE, state, saved)  # type: ignore[arg-type]  # what it reads

    assert kept(json.dumps(SAVED)) == ([f"DDP: all_reduce left to torch, {SAVED['reason']}"], json.dumps(SAVED))
    for words, text in damaged_texts(SAVED):
        try:
            found = kept(text)[1]
        except CheckpointError as error:
            assert "collectives.json of the checkpoint does not say whether" in str(error), words  # noqa: PT017
            assert "continue from another checkpoint" in str(error)  # noqa: PT017
        else:
            given = json.loads(text)
            assert {*map(type, given.values())} == {int, bool, str}, words
            if given["num_replicas"] == 1 and not given["coded"]:
                assert found == json.dumps({name: given[name] for name in SAVED}), words
        ddp._comm_hooks = []  # one may be registered once
