"""What Parm's routes would save on paper: 1296 layers on 8 and 32 GPUs, priced with published constants.

The paper's own grid and constants are not public. The grid here has its size and its two clusters; the constants are
those that FSMoE (arXiv 2501.10714, 4.1) fitted on its testbed B, 8 nodes of 4 GPUs, of the same group and kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean, median

from benchmarks.registry import Options, Table, benchmark
from laconic.cost.comm.rates import Line, LinkRates, WireRates
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.moe import GridLayout, LayerShape, MoERates, Route, fastest, fsmoe_route, parm_routes
from laconic.cost.moe.shape import group_world

# FSMoE's fit for testbed B, milliseconds: alpha, and beta per byte of the largest buffer of a rank. The all-to-all is
# between nodes, gather and scatter inside one; an all-reduce inside a node is taken as the two after each other.
_BETWEEN = (1.75e-1, 3.06e-7)
_INSIDE = {"all_gather": (3.20e-2, 1.68e-7), "reduce_scatter": (3.91e-2, 1.67e-7)}
_GEMM = (9.24e-2, 4.42e-11)
_RANKS_PER_NODE = {8: 8, 32: 4}

_PAPER = "1.13 to 5.77"


@benchmark("moe-parm")
def moe_parm(options: Options) -> list[Table]:
    """The two tables."""
    layers = list(_layers())
    if options.elements < 1 << 20:
        layers = layers[::81]
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
        world = group_world(grid, group)
        inside = world.num_nodes == 1

        def line(operation: str, alpha: float, beta: float) -> Line:
            buffer = 1.0 / world.num_ranks if operation == "all_gather" else 1.0
            return Line(1e-3 * alpha, 1e-3 * beta / sent_nbytes(operation, buffer, world.num_ranks))

        lines = {name: line(name, *fit) for name, fit in _INSIDE.items()}
        both = [sum(values) for values in zip(*_INSIDE.values(), strict=True)]
        lines["all_reduce"] = line("all_reduce", both[0], both[1])
        lines["all_to_all"] = line("all_to_all", *(_INSIDE["all_gather"] if inside else _BETWEEN))
        return LinkRates(world.num_ranks, lines, 0.0, 0.0)

    groups = {name: link(name) for name in ("mp", "esp", "ep", "joint") if grid.size(name) > 1}
    wire = WireRates({"all": next(iter(groups.values()))}, {})
    return MoERates(wire, Line(1e-3 * _GEMM[0], 1e-3 * _GEMM[1]), groups=groups)


def _priced(grid: GridLayout, shape: LayerShape, backward: bool) -> tuple[Route, ...]:
    return parm_routes(shape, grid, _rates(grid), backward=backward)


def _speedups(layers: Sequence[tuple[GridLayout, LayerShape]]) -> Table:
    rows = []
    for ranks, mp in product((8, 32), (1, 2, 4)):
        some = [layer for layer in layers if layer[0].num_ranks == ranks and layer[0].mp == mp]
        rows.append(_row(f"{ranks} GPUs, MP {mp}", some))
    rows.append(_row("all", layers))
    note = (
        f"Forward and backward together, each by its faster route. The paper measured {_PAPER} over DeepSpeed-MoE on"
        " 1296 layers of its own; neither which they are nor its constants are public, so only the size of the range"
        " can be compared. Without an MP group only the gather and the all-reduce of shards are saved; with MP 4 rows"
        " shrink fourfold besides. Predictions lie above the measurements at both ends: work within a GPU that all"
        " routes share (sorting, launches) is not priced, and the baseline's all-reduce is taken as a reduce-scatter"
        " and a gather, each at its own speed."
    )
    return Table(
        "Parm: predicted time of the layer, baseline over S1, S2 and the faster one (least, mean, most)",
        ["layers", "number", "S1", "S2", "faster"],
        rows,
        note,
    )


def _row(name: str, layers: Sequence[tuple[GridLayout, LayerShape]]) -> list[str]:
    gains: dict[str, list[float]] = {"s1": [], "s2": [], "best": []}
    for grid, shape in layers:
        both = [_priced(grid, shape, backward) for backward in (False, True)]
        base = sum(routes[0].seconds for routes in both)
        gains["s1"].append(base / sum(routes[1].seconds for routes in both))
        gains["s2"].append(base / sum(routes[2].seconds for routes in both))
        gains["best"].append(base / sum(fastest(routes[1:]).seconds for routes in both))
    cells = [f"{min(some):.2f}, {mean(some):.2f}, {max(some):.2f}" for some in gains.values() if some]
    return [name, str(len(layers)), *cells]


def _selector(layers: Sequence[tuple[GridLayout, LayerShape]]) -> Table:
    rows = []
    for ranks in (8, 32):
        chosen: dict[str, int] = {"s1": 0, "s2": 0}
        differ, lost, against = 0, [], []
        some = [layer for layer in layers if layer[0].num_ranks == ranks]
        for grid, shape in some:
            both = [_priced(grid, shape, backward) for backward in (False, True)]
            ways = [fastest(routes[1:]).name for routes in both]
            chosen[ways[0]] += 1
            differ += ways[0] != ways[1]
            best = sum(fastest(routes[1:]).seconds for routes in both)
            fixed = [sum(routes[i].seconds for routes in both) for i in (1, 2)]
            lost.append([seconds / best - 1 for seconds in fixed])
            pipelined = sum(
                fsmoe_route(shape, grid, _rates(grid), backward=backward).seconds for backward in (False, True)
            )
            against.append(best / pipelined)
        rows.append(
            [
                f"{ranks} GPUs",
                f"{chosen['s1']} / {chosen['s2']}",
                str(differ),
                *(f"{max(values):.1%}" for values in zip(*lost, strict=True)),
                f"{median(against):.2f}",
                f"{mean(ratio > 1 for ratio in against):.0%}",
            ]
        )
    return Table(
        "Parm: which route, and what a fixed choice loses at most",
        [
            "layers",
            "S1 / S2 forward",
            "other in backward",
            "always S1 loses",
            "always S2 loses",
            "time over FSMoE, median",
            "FSMoE faster in",
        ],
        rows,
        "FSMoE: experts and shards on separate wires in chunks, the best number by simulation; the column is Parm's"
        " time over FSMoE's. On one node both use one wire.",
    )
