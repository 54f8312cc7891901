"""Rows to their experts and back over slow links: flat, in levels, without duplicates, shortened, with swaps.

Two and four hosts with several ranks each: fast inside, slow between. A case is a dispatch and a combine with experts
that do nothing. Bytes are those that leave a host's interface, without the headers of packets; what the model predicts
for them is counted from the routing alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.captured import capture_routing
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab, time_all
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.collectives.cluster_profile import measure_link
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.comm.rates import Line, WireRates
from laconic.cost.moe.hierarchy import RowCounts
from laconic.cost.moe.rates import MoERates
from laconic.formats import BlockFormat
from laconic.moe import Dispatched, Dispatcher, Grid, HierarchicalDispatcher, Order, Placement, Routing, SortedOrder
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.placement.consensus import agree_on_depth, gather_counts
from laconic.moe.placement.query import agree_on_swaps
from laconic.moe.row_ops import sum_picked

_NETWORKS = ((2, 100e6, 4), (2, 1e9, 4), (2, 1e9, 2), (4, 100e6, 2), (4, 1e9, 2))
"""Hosts, bits per second between them, and ranks on each."""
_NUM_TOKENS = 2048
"""Of all ranks together."""
_NUM_EXPERTS, _TOP_K, _MODEL_DIM = 128, 8, 1024
_TRAINING_STEPS, _LAYER = 50, 2
_ID_NBYTES = 8
"""Of an assignment on its way there: id and fp32 weight."""
_MEASURED_NBYTES = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
_INT8 = Blockwise(BlockFormat("int8", 128, torch.float32))
_CASES = {
    "flat": "all-to-all of every assignment",
    "2 levels": "every assignment, node by node",
    "dedup, 1 level": "a row once per rank",
    "dedup, 2 levels": "a row once per node, then once per rank",
    "dedup, 2 levels, lossless": "the same, rows losslessly shortened between nodes",
    "dedup, 2 levels, int8": "the same, rows in 8 bits between nodes",
}


@benchmark("moe-dispatch")
@in_lab("Dispatch over slow links")
def moe_dispatch(options: Options) -> list[Table]:
    """Top-8 of 128 experts over two and four nodes, bf16 rows of 1024: balanced, Zipf, a real model's; and swaps."""
    hosts, rates = options.num_hosts or (2, 4), options.rates or (100e6, 1e9)
    layouts = [one for one in _NETWORKS if one[0] in hosts and one[1] in rates]
    tables = []
    with TemporaryDirectory() as folder:
        file = str(Path(folder, "captured.pt"))
        steps = 0 if options.smoke else _TRAINING_STEPS
        torch.save(capture_routing(steps, _NUM_EXPERTS, _TOP_K)[_LAYER], file)
        for num_hosts, rate, ranks in [(2, 1e9, 2)] if options.smoke else layouts:
            network = Network(num_hosts, rate, options, ranks_per_host=ranks)
            num_tokens = (64 if options.smoke else _NUM_TOKENS) // (num_hosts * ranks)
            found = network.run(__name__, {"num_hosts": num_hosts, "num_tokens": num_tokens, "captured": file})
            where = f"{num_hosts} nodes of {ranks} ranks, {network.rate_text}"
            where += f" (one TCP connection gets {found['measured'] / 1e6:.0f})"
            tables += [_table(name, where, num_hosts * ranks, one) for name, one in found["routings"].items()]
    return tables


