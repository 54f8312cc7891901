"""FSMoE's route: its volumes, its chunks and what they hide."""

from __future__ import annotations

import pytest

from laconic.cost.comm.rates import Line
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.moe import GridLayout, LayerShape, MoERates, fsmoe_route, layer_times, parm_routes, shares_link
from laconic.errors import ConfigError, ScheduleError
from laconic.schedule.moe_pipeline import best_degree, pipeline_seconds
from tests.schedule.closed_forms import fsmoe

GRID = GridLayout(8, mp=4, ep=2, esp=4, ranks_per_node=4)
LAYER = LayerShape(4096, 64, 128, num_experts=8, top_k=2, capacity_factor=1.2)
INSIDE, BETWEEN = Line(1e-5, 1e-10), Line(1e-4, 1e-9)


def rates(gemm: Line = Line(2e-5, 1e-11)) -> MoERates:  # noqa: B008
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    return MoERates.of_lines(
        {"node": dict.fromkeys(names, INSIDE), "across": dict.fromkeys(names, BETWEEN)}, gemm, world=2
    )


@pytest.mark.parametrize("backward", [False, True])
def test_times_have_the_volumes_of_the_paper(backward: bool) -> None:
    """n_a2a = c*B*L*M / N_ESP, n_ag = n_rs = c*B*L*M, n_exp = c*B*L*M*H*g / N_ESP, as N_MP = N_ESP."""
    times = layer_times(LAYER, GRID, rates(), backward=backward)
    rows = 2 * 1.2 * 4096 * 64 * 2  # c*B*L*M in bytes
    all_to_all = BETWEEN.seconds_per_byte * sent_nbytes("all_to_all", rows / 4, 2)
    gather = INSIDE.seconds_per_byte * sent_nbytes("all_gather", rows / 4, 4)
    experts = 1e-11 * 3 * (rows / 2) * 128 / 4 * (2 if backward else 1)
    assert times.dispatch.work_seconds == pytest.approx(all_to_all)
    assert times.combine == times.dispatch
    assert times.all_gather is not None
    assert times.reduce_scatter is not None
    assert times.all_gather.work_seconds == pytest.approx(gather)
    assert times.reduce_scatter.work_seconds == pytest.approx(gather)
    assert times.experts.work_seconds == pytest.approx(experts)
    assert times.experts.alpha_seconds == pytest.approx(2e-5 * (6 if backward else 3))
    assert times.dispatch.alpha_seconds == pytest.approx(1e-4)
    assert times.all_gather.alpha_seconds == pytest.approx(3e-5)  # 2 ranks were measured, 4 take part


@pytest.mark.parametrize("backward", [False, True])
def test_the_route_is_its_pipeline_and_what_stands_around_it(backward: bool) -> None:
    found = rates()
    times = layer_times(LAYER, GRID, found, backward=backward)
    route = fsmoe_route(LAYER, GRID, found, backward=backward)
    best = best_degree(times)
    assert route.degree == best.degree > 1
    around = sum(s.seconds for s in route.steps if s.name in ("gate", "gather tokens", "order", "inverse order"))
    assert route.seconds == pytest.approx(best.seconds + around)
    assert fsmoe(times, route.degree) == pytest.approx(best.seconds)  # gather = scatter here
    whole = fsmoe_route(LAYER, GRID, found, degree=1, backward=backward)
    assert whole.overlapped_seconds == pytest.approx(0.0, abs=1e-12)
    assert whole.seconds > route.seconds
    assert whole.steps == route.steps


def test_gradients_lengthen_backward_by_what_no_window_hides() -> None:
    found = rates()
    seconds = [fsmoe_route(LAYER, GRID, found, backward=True, gradient_seconds=g).seconds for g in (0.0, 1e-5, 1.0)]
    assert seconds[0] <= seconds[1] <= seconds[0] + 1e-5
    assert seconds[2] > 1.0


def test_experts_that_are_not_sharded_have_no_gather() -> None:
    grid = GridLayout(4, ep=4, ranks_per_node=2)
    times = layer_times(LAYER, grid, rates())
    assert times.all_gather is None
    assert times.reduce_scatter is None
    baseline = parm_routes(LAYER, grid, rates())[0]
    assert fsmoe_route(LAYER, grid, rates(), degree=1).seconds == pytest.approx(baseline.seconds)


def test_one_wire_hides_less() -> None:
    assert not shares_link(GRID)
    together = GridLayout(8, mp=4, ep=2, esp=4)  # all ranks on one node
    assert shares_link(together)
    assert shares_link(GridLayout(8, ep=2, esp=4, ranks_per_node=2))
    times = layer_times(LAYER, together, rates(Line(0.0, 0.0)))
    route = fsmoe_route(LAYER, together, rates(Line(0.0, 0.0)), degree=4)
    outside = route.steps[-1].seconds
    assert route.seconds - outside == pytest.approx(pipeline_seconds(times, 4, shared_link=True))
    assert route.seconds - outside > pipeline_seconds(times, 4)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one chunk"):
        fsmoe_route(LAYER, GRID, rates(), degree=0)
    with pytest.raises(ConfigError, match="hidden_dim is 128, but it must be a multiple of esp = 3"):
        layer_times(LAYER, GridLayout(6, ep=2, esp=3), rates())
