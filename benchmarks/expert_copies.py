"""Copies of hot experts: how busy the busiest rank is, by our search, by greedy copies packed, and by EPLB itself.

Loads are generated. EPLB is DeepSeek's own file, https://github.com/deepseek-ai/EPLB; $EPLB names a folder with it.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from benchmarks.registry import Options, Table, benchmark
from laconic.moe.placement.search import copies_of, packed, place

Placement = Sequence[Sequence[int]]

_CASES = ((8, 2), (16, 4), (64, 8), (128, 8), (256, 8))
"""Experts and ranks."""


@benchmark("expert-copies")
def expert_copies(options: Options) -> list[Table]:
    """The fullest rank over the mean, for four kinds of load, three numbers of copies and five sizes."""
    theirs, generator = _eplb(), random.Random(0)
    rows = []
    for kind, draw in _KINDS.items():
        for extra in (0, 1, 2):
            found: dict[str, list[float]] = {"ours": [], "greedy": [], "EPLB": []}
            longest, worse = 0.0, 0
            for num_experts, num_ranks in _CASES[: 2 if options.small else None]:
                loads, room = draw(num_experts, generator), num_experts // num_ranks + extra
                started = time.perf_counter()
                ours = _over_mean(place(loads, [room] * num_ranks), loads, num_ranks)
                longest = max(longest, time.perf_counter() - started)
                found["ours"].append(ours)
                found["greedy"].append(_over_mean(_greedy(loads, room, num_ranks), loads, num_ranks))
                if theirs is not None:
                    found["EPLB"].append(_over_mean(theirs(loads, room, num_ranks), loads, num_ranks))
                worse += ours > min(both[-1] for both in found.values() if both) * (1 + 1e-6)
            means = [f"{fmean(values):.3f}" if values else "not here" for values in found.values()]
            rows.append([kind, str(extra), *means, str(worse), f"{longest * 1e3:.0f} ms"])
    header = ["loads", "copies per rank", "ours", "greedy", "EPLB", "ours worse than either", "longest search"]
    note = "Rows of the fullest rank over the mean, in the mean of 8 to 256 experts on 2 to 8 ranks; copies share."
    return [Table("Balance of placements with copies", header, rows, note)]


def _shuffled(loads: list[float], generator: random.Random) -> list[float]:
    generator.shuffle(loads)
    return loads


_KINDS: dict[str, Callable[[int, random.Random], list[float]]] = {
    "uniform": lambda number, generator: [100.0] * number,
    "Zipf": lambda number, generator: _shuffled([1000 / (place + 1) for place in range(number)], generator),
    "one hot": lambda number, generator: _shuffled([1000.0] + [1.0] * (number - 1), generator),
    "random": lambda number, generator: [float(generator.randrange(1000)) for _ in range(number)],
}


def _over_mean(held: Placement, loads: Sequence[float], num_ranks: int) -> float:
    copies = Counter(expert for rank in held for expert in rank)
    return max(sum(loads[expert] / copies[expert] for expert in rank) for rank in held) * num_ranks / sum(loads)


def _greedy(loads: Sequence[float], room: int, num_ranks: int) -> Placement:
    copies = copies_of(loads, room * num_ranks)
    items = [expert for expert, number in enumerate(copies) for _ in range(number)]
    ranks = packed([loads[item] / copies[item] for item in items], [room] * num_ranks)
    return [[items[item] for item in rank] for rank in ranks]


def _eplb() -> Callable[[Sequence[float], int, int], Placement] | None:
    folder = os.environ.get("EPLB")
    if folder is None:
        return None
    sys.path.insert(0, folder)
    rebalance = importlib.import_module("eplb").rebalance_experts

    def placed(loads: Sequence[float], room: int, num_ranks: int) -> Placement:
        experts, _, _ = rebalance(torch.tensor([loads]), room * num_ranks, 1, 1, num_ranks)
        found: Placement = experts.view(num_ranks, room).tolist()
        return found

    return placed
