"""What Parm's routes would save on paper: 1296 layers on 8 and 32 GPUs, priced with published constants.

The paper's own grid and constants are not public. The grid here has its size and its two clusters; the constants are
those that FSMoE (arXiv 2501.10714, 4.1) fitted on its testbed B, 8 nodes of 4 GPUs, of the same group and kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median

from benchmarks.registry import Options, Table, benchmark
from laconic.cost.comm.rates import Line, LinkRates, WireRates
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.moe import GridLayout, LayerShape, MoERates, fastest, fsmoe_route, parm_routes
from laconic.cost.moe.shape import group_shape

# FSMoE's fit for testbed B, milliseconds: alpha, and beta per byte of the largest buffer of a rank. The all-to-all is
# between nodes, gather and scatter inside one; an all-reduce inside a node is taken as the two after each other.
_BETWEEN = (1.75e-1, 3.06e-7)
_INSIDE = {"all_gather": (3.20e-2, 1.68e-7), "reduce_scatter": (3.91e-2, 1.67e-7)}
_GEMM = (9.24e-2, 4.42e-11)
_RANKS_PER_NODE = {8: 8, 32: 4}

_PAPER = "1.13 to 5.77"

Layers = Sequence[tuple[GridLayout, "_Priced"]]


@benchmark("moe-parm")
def moe_parm(options: Options) -> list[Table]:
    """The two tables."""
    grid = list(_layers())[:: 81 if options.small else 1]
    layers = [(ranks, _priced(ranks, shape)) for ranks, shape in grid]
    return [_speedups(layers), _selector(layers)]


def _layers() -> Iterator[tuple[GridLayout, LayerShape]]:
    """2 * 8 * 3 * 3 * 3 * 3 = 1296 layers, one expert for each rank of an EP group, top-2 with capacity factor 1.2."""
    parallel = [(mp, esp) for mp in (1, 2, 4) for esp in (1, 2, 4) if (mp, esp) != (1, 1)]
    sizes = product((8, 32), parallel, (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (2, 3, 4))
    for ranks, (mp, esp), batch, length, model_dim, ratio in sizes:
        grid = GridLayout(ranks, mp=mp, ep=ranks // esp, esp=esp, ranks_per_node=_RANKS_PER_NODE[ranks])
        yield grid, LayerShape(batch * length, model_dim, ratio * model_dim, grid.ep, 2, 2, 2, 1.2)


def _rates(grid: GridLayout) -> MoERates:
    """The constants in bytes that a process sends: a gather's buffer is its output, the others' their input."""

    def link(group: str) -> LinkRates:
        members = group_shape(grid, group)
        inside = members.num_nodes == 1

        def line(operation: str, alpha: float, beta: float) -> Line:
            buffer = 1.0 / members.num_ranks if operation == "all_gather" else 1.0
            return Line(1e-3 * alpha, 1e-3 * beta / sent_nbytes(operation, buffer, members.num_ranks))

        lines = {name: line(name, *fit) for name, fit in _INSIDE.items()}
        both = [sum(values) for values in zip(*_INSIDE.values(), strict=True)]
        lines["all_reduce"] = line("all_reduce", both[0], both[1])
        lines["all_to_all"] = line("all_to_all", *(_INSIDE["all_gather"] if inside else _BETWEEN))
        return LinkRates(members.num_ranks, lines, 0.0, 0.0)

    groups = {name: link(name) for name in ("mp", "esp", "ep", "joint") if group_shape(grid, name).num_ranks > 1}
    wire = WireRates({"all": next(iter(groups.values()))}, {})
    return MoERates(wire, Line(1e-3 * _GEMM[0], 1e-3 * _GEMM[1]), groups=groups)


@dataclass(frozen=True)
class _Priced:
    """Seconds of one layer, forward and backward together."""

    base: float
    s1: float
    s2: float
    best: float
    fsmoe: float
    ways: tuple[str, str]
    """The faster route forward and backward."""


def _priced(grid: GridLayout, shape: LayerShape) -> _Priced:
    rates, directions = _rates(grid), (False, True)
    both = [parm_routes(shape, grid, rates, backward=backward) for backward in directions]
    base, s1, s2 = (sum(route.seconds for route in routes) for routes in zip(*both, strict=True))
    faster = [fastest(routes[1:]) for routes in both]
    fsmoe = sum(fsmoe_route(shape, grid, rates, backward=backward).seconds for backward in directions)
    return _Priced(base, s1, s2, sum(route.seconds for route in faster), fsmoe, (faster[0].name, faster[1].name))


def _speedups(layers: Layers) -> Table:
    groups = {
        f"{ranks} GPUs, MP {mp}": [one for grid, one in layers if grid.num_ranks == ranks and grid.mp == mp]
        for ranks, mp in product((8, 32), (1, 2, 4))
    }
    groups["all"] = [one for _, one in layers]

    def gain(route: Callable[[_Priced], float]) -> Callable[[str], str]:
        def cell(name: str) -> str:
            gains = [one.base / route(one) for one in groups[name]]
            return f"{min(gains):.2f}, {mean(gains):.2f}, {max(gains):.2f}"

        return cell

    return Table.of(
        "Parm: predicted time of the layer, baseline over S1, S2 and the faster one (least, mean, most)",
        groups,
        [
            ("layers", str),
            ("number", lambda name: str(len(groups[name]))),
            ("S1", gain(lambda one: one.s1)),
            ("S2", gain(lambda one: one.s2)),
            ("faster", gain(lambda one: one.best)),
        ],
        f"Forward and backward together, each by its faster route. The paper measured {_PAPER} over DeepSpeed-MoE on"
        " 1296 layers of its own; neither which they are nor its constants are public, so only the size of the range"
        " can be compared. Without an MP group only the gather and the all-reduce of shards are saved; with MP 4 rows"
        " shrink fourfold besides. Predictions lie above the measurements at both ends: work within a GPU that all"
        " routes share (sorting, launches) is not priced, and the baseline's all-reduce is taken as a reduce-scatter"
        " and a gather, each at its own speed.",
    )


def _selector(layers: Layers) -> Table:
    groups = {ranks: [one for grid, one in layers if grid.num_ranks == ranks] for ranks in (8, 32)}
    forward = {ranks: Counter(one.ways[0] for one in some) for ranks, some in groups.items()}
    against = {ranks: [one.best / one.fsmoe for one in some] for ranks, some in groups.items()}
    return Table.of(
        "Parm: which route, and what a fixed choice loses at most",
        groups,
        [
            ("layers", lambda ranks: f"{ranks} GPUs"),
            ("S1 / S2 forward", lambda ranks: f"{forward[ranks]['s1']} / {forward[ranks]['s2']}"),
            ("other in backward", lambda ranks: str(sum(len(set(one.ways)) > 1 for one in groups[ranks]))),
            ("always S1 loses", lambda ranks: f"{max(one.s1 / one.best - 1 for one in groups[ranks]):.1%}"),
            ("always S2 loses", lambda ranks: f"{max(one.s2 / one.best - 1 for one in groups[ranks]):.1%}"),
            ("time over FSMoE, median", lambda ranks: f"{median(against[ranks]):.2f}"),
            ("FSMoE faster in", lambda ranks: f"{mean(ratio > 1 for ratio in against[ranks]):.0%}"),
        ],
        "FSMoE: experts and shards on separate wires in chunks, the best number by simulation; the column is Parm's"
        " time over FSMoE's. On one node both use one wire.",
    )
