"""What several processes do to choose.

Each rank writes what it found to folder/<name>.<rank>.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.collectives import all_gather, all_to_all, audit, broadcast, gather, scatter
from laconic.collectives.policy import selector as choosing
from laconic.collectives.policy.microbench import Ranks
from laconic.collectives.policy.selector import choose, merge_notes, needs_sync, note, observe, prepare, use_rates
from laconic.collectives.runtime.background import run_in_background
from laconic.cost.comm.rates import WireRates
from laconic.cost.comm.seconds import RAW
from laconic.errors import ConfigError
from tests.collectives.simulated import made_up_rates
from tests.distributed.processes import rank_environment

LARGE = 1 << 22
CPU = torch.device("cpu")
CALLS = [(op, n) for n in (1 << 13, 1 << 17, LARGE) for op in ("all_gather", "reduce_scatter", "all_reduce", "send")]


def choices(group: dist.ProcessGroup) -> list[Any]:
    """Choices with observations that differ between ranks."""
    found = []
    for call in range(4):
        for operation, numel in CALLS:
            choice = choose(operation, numel, torch.bfloat16, group)
            found.append(dataclasses.astuple(choice))
            if choice.codec != RAW and operation != "send":
                rank = group.rank()
                sizes, seconds = (3000, 2000 + 100 * rank + call), 0.01 * (1 + rank)
                observe(operation, numel, torch.bfloat16, group, choice, *sizes, seconds)
                merge_notes(group, said_by_all(group))
    return found


def said_by_all(group: dist.ProcessGroup) -> list[bytes]:
    """What notices carry."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, note(group), group=group)
    return found


def rates_of(group: dist.ProcessGroup) -> WireRates:
    chooser = choosing._chooser_of("all_gather", group, CPU)
    assert chooser is not None
    return chooser.rates


def measured(group: dist.ProcessGroup) -> Any:
    """Without a file."""
    started = time.perf_counter()
    choose("all_gather", LARGE, torch.bfloat16, group)
    seconds = time.perf_counter() - started
    rates = rates_of(group)
    half = dist.new_group(list(range(group.size() // 2 + 1)))
    in_half = choices(half) if half is not dist.GroupMember.NON_GROUP_MEMBER else None
    return {"choices": choices(group), "rates": rates.to_dict(), "seconds": seconds, "half": in_half}


def from_rank_0(group: dist.ProcessGroup) -> Any:
    """Rank 0 has rates that nobody else has."""
    if group.rank() == 0:
        use_rates(made_up_rates())
    return {"choices": choices(group), "rates": rates_of(group).to_dict()}


def unreadable(group: dist.ProcessGroup, folder: Path) -> Any:
    """The file of rank 0 is damaged."""
    if group.rank() == 0:
        os.environ["LACONIC_WIRE_RATES"] = str(folder / "damaged.json")
    try:
        choose("all_gather", LARGE, torch.bfloat16, group)
    except ConfigError as error:
        return str(error)
    return None


def prepared(group: dist.ProcessGroup) -> Any:
    """Sends concern two of the ranks only."""
    early = choose("send", LARGE, torch.bfloat16, group).reason
    if group.rank() == 0:
        use_rates(made_up_rates())
    prepare(group)
    in_lane = run_in_background(lambda groups: choices_of_sends(groups[0]), (group,), CPU).wait()
    return {"early": early, "here": choices_of_sends(group), "in_lane": in_lane}


def choices_of_sends(group: dist.ProcessGroup) -> list[Any]:
    return [] if group.rank() == 2 else [dataclasses.astuple(choose("send", LARGE, torch.bfloat16, group))]


def talking(group: dist.ProcessGroup) -> list[bool]:
    """Whether each call would communicate, and then makes it."""
    if group.rank() == 0:
        use_rates(made_up_rates())
    arguments = ("all_gather", LARGE, torch.bfloat16, group)
    found = [needs_sync("all_gather", 10, torch.bfloat16, group), needs_sync("send", LARGE, torch.bfloat16, group)]
    for _ in range(4):
        found.append(needs_sync(*arguments))
        choose(*arguments)
    return found


def carried_out(group: dist.ProcessGroup) -> Any:
    """All-gathers on a link that pays for coding: of values that shrink, and of random bits."""
    use_rates(made_up_rates(bytes_per_second=12.5e6))
    numel = 1 << 17
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(group.rank())
    for name, dtype in (("weights", torch.bfloat16), ("noise", torch.float16)):
        bits = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, generator=generator)
        x = bits.view(dtype) if name == "noise" else torch.randn(numel, generator=generator).to(dtype)
        out = torch.empty(group.size() * numel, dtype=dtype)
        audit.reset()
        for _ in range(4):
            all_gather(out, x, group)
        assert torch.equal(out.view(group.size(), -1)[group.rank()].view(torch.int16), x.view(torch.int16))
        found[name] = audit.snapshot().to_dict()
    return found


def one_sided(group: dist.ProcessGroup) -> Any:
    """Random bits, which not all ranks send: their choices must follow all the same."""
    use_rates(made_up_rates(bytes_per_second=12.5e6))
    rank, world, numel = group.rank(), group.size(), 1 << 17
    x = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16).view(torch.float16)
    rows, own = torch.empty(world * numel, dtype=x.dtype), x if rank == 0 else x[:0]
    sizes = [[numel if (source, target) == (0, 1) else 0 for target in range(world)] for source in range(world)]
    calls = {
        "broadcast": lambda: broadcast(x.clone(), 0, group),
        "gather": lambda: gather(rows if rank == 0 else None, x, 0, group),
        "scatter": lambda: scatter(torch.empty_like(x), rows if rank == 0 else None, 0, group),
        "all_to_all": lambda: all_to_all(
            torch.empty(sum(row[rank] for row in sizes), dtype=x.dtype),
            own,
            [row[rank] for row in sizes],
            sizes[rank],
            group,
        ),
    }
    found = {}
    rows.copy_(x.repeat(world))
    for name, call in calls.items():
        audit.reset()
        for _ in range(5):
            call()
        found[name] = {entry.codec: entry.num_calls for entry in audit.snapshot().entries}
    return found


def texts(group: dist.ProcessGroup) -> Any:
    """Texts of different lengths."""
    ranks = Ranks(group, CPU)
    return [ranks.texts("x" * group.rank()), ranks.texts(""), ranks.texts("gr\u00f6\u00dfer")]


def choose_together(rank: int, folder: Path, num_ranks: int, port: int) -> None:
    """Carry out every scenario with all ranks, and write what this one found to `folder`."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ |= rank_environment(rank, num_ranks, port, XDG_CACHE_HOME=str(folder / "cache"))
    dist.init_process_group("gloo")
    scenarios = (measured, from_rank_0, unreadable, prepared, talking, carried_out, one_sided, texts)
    for scenario in scenarios:
        name = scenario.__name__
        # A group of its own for each, so that nothing is remembered.
        group = dist.new_group(list(range(dist.get_world_size())))
        assert group is not None
        found = scenario(group, folder) if scenario is unreadable else scenario(group)
        use_rates(None)
        os.environ.pop("LACONIC_WIRE_RATES", None)
        (folder / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)
