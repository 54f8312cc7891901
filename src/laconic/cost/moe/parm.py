"""Parm's routes: layers inside an MP group, where the input is the same on all ranks, with and without repeated work.

Three routes compute the same (arXiv 2407.00599; all sizes per rank, c = k*f, n = B*L rows of M elements, in the order
of forward):

    baseline  all_gather_esp(n), gate, all_to_all_ep(c*n*N_ESP), experts, all_reduce_esp(c*n*N_ESP),
              all_to_all_ep(c*n*N_ESP), split
    s1        split, gate, all_to_all_joint(c*n*N_ESP/N_MP), experts, all_to_all_joint(same), sum of shards,
              all_gather_mp(n)
    s2        gate, split, all_to_all_joint(c*n*N_ESP/N_MP), experts, all_to_all_joint(same) while
              all_gather_mp(c*n) goes on behind it (SAA)

Backward transposes each step: an all-to-all is its own transpose, a split becomes an all-gather and the other way
round, the sum over shards and the copy to them change places. So s1 and s2 send the same in both directions; the
baseline gathers rows instead of tokens. Sums of the gate's gradient over MP ranks are left out: they join those of the
other replicated parameters.
"""

from __future__ import annotations

from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.routes import Route, RouteBuilder, Step
from laconic.cost.moe.shape import LayerShape, group_shape
from laconic.topology import GridLayout

BASELINE, S1, S2 = "baseline", "s1", "s2"
"""Names of Parm's routes through a layer: the baseline and its two schedules."""


def parm_routes(
    shape: LayerShape,
    grid: GridLayout,
    rates: MoERates,
    *,
    backward: bool = False,
    coding: Coding | None = None,
    load: float = 1.0,
) -> tuple[Route, Route, Route]:
    """Price baseline, S1 and S2 of a layer, in one direction.

    Args:
        coding: of the rows in all-to-alls.
        load: rows of the busiest expert rank over the mean.

    Raises:
        ConfigError: the grid does not divide the layer, or the code was not measured.
    """
    build = RouteBuilder(shape, grid, rates, coding, load, backward)
    return _baseline(build), _s1(build), _s2(build)


def saa_seconds(all_to_all_seconds: float, all_gather_seconds: float, num_ranks: int, overlap: float = 1.0) -> float:
    """Predict an all-to-all of `num_ranks` whose received chunks are gathered while the next ones arrive (SAA).

    With a per step of the all-to-all and g per slot of the gather, (P - 1) * max(a, g) + g, where only the share
    `overlap` of the shorter one overlaps: 0 is one after the other.
    """
    if num_ranks == 1:
        return all_to_all_seconds + all_gather_seconds
    step, slot = all_to_all_seconds / (num_ranks - 1), all_gather_seconds / num_ranks
    return all_to_all_seconds + all_gather_seconds - overlap * (num_ranks - 1) * min(step, slot)


def _baseline(build: RouteBuilder) -> Route:
    shape, esp = build.shape, build.grid.esp
    rows = shape.rows_nbytes * esp * build.load
    gate, experts = build.gate(esp), build.experts(1.0)
    order, inverse = build.order("order", esp), build.order("inverse order", 1.0)
    dispatch = build.between("dispatch", "all_to_all", "ep", rows)
    combine = build.between("combine", "all_to_all", "ep", rows)
    total = build.between("sum shards", "all_reduce", "esp", rows)
    if build.backward:  # the split's transpose gathers rows; that of the gather of equal tokens is free
        gather = build.between("gather gradients", "all_gather", "esp", shape.rows_nbytes)
        return Route(BASELINE, (inverse, gather, combine, experts, total, dispatch, order, gate))
    gather = build.between("gather tokens", "all_gather", "esp", shape.tokens_nbytes)
    return Route(BASELINE, (gather, gate, order, dispatch, experts, total, combine, inverse))


def _s1(build: RouteBuilder) -> Route:
    mp = build.grid.mp
    gate, order, inverse = build.gate(1 / mp), build.order("order", 1 / mp), build.order("inverse order", 1 / mp)
    dispatch, experts, combine, total = _joint(build)
    gather = build.between("gather tokens", "all_gather", "mp", build.shape.tokens_nbytes / mp)
    if build.backward:
        return Route(S1, (inverse, combine, experts, dispatch, total, order, gate, gather))
    return Route(S1, (gate, order, dispatch, experts, combine, total, inverse, gather))


def _s2(build: RouteBuilder) -> Route:
    gate, order, inverse = build.gate(1.0), build.order("order", 1.0), build.order("inverse order", 1.0)
    dispatch, experts, combine, total = _joint(build)
    gather = build.between("gather rows", "all_gather", "mp", build.shape.rows_nbytes / build.grid.mp)
    joint, mp = group_shape(build.grid, "joint"), group_shape(build.grid, "mp")
    apart = joint.num_nodes > 1 and mp.num_nodes == 1  # two networks; on one, nothing overlaps
    last = dispatch if build.backward else combine
    saa = saa_seconds(last.seconds, gather.seconds, joint.num_ranks, build.rates.overlap if apart else 0.0)
    overlapped = last.seconds + gather.seconds - saa
    if build.backward:
        return Route(S2, (inverse, combine, experts, dispatch, total, gather, order, gate), overlapped)
    return Route(S2, (gate, order, dispatch, experts, combine, total, gather, inverse), overlapped)


def _joint(build: RouteBuilder) -> tuple[Step, Step, Step, Step]:
    """Return dispatch, experts, combine and sum over shards of s1 and s2: each row goes to all shards of its expert."""
    grid = build.grid
    copies = grid.esp / grid.mp
    nbytes = build.shape.rows_nbytes * copies * build.load
    return (
        build.between("dispatch", "all_to_all", "joint", nbytes),
        build.experts(1 / grid.mp),
        build.between("combine", "all_to_all", "joint", nbytes),
        build.order("sum shards", copies),
    )
