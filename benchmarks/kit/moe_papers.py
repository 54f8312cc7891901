"""The layers and constants that FSMoE, Parm and HierMoE publish, in the terms of our cost models; schedules by price.

Everything is arithmetic. Nothing is tuned to the papers' results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from laconic.cost.comm.rates import Line, LinkRates, WireRates
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.moe import GridLayout, LayerShape, MoERates, Route, fsmoe_route, parm_routes
from laconic.cost.moe.shape import group_shape
from laconic.schedule.moe_gradients import BackwardPart, fill_slots
from laconic.schedule.moe_pipeline import DEGREES, ChunkTime, LayerTimes, best_degree, pipeline_seconds
from laconic.topology import Levels


def line_of_ms(alpha: float, beta: float) -> Line:
    """A fitted line from milliseconds, and milliseconds per unit of volume."""
    return Line(1e-3 * alpha, 1e-3 * beta)


def chunk_time(line: Line, volume: float, calls: int = 1) -> ChunkTime:
    """What `calls` operations that share a volume take, by the number of chunks."""
    return ChunkTime(calls * line.alpha_seconds, calls * line.seconds_per_byte * volume)


# --- FSMoE: 1458 layers on each of two clusters ---


@dataclass(frozen=True)
class Cluster:
    """Constants of one testbed (arXiv 2501.10714, 4.1), its ranks per node and its sequence lengths."""

    name: str
    node: int
    lengths: tuple[int, ...]
    gemm: Line
    a2a: Line
    gather: Line
    scatter: Line
    reduce: Line
    unit: int = 1
    """Units of volume per element: whether betas are per element (1) or per byte (4) is not said."""
    published: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Mean speedup over Tutel of: its reduction beside the dense part; FSMoE on one wire; FSMoE."""


TESTBED_A = Cluster(
    name="A (48 A6000)",
    node=8,
    lengths=(512, 1024, 2048),
    gemm=line_of_ms(4.26e-2, 2.29e-11),
    a2a=line_of_ms(2.87e-1, 2.21e-7),
    gather=line_of_ms(3.37e-1, 2.32e-6),
    scatter=line_of_ms(3.95e-1, 2.34e-7),
    reduce=line_of_ms(5.11e-1, 4.95e-6),
    published=(1.09, 1.12, 1.18),
)
TESTBED_B = Cluster(
    name="B (32 RTX2080Ti)",
    node=4,
    lengths=(256, 512, 1024),
    gemm=line_of_ms(9.24e-2, 4.42e-11),
    a2a=line_of_ms(1.75e-1, 3.06e-7),
    gather=line_of_ms(3.20e-2, 1.68e-7),
    scatter=line_of_ms(3.91e-2, 1.67e-7),
    reduce=line_of_ms(8.37e-2, 5.99e-7),
    published=(1.08, 1.16, 1.22),
)
A_CORRECTED = replace(TESTBED_A, gather=line_of_ms(3.37e-1, 2.32e-7), reduce=line_of_ms(5.11e-1, 4.95e-7))
"""The printed beta of A's gather is ten times that of its scatter; so is that of its all-reduce."""

PAPER_DEGREES = (1, 2, 4, 8)
"""What FSMoE's planner rounds to."""

_SHORT_SECONDS = 1e-3


@dataclass(frozen=True)
class StackLayer:
    """One layer of a deep stack: its experts' part both ways, its dense part, and its dense gradients."""

    forward: LayerTimes
    backward: LayerTimes
    dense_seconds: tuple[float, float]
    gradient_volume: float

    @property
    def short(self) -> bool:
        """Whether FSMoE's planner takes one chunk, because a whole all-to-all takes less than 1 ms."""
        return self.forward.dispatch.seconds(1) < _SHORT_SECONDS


