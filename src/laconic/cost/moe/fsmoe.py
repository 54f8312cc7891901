"""FSMoE's route (arXiv 2501.10714): experts across nodes, their shards inside nodes, in overlapped chunks.

    split over MP, gate, [all_to_all_ep, all_gather_esp, experts, reduce_scatter_esp, all_to_all_ep] in r chunks,
    all_gather_mp

The part in brackets becomes the `LayerTimes` that laconic.schedule.moe_pipeline cuts into chunks. An all-to-all of a
rank has c*n/N_MP rows; the gather brings N_ESP times as many to each shard, the reduce-scatter sums their outputs.
"""

from __future__ import annotations

from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.routes import Route, RouteBuilder, Step
from laconic.cost.moe.shape import LayerShape, group_shape
from laconic.schedule.moe_pipeline import LayerTimes, best_degree, pipeline_seconds
from laconic.topology import GridLayout

FSMOE = "fsmoe"
"""Name of FSMoE's route through a layer."""


def layer_times(
    shape: LayerShape,
    grid: GridLayout,
    rates: MoERates,
    *,
    backward: bool = False,
    coding: Coding | None = None,
    load: float = 1.0,
) -> LayerTimes:
    """Predict the times of the layer's overlapped steps, in one direction; backward's experts already count twice.

    Every chunk pays a line's start-up; its bytes and multiply-adds are divided among them.

    Args:
        coding, load: see `parm_routes`.

    Raises:
        ConfigError: see `parm_routes`.
    """
    return _times(RouteBuilder(shape, grid, rates, coding, load, backward))


def shares_link(grid: GridLayout) -> bool:
    """Return whether all-to-alls and the gathers of shards would use the same links, so that they cannot overlap."""
    return group_shape(grid, "ep").num_nodes == 1 or group_shape(grid, "esp").num_nodes > 1


def fsmoe_route(
    shape: LayerShape,
    grid: GridLayout,
    rates: MoERates,
    *,
    degree: int | None = None,
    gradient_seconds: float = 0.0,
    backward: bool = False,
    coding: Coding | None = None,
    load: float = 1.0,
) -> Route:
    """Price the route with its best number of chunks, in one direction.

    Args:
        degree: number of chunks; None: the best one by simulation.
        gradient_seconds: of the dense gradients that are reduced inside (backward), beside the steps in
            `Route.seconds`.
        coding, load: see `parm_routes`.

    Raises:
        ConfigError: see `parm_routes`.
        ScheduleError: the degree is below 1.
    """
    build = RouteBuilder(shape, grid, rates, coding, load, backward)
    times, shared_link = _times(build), shares_link(grid)
    if degree is None:
        degree = best_degree(times, gradient_seconds, shared_link=shared_link).degree
    seconds = pipeline_seconds(times, degree, gradient_seconds, shared_link=shared_link)
    share = 1 / grid.mp
    inner = _inner(build)
    steps = [build.gate(share), build.order("order", share), *inner, build.order("inverse order", share)]
    gather = build.between("gather tokens", "all_gather", "mp", shape.tokens_nbytes * share)
    steps = [*steps[::-1], gather] if backward else [*steps, gather]
    return Route(FSMOE, tuple(steps), sum(step.seconds for step in inner) - seconds, degree)


def _inner(build: RouteBuilder) -> tuple[Step, Step, Step, Step, Step]:
    """Return the steps that are cut into chunks, uncut, in forward's order."""
    nbytes = build.shape.rows_nbytes / build.grid.mp * build.load
    return (
        build.between("dispatch", "all_to_all", "ep", nbytes),
        build.between("gather shards", "all_gather", "esp", nbytes),
        build.experts(1 / build.grid.mp),
        build.between("sum shards", "reduce_scatter", "esp", nbytes * build.grid.esp),
        build.between("combine", "all_to_all", "ep", nbytes),
    )


def _times(build: RouteBuilder) -> LayerTimes:
    dispatch, gather, experts, scatter, combine = (step.chunk_time for step in _inner(build))
    # Backward gathers and scatters in the same places, each being the other's transpose; the all-to-alls change places.
    if build.backward:
        dispatch, combine = combine, dispatch
    if build.grid.esp == 1:
        return LayerTimes(dispatch, experts, combine)
    return LayerTimes(dispatch, experts, combine, gather, scatter)
