"""Choices that follow what calls take, in real processes that dawdle: ranks never disagree, results stay right."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laconic import collectives
from laconic.collectives import audit
from laconic.collectives.policy.selector import use_rates
from laconic.cost.comm.seconds import PROBE_RAW
from laconic.train.launch.worker import leave
from tests.collectives.simulated import made_up_rates
from tests.distributed.over_backend import all_gather_single, join
from tests.distributed.processes import run_ranks

NUMEL = 1 << 16
CALLS = 120


def counted() -> dict[str, int]:
    """Calls by operation, codec and reason."""
    return {
        f"{entry.operation} {entry.codec} {reason}": number
        for entry in audit.snapshot().entries
        for reason, number in entry.reasons.items()
    }


def same_everywhere(group: dist.ProcessGroup, found: object) -> None:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=group)
    assert all(other == everyone[0] for other in everyone), everyone


def follow(rank: int, world: int, folder: str) -> None:
    """A memory is faster than the link that rates speak of: coding is slower, and every rank dawdles as it likes."""
    torch.set_num_threads(1)
    rates = made_up_rates(bytes_per_second=12.5e6)
    use_rates(rates)
    join("gloo", rank, world, folder, "gloo")
    plain, group = dist.new_group(), dist.new_group(backend="laconic:gloo")
    dawdle, order = random.Random(rank), random.Random(0)
    x = torch.randn(world, NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, other = torch.empty_like(x), torch.empty_like(x)
    audit.reset()
    works = []
    for _ in range(CALLS):
        if dawdle.random() < 0.1:
            time.sleep(dawdle.random() * 0.02)
        way = order.randrange(4)
        if way == 0:
            collectives.all_gather(out, x[rank])
            assert torch.equal(out, x)
        elif way == 1:
            works.append(collectives.all_gather(other, x[rank], async_op=True))
        elif way == 2:
            all_gather_single(out.view(-1), x[rank], group=group)
            assert torch.equal(out, x)
        else:
            mine = x[rank].clone()
            collectives.all_reduce(mine)
            if world == 2:
                assert torch.equal(mine, x[0] + x[1])
    for work in works:
        work.wait()
        assert torch.equal(other, x)
    found = counted()
    same_everywhere(plain, found)
    reasons = " ".join(found)
    # Where ranks are many, sums must not depend on time: rates are not measured here.
    assert PROBE_RAW in reasons
    assert world == 2 or not any("all_reduce raw" in name for name in found), found
    dist.barrier()
    leave(0)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.ci)])
def test_ranks_that_take_their_time_choose_alike(world: int, tmp_path: Path) -> None:
    run_ranks(follow, (world, str(tmp_path)), world)
