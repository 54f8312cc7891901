"""Messages that do not fit, over real processes with NCCL's rules: sent again at the same place on all ranks.

Whether a rank's values fit changes from step to step, and each rank looks at a place of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, Raw, all_reduce, audit
from laconic.collectives.arguments import copy_if_overwritten
from laconic.collectives.codec import Codec
from laconic.collectives.engine import call as engine_call
from laconic.collectives.engine.call import CollectiveCall, Exchange
from laconic.collectives.runtime.late_checks import left_on, make_checks
from laconic.train.launch.worker import leave
from tests.distributed.in_order import is_used_on_cpu
from tests.distributed.processes import run_ranks

CODEC = Lossless(capacity_bits=12.0)
OTHERS: list[Codec] = [Raw(), CODEC]
KINDS = ["all_gather", "reduce_scatter", "all_to_all", "uneven"]


def values(step: int, rank: int, numel: int) -> Tensor:
    """bfloat16 of a step of a rank: numbers that fit, or bits that do not in all or in some of the chunks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randn(numel, generator=generator).bfloat16()
    first, last = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
    if torch.rand((), generator=generator) < 0.5:
        first, last = 0, numel
    if torch.rand((), generator=generator) < 0.5:
        # Any exponent, but none of NaN, which sums would not keep.
        bits = torch.randint(0, 0x7000, (last - first,), generator=generator, dtype=torch.int16)
        found.view(torch.int16)[first:last] = bits
    return found


def started(exchange: Exchange, kind: str, step: int, numel: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Start a call that the host has not looked at; what it writes and what has to be there."""
    me, world = exchange.group_rank, exchange.world
    rows = [values(step, rank, world * numel).view(world, numel) for rank in range(world)]
    if kind == "all_gather":
        out = torch.empty(world, world * numel, dtype=torch.bfloat16)
        exchange.all_gather(out, rows[me].view(-1))
        return list(out), [row.view(-1) for row in rows]
    if kind == "reduce_scatter":
        # Half of them in the memory of the values.
        mine = rows[me].clone()
        out = mine[me] if step // len(KINDS) % 2 else torch.empty(numel, dtype=torch.bfloat16)
        exchange.reduce_scatter(out, mine, 0.5)
        total = torch.zeros(numel)
        for row in rows:
            total += row[me].float()
        return [out], [(total * 0.5).bfloat16()]
    if kind == "all_to_all":
        sent_rows = rows[me].clone()
        out = sent_rows if step // len(KINDS) % 2 else torch.empty_like(sent_rows)
        exchange.all_to_all(out, copy_if_overwritten(sent_rows, out))
        return list(out), [row[me] for row in rows]
    table = [[(3 * sender + receiver + step) % numel for receiver in range(world)] for sender in range(world)]
    received = [torch.empty(table[rank][me], dtype=torch.bfloat16) for rank in range(world)]
    sent = [rows[me][rank, : table[me][rank]] for rank in range(world)]
    exchange.all_to_all_uneven(received, sent, table[me], [row[me] for row in table], table)
    return received, [rows[rank][me, : table[rank][me]] for rank in range(world)]


def checked_anywhere(rank: int, world: int, folder: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    group = dist.new_group(backend="in_order", timeout=timeout)
    shared, own = random.Random(1), random.Random(rank)
    num_left = 0
    outs: Sequence[Tensor] = ()
    rights: Sequence[Tensor] = ()
    before = audit.snapshot()
    with is_used_on_cpu(), mock.patch.object(engine_call, "_CHUNK_NBYTES", 1 << 13), torch.no_grad():
        for step in range(num_steps):
            kind, numel = KINDS[step % len(KINDS)], shared.choice([5, 700, 9000, 9000])
            call = CollectiveCall(kind, (group,), CODEC, torch.bfloat16, torch.device("cpu"))
            last_outs, last_rights = outs, rights
            outs, rights = started(call.on((group,)), kind, step, numel)
            assert all(map(torch.equal, last_outs, last_rights))  # what nobody has looked at until then
            num_left += len(left_on(group))
            if own.random() < 0.5:
                make_checks(group)
                assert all(map(torch.equal, outs, rights))
            if shared.random() < 0.3:  # others that check at once
                x = torch.full((300,), float(rank))
                all_reduce(x, group, codec=shared.choice(OTHERS))
                assert x[0] == sum(range(world))
                assert all(map(torch.equal, outs, rights))
    make_checks(group)
    assert all(map(torch.equal, outs, rights))
    assert num_left > num_steps // 2
    entries = (audit.snapshot() - before).entries
    assert sum(entry.num_calls for entry in entries if entry.operation in KINDS) == num_steps
    leave(0)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_did_not_fit_arrives_wherever_ranks_look(tmp_path: Path, world: int) -> None:
    run_ranks(checked_anywhere, (world, str(tmp_path), 16), world)