def fsmoe_layers(cluster: Cluster) -> Iterator[StackLayer]:
    """The 1458 layers: batch, heads, length, hidden, expert's hidden over hidden, capacity factor, matrix products.

    "No drop" is a capacity factor of 1. Nothing that is priced depends on the heads, so three layers are the same.
    """
    sizes = itertools.product((1, 2, 4), cluster.lengths, (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, 1.0), (2, 3))
    node, unit = cluster.node, cluster.unit
    for batch, length, hidden, wider, factor, products in sizes:
        tokens = batch * length
        rows = 2 * factor * tokens  # top-2
        inside = rows * hidden * unit
        a2a = chunk_time(cluster.a2a, inside / node)
        experts = chunk_time(cluster.gemm, rows * hidden * wider * hidden / node, products)
        gather, scatter = chunk_time(cluster.gather, inside), chunk_time(cluster.scatter, inside)
        forward = LayerTimes(a2a, experts, a2a, gather, scatter)
        # Attention: four projections and two products with scores, over the ranks of a node; the model-parallel
        # scatter before the gate and the gather after the layer.
        attention = 4 * cluster.gemm.seconds(tokens * hidden**2 / node)
        attention += 2 * cluster.gemm.seconds(batch * length**2 * hidden / node)
        parallel = cluster.gather.seconds(tokens * hidden * unit) + cluster.scatter.seconds(tokens * hidden * unit)
        layer = StackLayer(
            forward,
            forward.backward(),
            (attention + parallel, 2 * attention + parallel),
            4 * hidden**2 / node * unit,
        )
        yield from (layer,) * len((8, 16, 32))


def fsmoe_schedules(layer: StackLayer, reduce: Line, papers_rule: bool = False) -> dict[str, float]:
    """Seconds of one layer in a deep stack, by schedule; all do the same work.

    Dense gradients are reduced at the end of a layer ("nothing overlapped", "Tutel"), beside the dense part, or in the
    idle slots of the layer that comes next in backward.

    papers_rule: one chunk for the layers that are `short`, in FSMoE's schedules.
    """
    reduction = reduce.seconds(layer.gradient_volume)
    forward, backward = layer.dense_seconds
    directions = (layer.forward, layer.backward)
    dense, beside = forward + backward, forward + max(backward, reduction)
    whole = sum(pipeline_seconds(times, 1, shared_link=True) for times in directions)
    tutel = min(sum(pipeline_seconds(times, d, shared_link=True) for times in directions) for d in PAPER_DEGREES)
    parts = [
        BackwardPart("the layer before", layer.gradient_volume),
        BackwardPart("mixture", times=layer.backward),
        BackwardPart("dense", dense_seconds=backward),
    ]

    def slots(degrees: Iterable[int], shared_link: bool = False) -> float:
        chosen = best_degree(layer.forward, degrees=degrees, shared_link=shared_link).seconds
        return forward + chosen + fill_slots(parts, reduce, degrees, shared_link=shared_link).seconds

    degrees = (1,) if papers_rule and layer.short else PAPER_DEGREES
    return {
        "nothing overlapped (DeepSpeed-MoE)": whole + dense + reduction,
        "nothing, reduction beside dense": whole + beside,
        "always 2 chunks, gradients in slots": slots((2,)),
        "always 4 chunks, gradients in slots": slots((4,)),
        "Tutel with PipeMoE": tutel + dense + reduction,
        "Tutel, reduction beside dense": tutel + beside,
        "FSMoE, one wire": slots(degrees, shared_link=True),
        "FSMoE": slots(degrees),
        "ours": slots((1,) if papers_rule and layer.short else DEGREES),
    }


# --- Parm: 1296 layers on 8 and 32 GPUs ---

_RANKS_PER_NODE = {8: 8, 32: 4}


