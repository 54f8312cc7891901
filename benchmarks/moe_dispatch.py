"""Rows to their experts and back over slow links: flat, without duplicates, in levels, shortened, with swaps.

Two hosts (network namespaces, laconic.testing.netlab) with several ranks each: fast inside, slow between. A case is a
dispatch and a combine with experts that do nothing; seconds are the slowest rank's. Bytes are those that leave a host's
interface; what the model predicts for them is counted from the routing alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import join, leave, run_ranks, time_all
from laconic.collectives import Blockwise, Codec, Lossless, Raw, native
from laconic.cost.moe.hierarchy import RowCounts
from laconic.cost.moe.rates import MoERates
from laconic.cost.wire.rates import Line
from laconic.formats import BlockFormat
from laconic.moe import Dispatcher, Grid, HierarchicalDispatcher, Placement, Routing, SortedOrder
from laconic.moe.agreement import agree_on_depth, agree_on_swaps, gather_counts
from laconic.moe.flat import FlatDispatcher
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS, _RANKS_PER_HOST = 2, 4
_RATES = (100e6, 1e9)
_SMOKE = 1 << 12
_NUM_EXPERTS, _TOP_K, _MODEL_DIM = 128, 8, 1024
_ID_NBYTES = 8
"""Of an assignment on its way there: id and fp32 weight."""
_CALIBRATION_NBYTES = 1 << 22
_CASES = ("flat", "depth 1", "depth 2", "depth 2, lossless", "depth 2, int8")


@benchmark("moe-dispatch")
def moe_dispatch(options: Options) -> list[Table]:
    """Top-8 of 128 experts over two nodes of four ranks, bf16 rows of 1024: balanced, Zipf, Zipf after swaps."""
    reason = why_not()
    if reason is not None:
        return [Table("Dispatch over slow links", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    ranks = 2 if smoke else _RANKS_PER_HOST
    tables = []
    for rate in options.rates or (_RATES[1:] if smoke else _RATES):
        with Lab(_NUM_HOSTS, rate) as lab:
            measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 1)))
            task = {"num_tokens": 16 if smoke else 256, "rounds": options.rounds, "rate": rate, "ranks": ranks}
            result = run_ranks(lab, "benchmarks.moe_dispatch", task, ranks_per_host=ranks)
        tables += [_table(name, rate, measured, ranks, found) for name, found in result["routings"].items()]
    return tables


def _table(name: str, rate: float, measured: float, ranks: int, found: dict[str, Any]) -> Table:
    seconds, nbytes = found["seconds"], found["interface"]
    rows = []
    for case in _CASES:
        predicted = found["predicted"].get(case)
        predicted = None if predicted is None else predicted * found["bytes_per_byte"]
        rows.append(
            [
                case,
                f"{seconds[case] * 1e3:.1f}",
                f"{seconds['flat'] / seconds[case]:.2f}x",
                f"{nbytes[case] / 1e6:.2f}",
                "" if predicted is None else f"{predicted / 1e6:.2f}",
                "" if predicted is None else f"{nbytes[case] / predicted - 1:+.1%}",
            ]
        )
    where = f"2 nodes of {ranks} ranks, {rate / 1e6:g} Mbit/s (one TCP connection gets {measured / 1e6:.0f})"
    return Table(
        f"{name} routing, {where}",
        ["dispatch and combine", "ms", "faster than flat", "MB out of a node", "predicted", "measured above it"],
        rows,
        f"Duplicate rows: {found['node_duplicates']:.0%} to nodes, {found['rank_duplicates']:.0%} to ranks."
        f" The cost model takes depth {found['depth']}; {found['num_swaps']} pairs of experts were swapped."
        f" Predicted bytes are counted from the routing, times {found['bytes_per_byte']:.3f}: what leaves"
        " for each byte of a plain exchange between the nodes, with headers and acknowledgements.",
    )


# --- what each rank does ---


@dataclass(frozen=True)
class _Rank:
    grid: Grid
    rank: int
    world: int
    num_tokens: int
    rates: MoERates

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
        int8 = Blockwise(BlockFormat("int8", 128, torch.float32))
        dispatchers: list[Dispatcher] = [
            FlatDispatcher(self.grid.ep, codec=Raw()),
            self.levels(1, Raw()),
            self.levels(2, Raw()),
            self.levels(2, Lossless()),
            self.levels(2, int8),
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
        counts = gather_counts(dispatcher, routing)
        return {
            "seconds": {name: case.seconds for name, case in timed.items()},
            "interface": {name: case.interface_nbytes for name, case in timed.items()},
            "predicted": self.predicted(counts),
            "bytes_per_byte": self.bytes_per_byte(rounds),
            "node_duplicates": counts.duplicate_rate(_NUM_HOSTS),
            "rank_duplicates": counts.duplicate_rate(self.world),
            "depth": agree_on_depth(dispatcher, routing, 2.0 * _MODEL_DIM, self.rates).depth,
            "num_swaps": num_swaps,
        }

    def bytes_per_byte(self, rounds: int) -> float:
        """What leaves the interface for each byte of a plain exchange between the nodes: headers, acknowledgements."""
        across = self.grid.levels[1].across
        assert across is not None
        sent = torch.zeros(_NUM_HOSTS, _CALIBRATION_NBYTES, dtype=torch.uint8)
        received = torch.empty_like(sent)
        timed = time_all({"exchange": lambda: native.all_to_all(received, sent, across).wait()}, rounds)
        return timed["exchange"].interface_nbytes / (_CALIBRATION_NBYTES * self.world // _NUM_HOSTS)

    def predicted(self, counts: RowCounts) -> dict[str, float]:
        """Bytes out of node 0: its rows and ids on the way there, and the sums for the other node on the way back."""
        node = np.arange(self.world) // (self.world // _NUM_HOSTS)
        away = node[:, None] != node[None, :]
        ids = float((counts.assignments * away)[node == 0].sum()) * _ID_NBYTES
        to_node = counts.rows[_NUM_HOSTS] * (node[:, None] != np.arange(_NUM_HOSTS)[None, :])
        rows = {
            "flat": float((counts.assignments * away).sum()),
            "depth 1": float((counts.rows[self.world] * away).sum()),
            "depth 2": float(to_node.sum()),
        }
        return {case: n * 2 * _MODEL_DIM + (0.0 if case == "flat" else ids) for case, n in rows.items()}


def _rates_of(rate: float) -> MoERates:
    """As good as the lab's links are known without measuring: slow between nodes, fast inside."""
    slow, fast = 8 / rate * _RANKS_PER_HOST, 1e-9
    lines = {"all": Line(1e-3, slow), "across": Line(1e-3, slow), "node": Line(1e-3, fast)}
    return MoERates.of_lines({kind: {"all_to_all": line} for kind, line in lines.items()}, Line(0.0, 0.0))


def main() -> None:
    """As a rank of a lab: measure all routings."""
    task = join()
    grid = Grid(levels=(_NUM_HOSTS,), device_type="cpu")
    rank = _Rank(grid, dist.get_rank(), dist.get_world_size(), task["num_tokens"], _rates_of(task["rate"]))
    balanced, skewed = rank.routing(0.0), rank.routing(1.0)
    swapped, num_swaps = rank.swapped(skewed)
    routings = {"Balanced": (balanced, 0), "Zipf": (skewed, 0), "Zipf, swapped": (swapped, num_swaps)}
    leave({"routings": {name: rank.measure(one, task["rounds"], swaps) for name, (one, swaps) in routings.items()}})


if __name__ == "__main__":
    main()
