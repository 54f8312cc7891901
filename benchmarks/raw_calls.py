"""What a message that is left raw costs the host more than a call of torch's own.

The backend is torch's "fake", which returns at once, so that nothing but Python is timed. Both calls take turns, which
goes first alternates, and each of the two is timed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.kit.collective_calls import call
from benchmarks.registry import Options, Table, benchmark

_WORLD, _NUMEL, _CALLS = 4, 32, 4000
_OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@benchmark("raw-calls")
def raw_calls(options: Options) -> list[Table]:
    """Microseconds of a collective of 64 bytes, with laconic.collectives and with torch.distributed."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    try:
        x = torch.ones(_NUMEL, dtype=torch.bfloat16)
        number = 50 if options.smoke else _CALLS
        rounds = range(2 if options.smoke else 5)
        found = {
            name: [_by_turns(call(name, x), call(name, x, codec="auto"), number) for _ in rounds]
            for name in _OPERATIONS
        }
    finally:
        dist.destroy_process_group()
    return [
        Table.of(
            f"{_WORLD} ranks, {2 * _NUMEL} bytes, {number:,} calls by turns in each of {len(rounds)} rounds",
            list(found.items()),
            [
                ("call", lambda row: row[0]),
                ("torch: median us", lambda row: _range([theirs[0] for theirs, _ in row[1]])),
                ("us more: median", lambda row: _range([ours[0] - theirs[0] for theirs, ours in row[1]])),
                ("99th percentile", lambda row: _range([ours[1] - theirs[1] for theirs, ours in row[1]])),
            ],
            "Least and most of the rounds. The last column is the difference of the two percentiles.",
        )
    ]


def _by_turns(theirs: Callable[[], object], ours: Callable[[], object], number: int) -> list[tuple[float, float]]:
    """(median, 99th percentile) microseconds of both."""
    cases = (theirs, ours)
    samples: tuple[list[int], list[int]] = ([], [])
    for turn in range(-number // 10, number):
        for which in (0, 1) if turn % 2 else (1, 0):
            case = cases[which]
            started = time.perf_counter_ns()
            case()
            taken = time.perf_counter_ns() - started
            if turn >= 0:
                samples[which].append(taken)
    return [(cuts[49] / 1e3, cuts[98] / 1e3) for cuts in (quantiles(each, n=100) for each in samples)]


def _range(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"