def parm_layers() -> Iterator[tuple[GridLayout, LayerShape]]:
    """2 * 8 * 3 * 3 * 3 * 3 = 1296 layers, one expert for each rank of an EP group, top-2 with capacity factor 1.2.

    The paper's own layers are not public: the number and the two clusters are its own. To our models, layers of equal
    batch times length are the same, so 720 of them differ.
    """
    parallel = [(mp, esp) for mp in (1, 2, 4) for esp in (1, 2, 4) if (mp, esp) != (1, 1)]
    sizes = itertools.product((8, 32), parallel, (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (2, 3, 4))
    for ranks, (mp, esp), batch, length, model_dim, ratio in sizes:
        grid = GridLayout(ranks, mp=mp, ep=ranks // esp, esp=esp, ranks_per_node=_RANKS_PER_NODE[ranks])
        yield grid, LayerShape(batch * length, model_dim, ratio * model_dim, grid.ep, 2, 2, 2, 1.2)


def parm_rates(grid: GridLayout) -> MoERates:
    """FSMoE's fit of testbed B, of the same authors and kind as Parm's, in bytes that a process sends.

    The fit counts a rank's largest buffer: a gather's is its output, the others' their input. All-to-alls inside a node
    take the gather's line; an all-reduce is a reduce-scatter and a gather.
    """
    inside_lines = {"all_gather": TESTBED_B.gather, "reduce_scatter": TESTBED_B.scatter}

    def link(group: str) -> LinkRates:
        members = group_shape(grid, group)

        def line(operation: str, alpha: float, beta: float) -> Line:
            buffer = 1.0 / members.num_ranks if operation == "all_gather" else 1.0
            return Line(alpha, beta / sent_nbytes(operation, buffer, members.num_ranks))

        def of(operation: str, *fits: Line) -> Line:
            return line(operation, sum(f.alpha_seconds for f in fits), sum(f.seconds_per_byte for f in fits))

        lines = {name: of(name, fit) for name, fit in inside_lines.items()}
        lines["all_reduce"] = of("all_reduce", *inside_lines.values())
        lines["all_to_all"] = of("all_to_all", TESTBED_B.gather if members.num_nodes == 1 else TESTBED_B.a2a)
        return LinkRates(members.num_ranks, lines, 0.0, 0.0)

    groups = {name: link(name) for name in ("mp", "esp", "ep", "joint") if group_shape(grid, name).num_ranks > 1}
    return MoERates(WireRates({"all": next(iter(groups.values()))}, {}), TESTBED_B.gemm, groups=groups)


@cache
def parm_plans(grid: GridLayout, shape: LayerShape) -> Mapping[str, float]:
    """Seconds of one layer forward and backward, by plan.

    Ours is the fastest of the paths S1, S2 (a direction each, if that is faster) and FSMoE's, whole or in chunks.
    "Path first" cuts the path that is fastest whole, and no other.
    """
    rates, directions = parm_rates(grid), (False, True)
    both = [parm_routes(shape, grid, rates, backward=backward) for backward in directions]
    base, s1, s2 = (sum(route.seconds for route in routes) for routes in zip(*both, strict=True))
    sharded = [fsmoe_route(shape, grid, rates, degree=1, backward=backward) for backward in directions]
    fsmoe = sum(fsmoe_route(shape, grid, rates, backward=backward).seconds for backward in directions)
    cut = [[_in_chunks(route, grid) for route in routes[1:]] for routes in both]
    whole = {
        "parm": sum(min(route.seconds for route in routes[1:]) for routes in both),
        "fsmoe": sum(route.seconds for route in sharded),
    }
    chunked = {"parm": sum(map(min, cut)), "fsmoe": fsmoe}
    return {
        "baseline": base,
        "s1": s1,
        "s2": s2,
        "parm": whole["parm"],
        "fsmoe whole": whole["fsmoe"],
        "fsmoe": fsmoe,
        "path first": chunked[min(whole, key=lambda name: whole[name])],
        "ours": min(chunked.values()),
    }


def _in_chunks(route: Route, grid: GridLayout) -> float:
    """Seconds of S1 or S2 with exchange, experts and S2's gather in the best number of chunks, or whole."""
    inner = {step.name: step for step in route.steps if step.name in ("dispatch", "experts", "combine", "gather rows")}
    share = inner["gather rows"].chunk_time if "gather rows" in inner else None
    times = LayerTimes(*(inner[name].chunk_time for name in ("dispatch", "experts", "combine")), share=share)
    rest = route.seconds + route.overlapped_seconds - sum(step.seconds for step in inner.values())
    apart = group_shape(grid, "joint").num_nodes > 1 and group_shape(grid, "mp").num_nodes == 1
    return min(route.seconds, rest + best_degree(times, shared_link=not apart).seconds)


# --- HierMoE: 32 GPUs in 4 nodes of 2 sockets of 2 pairs ---

HIERMOE_CLUSTER = Levels(32, (1, 4, 8, 16))
HIERMOE_FITS = {  # arXiv 2508.09591: milliseconds, and per byte of a rank's buffer; ranks that talk to each other
    "intra0": (0.722, 5.70e-7, 32),
    "inter1": (0.497, 5.29e-7, 4),
    "intra1": (0.571, 1.27e-7, 8),
    "inter2": (0.301, 1.17e-7, 2),
    "intra2": (0.114, 2.63e-8, 4),
    "inter3": (0.149, 2.06e-8, 2),
    "intra3": (0.204, 1.64e-8, 2),
}


def hiermoe_rates() -> MoERates:
    """`HIERMOE_FITS` in bytes that a process sends: of a rank's buffer one part of `peers` stays there."""
    groups = {
        name: LinkRates(peers, {"all_to_all": line_of_ms(alpha, beta * peers / (peers - 1))}, 0.0, 0.0)
        for name, (alpha, beta, peers) in HIERMOE_FITS.items()
    }
    return MoERates(WireRates({"all": groups["intra0"]}, {}), Line(0.0, 0.0), groups=groups)
