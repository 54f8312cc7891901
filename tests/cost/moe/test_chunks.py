"""Routes in chunks: what is cut, what hides behind what, and how much of it counts."""

from __future__ import annotations

import pytest

from laconic.cost.comm.rates import Line
from laconic.cost.moe import GridLayout, LayerShape, MoERates, Route, Step, parm_routes
from laconic.cost.moe.chunks import hidden_in_chunks, in_chunks
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes, pipeline_seconds

GATE, ORDER = Step("gate", 0.5), Step("order", 0.25)


def wire(name: str, seconds: float, start: float, operation: str = "all_to_all") -> Step:
    return Step(name, seconds, "ep", operation, start_seconds=start)


FLAT = Route("flat", (GATE, wire("dispatch", 4.0, 0.5), Step("experts", 6.0, start_seconds=1.0), wire("combine", 4, 1)))
LEVELS = Route(
    "depth 2",
    (
        GATE,
        wire("dispatch inter1", 4.0, 0.5),
        wire("dispatch intra1", 1.0, 0.25),
        Step("experts", 6.0),
        ORDER,
        wire("combine intra1", 1.0, 0.25),
        wire("combine inter1", 4.0, 0.5),
    ),
)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_cut_route_takes_what_the_simulator_says(degree: int) -> None:
    cut = in_chunks(FLAT, degree, degree, 1.0)
    times = LayerTimes(ChunkTime(0.5, 3.5), ChunkTime(1.0, 5.0), ChunkTime(1.0, 3.0))
    assert cut.seconds == pytest.approx(0.5 + pipeline_seconds(times, degree))
    assert cut.degree == degree
    cut = in_chunks(LEVELS, degree, degree, 1.0)
    inner = ChunkTime(0.25, 0.75)
    times = LayerTimes(ChunkTime(0.5, 3.5), ChunkTime(0.0, 6.0), ChunkTime(0.5, 3.5), inner, inner)
    assert cut.seconds == pytest.approx(0.75 + pipeline_seconds(times, degree))
    one_wire = in_chunks(LEVELS, degree, degree, 1.0, one_wire=True)
    assert one_wire.seconds == pytest.approx(0.75 + pipeline_seconds(times, degree, one_wire=True))


def test_only_the_share_that_is_hidden_counts_and_every_chunk_pays_its_start() -> None:
    serial = FLAT.seconds + 3 * (0.5 + 1.0 + 1.0)
    hidden = hidden_in_chunks(FLAT, 4, 4)
    assert hidden > 0
    for share in (0.0, 0.5, 1.0):
        assert in_chunks(FLAT, 4, 4, share).seconds == pytest.approx(serial - share * hidden)
    assert hidden_in_chunks(FLAT, 1, 1) == pytest.approx(0.0)


def test_experts_run_in_the_slices_of_both_directions() -> None:
    """Two chunks of two slices each start the experts four times."""
    two, finer = (in_chunks(FLAT, 2, num_slices, 0.0) for num_slices in (2, 4))
    assert finer.seconds == pytest.approx(two.seconds + 2 * 1.0)
    whole = in_chunks(FLAT, 1, 4, 1.0)
    assert whole.seconds == pytest.approx(FLAT.seconds + 3 * 1.0)


def test_inside_mp_groups_sums_and_gathers_are_cut_too() -> None:
    layer, grid = LayerShape(256, 64, 128, 8, 2), GridLayout(8, 4, 2, 4, ranks_per_node=4)
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    lines = {"node": dict.fromkeys(names, Line(1e-5, 1e-9)), "across": dict.fromkeys(names, Line(1e-4, 1e-8))}
    lines["all"] = lines["across"]
    rates = MoERates.of_lines(lines, Line(1e-5, 1e-11))
    for backward in (False, True):
        baseline, _, s2 = parm_routes(layer, grid, rates, backward=backward)
        steps = {step.name: step.chunk_time for step in baseline.steps}
        times = LayerTimes(
            steps["dispatch"], steps["experts"], steps["combine"], ChunkTime(0.0, 0.0), steps["sum shards"]
        )
        cut = sum(
            step.seconds for step in baseline.steps if step.name in ("dispatch", "experts", "combine", "sum shards")
        )
        expected = baseline.seconds - cut + pipeline_seconds(times, 4)
        assert in_chunks(baseline, 4, 4, 1.0).seconds == pytest.approx(expected)
        steps = {step.name: step.chunk_time for step in s2.steps}
        times = LayerTimes(steps["dispatch"], steps["experts"], steps["combine"], share=steps["gather rows"])
        cut = sum(step.seconds for step in s2.steps if step.name in ("dispatch", "experts", "combine", "gather rows"))
        expected = s2.seconds + s2.hidden_seconds - cut + pipeline_seconds(times, 4)
        assert in_chunks(s2, 4, 4, 1.0).seconds == pytest.approx(expected)