def _table(name: str, where: str, num_ranks: int, found: dict[str, Any]) -> Table:
    timed, predicted = found["timed"], found["predicted"]

    def payload(case: str) -> float:
        return timed[case]["payload_nbytes"]

    return Table.of(
        f"{name} routing, {where}",
        _CASES,
        [
            ("dispatch and combine", str),
            ("", lambda case: _CASES[case]),
            ("ms", lambda case: f"{timed[case]['seconds'] * 1e3:.1f}"),
            ("faster than flat", lambda case: f"{timed['flat']['seconds'] / timed[case]['seconds']:.2f}x"),
            ("CPU, ms", lambda case: f"{timed[case]['cpu_seconds'] * 1e3:.0f}"),
            ("MB", lambda case: f"{payload(case) / 1e6:.2f}"),
            ("predicted", lambda case: f"{predicted[case] / 1e6:.2f}" if case in predicted else ""),
            ("off by", lambda case: f"{payload(case) / predicted[case] - 1:+.1%}" if case in predicted else ""),
            ("packets, MB", lambda case: f"{timed[case]['interface_nbytes'] / 1e6:.2f}"),
        ],
        f"Duplicate rows: {found['node_duplicates']:.0%} to nodes, {found['rank_duplicates']:.0%} to ranks; the fullest"
        f" rank gets {found['load']:.2f} times the mean. The cost model takes d* = {found['depth']};"
        f" {found['num_swaps']} pairs of experts were swapped. CPU: of all {num_ranks} ranks on"
        f" {os.cpu_count()} processors (the scheduler may grant fewer). MB leave a node, without and with packets'"
        " headers.",
    )


# --- what each rank does ---


@dataclass(frozen=True)
class _Rank:
    grid: Grid
    num_hosts: int
    rank: int
    world: int
    num_tokens: int
    rates: MoERates

    def captured(self, file: str) -> Routing:
        """This rank's part of a batch of a model in training."""
        mine = slice(self.rank * self.num_tokens, (self.rank + 1) * self.num_tokens)
        experts, weights = (part[mine] for part in torch.load(file))
        return Routing.of_choices(experts, weights, _NUM_EXPERTS)

    def routing(self, skew: float) -> Routing:
        """Top-k of Zipf's popularity with Gumbel noise; 0 is balanced. Which experts are popular is a shuffle."""
        popularity = torch.arange(1, _NUM_EXPERTS + 1).log().mul(-skew)
        popularity = popularity[torch.randperm(_NUM_EXPERTS, generator=torch.Generator().manual_seed(0))]
        generator = torch.Generator().manual_seed(1 + self.rank)
        uniform = torch.rand(self.num_tokens, _NUM_EXPERTS, generator=generator).clamp(1e-6, 1 - 1e-6)
        scores, experts = (popularity - (-uniform.log()).log()).topk(_TOP_K)
        return Routing.of_choices(experts, scores.softmax(-1), _NUM_EXPERTS)

    def levels(self, depth: int, codec: Codec) -> HierarchicalDispatcher:
        return HierarchicalDispatcher(self.grid.levels, depth, codec=codec)

    def cases(self, x: Tensor, routing: Routing) -> dict[str, Callable[[], object]]:
        dispatchers: list[Dispatcher] = [
            FlatDispatcher(self.grid.ep, codec=Raw()),
            _WithDuplicates(self.levels(2, Raw())),
            self.levels(1, Raw()),
            self.levels(2, Raw()),
            HierarchicalDispatcher(self.grid.levels, 2, codec=Lossless(), inner_codec=Raw()),
            HierarchicalDispatcher(self.grid.levels, 2, codec=_INT8, inner_codec=Raw()),
        ]

        def there_and_back(dispatcher: Dispatcher) -> Tensor:
            with torch.no_grad():
                dispatched = dispatcher.dispatch(x, routing, SortedOrder())
                return dispatcher.combine(dispatched.rows, dispatched)

        return {name: lambda one=one: there_and_back(one) for name, one in zip(_CASES, dispatchers, strict=True)}

    def swapped(self, routing: Routing) -> tuple[Routing, int]:
        """The routing after swaps of single pairs, until none helps."""
        dispatcher, placement, num_swaps = self.levels(2, Raw()), Placement(_NUM_EXPERTS), 0
        while num_swaps < 64:
            slots = replace(routing, experts=placement(routing.experts))
            plan = agree_on_swaps(dispatcher, slots, 2.0 * _MODEL_DIM, self.rates)
            if not plan.pairs:
                break
            placement.slots.copy_(torch.tensor(plan.new_slots(_NUM_EXPERTS))[placement.slots])
            num_swaps += len(plan.pairs)
        return replace(routing, experts=placement(routing.experts)), num_swaps

    def measure(self, routing: Routing, rounds: int, num_swaps: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randn(self.num_tokens, _MODEL_DIM, generator=generator).bfloat16()
        timed = time_all(self.cases(x, routing), rounds)
        dispatcher = self.levels(2, Raw())
        counts = gather_counts(routing, dispatcher.levels, dispatcher.group)
        rows_of_ranks = counts.assignments.sum(axis=0)
        return {
            "timed": {name: vars(case) for name, case in timed.items()},
            "predicted": self.predicted(counts),
            "node_duplicates": counts.duplicate_rate(self.num_hosts),
            "rank_duplicates": counts.duplicate_rate(self.world),
            "load": float(rows_of_ranks.max() / rows_of_ranks.mean()),
            "depth": agree_on_depth(dispatcher, routing, 2.0 * _MODEL_DIM, self.rates).depth,
            "num_swaps": num_swaps,
        }

    def predicted(self, counts: RowCounts) -> dict[str, float]:
        """Bytes out of node 0: its rows and ids on the way there, and the sums of the others' rows on the way back."""
        node = np.arange(self.world) // (self.world // self.num_hosts)
        here, elsewhere = node == 0, node != 0
        ids = float(counts.assignments[here][:, elsewhere].sum()) * _ID_NBYTES
        assignments, rows, node_rows = (
            float(table[here][:, away].sum() + table[elsewhere][:, ~away].sum())
            for table, away in (
                (counts.assignments, elsewhere),
                (counts.rows[self.world], elsewhere),
                (counts.rows[self.num_hosts], np.arange(self.num_hosts) != 0),
            )
        )
        in_8_bits = _INT8.format.nbytes((_MODEL_DIM,))
        return {
            "flat": assignments * 2 * _MODEL_DIM,
            "2 levels": assignments * 2 * _MODEL_DIM + ids,
            "dedup, 1 level": rows * 2 * _MODEL_DIM + ids,
            "dedup, 2 levels": node_rows * 2 * _MODEL_DIM + ids,
            "dedup, 2 levels, int8": node_rows * in_8_bits + ids,
        }


class _WithDuplicates:
    """Hierarchical, but every assignment is a row of its own, as in Tutel's and DeepSpeed's 2-level all-to-all."""

    def __init__(self, inner: HierarchicalDispatcher) -> None:
        self._inner = inner

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched[Any]:
        each = torch.arange(len(routing))
        alone = replace(routing, tokens=each, num_tokens=len(each), choices=1)
        found = self._inner.dispatch(x.index_select(0, routing.tokens), alone, order)
        return Dispatched(found.rows, found.counts, (found, routing))

    def combine(self, rows: Tensor, dispatched: Dispatched[Any]) -> Tensor:
        found, routing = dispatched.state
        sums = self._inner.combine(rows, found)
        return sum_picked(sums, torch.arange(len(routing)), routing.tokens, routing.num_tokens)


def _rates(grid: Grid) -> MoERates:
    """What an all-to-all takes between all ranks, across nodes and inside of one, measured."""
    ranks = Ranks(grid.ep, torch.device("cpu"))
    across, node = grid.levels[1].across, grid.levels[1].within
    assert across is not None
    links = {
        name: measure_link(ranks, group, _MEASURED_NBYTES, ("all_to_all",))
        for name, group in {"intra0": grid.ep, "inter1": across, "intra1": node}.items()
    }
    return MoERates(WireRates({"all": links["intra0"]}, {}), Line(0.0, 0.0), groups=links)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures: all routings."""
    grid = Grid(levels=(task["num_hosts"],), device_type="cpu")
    world = dist.get_world_size()
    rank = _Rank(grid, task["num_hosts"], dist.get_rank(), world, task["num_tokens"], _rates(grid))
    routings = {"Balanced": (rank.routing(0.0), 0)}
    for name, routing in {"Zipf": rank.routing(1.0), "Captured": rank.captured(task["captured"])}.items():
        routings[name] = routing, 0
        routings[f"{name}, swapped"] = rank.swapped(routing)
    return {"routings": {name: rank.measure(one, task["rounds"], swaps) for name, (one, swaps) in routings.items()}}


if __name__ == "__main__":
    as_rank(measure)
