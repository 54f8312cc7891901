"""Every way through a layer priced: what the parts say, which paths a grid has, what skew and shared wires change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from laconic.cost.comm.rates import CodecRates, Line
from laconic.cost.moe import GridLayout, LayerShape, MoERates, fsmoe_route, parm_routes
from laconic.cost.moe.hierarchy import RowCounts, busiest_rows
from laconic.cost.moe.overhead import Overhead
from laconic.cost.moe.routes_text import candidates_text
from laconic.cost.moe.search import FLAT, OVERHEAD, CostModel, LayerPlan, best_candidate, best_plan, overhead_size
from laconic.errors import ConfigError
from laconic.topology import Levels

SHAPE = LayerShape(num_tokens=64, model_dim=32, hidden_dim=48, num_experts=8, top_k=4)
NODES = Levels(4, (1, 2), 2)
ALONE = GridLayout(4, ep=4, ranks_per_node=2)
INSIDE = GridLayout(4, mp=2, ep=2, esp=2, ranks_per_node=2)
COUNTS = RowCounts.uniform(64, 8, 4, NODES)


def rates(alpha: float = 1e-3, beta: float = 1e-7, gemm: Line | None = None, **others: object) -> MoERates:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    lines = {kind: dict.fromkeys(names, Line(alpha, beta)) for kind in ("all", "across", "node")}
    return replace(MoERates.of_lines(lines, gemm or Line(0.0, 0.0), world=4), **others)  # type: ignore[arg-type]


def test_a_path_takes_what_its_parts_take() -> None:
    around = {"forward": Overhead(5e-4, 1e-6, 1e-9), "backward": Overhead(1e-4)}
    products = Line(1e-4, 1e-9)
    cost_model = CostModel(SHAPE, ALONE, rates(gemm=products, overheads={"flat raw": around}), COUNTS)
    flat = cost_model.candidate(LayerPlan(FLAT))
    rows = 64 * 4
    wires = 2 * (1e-3 + rows * 3 / 4 * SHAPE.row_nbytes * 1e-7)
    multiply_adds = 64 * 32 * 8, 3 * rows * 32 * 48  # of the gate, and of the experts
    forward = 1e-4 + 3e-4 + sum(multiply_adds) * 1e-9 + wires
    forward += 5e-4 + 2 * rows * 1e-6 + 2 * rows * SHAPE.row_nbytes * 1e-9
    assert flat.forward.seconds == pytest.approx(forward)
    assert flat.backward.seconds == pytest.approx(2 * (1e-4 + 3e-4 + sum(multiply_adds) * 1e-9) + wires + 1e-4)
    assert flat.plus(1e-3, -1e-4).seconds == pytest.approx(flat.seconds + 9e-4)
    assert overhead_size(FLAT, SHAPE, ALONE, COUNTS) == (2 * rows, 2 * rows * SHAPE.row_nbytes)


def test_a_grid_has_the_paths_that_differ_on_it() -> None:
    assert CostModel(SHAPE, ALONE, rates(), COUNTS).paths == ["flat", "depth 1", "depth 2"]
    assert CostModel(SHAPE, INSIDE, rates()).paths == ["baseline", "s1", "s2", "sharded"]
    with pytest.raises(ConfigError, match="counts are missing with mp = 1 and esp = 1"):
        CostModel(SHAPE, ALONE, rates())
    with pytest.raises(ConfigError, match="counts are given with mp = 2 and esp = 2"):
        CostModel(SHAPE, INSIDE, rates(), COUNTS)


def test_inside_mp_groups_prices_are_those_of_parm_and_fsmoe() -> None:
    cost_model = CostModel(SHAPE, INSIDE, rates(), load=1.5)
    for backward in (False, True):
        routes = parm_routes(SHAPE, INSIDE, rates(), backward=backward, load=1.5)
        for route in routes:
            one = cost_model.candidate(LayerPlan(route.name))
            assert (one.backward if backward else one.forward).seconds == pytest.approx(route.seconds)
        sharded = fsmoe_route(SHAPE, INSIDE, rates(), degree=1, backward=backward, load=1.5)
        one = cost_model.candidate(LayerPlan("sharded"))
        assert (one.backward if backward else one.forward).seconds == pytest.approx(sharded.seconds)


def test_the_best_is_the_fastest_and_of_equals_the_plainest() -> None:
    cost_model = CostModel(SHAPE, ALONE, rates(0.0, 1e-6), COUNTS)
    ranked = cost_model.candidates()
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert best_candidate(reversed(ranked)) == ranked[0]
    assert ranked[-1].plan.path == "flat"  # duplicates travel
    text = candidates_text(ranked, "a layer", {ranked[1].plan: 1.0, ranked[0].plan: 2.0})
    assert text.startswith("a layer\n\npath")
    assert f"choice: {ranked[1].plan}: 2 were run, and it was the fastest" in text
    assert f"choice: {ranked[0].plan}: " in candidates_text(ranked)
    assert all(step.name != OVERHEAD or step.seconds == 0 for step in ranked[0].forward.steps)
    with pytest.raises(ConfigError, match="candidates are empty"):
        best_candidate([])


def test_what_is_more_complicated_has_to_win_clearly() -> None:
    flat, depth = LayerPlan(FLAT), LayerPlan("depth 1")
    cut, coded = replace(flat, degree=4), replace(flat, code="tiered")
    assert best_plan({depth: 1.0, flat: 1.019}) == flat
    assert best_plan({depth: 1.0, flat: 1.021}) == depth
    assert best_plan({coded: 1.0, depth: 1.01, flat: 1.015}) == flat
    assert best_plan({cut: 1.0, flat: 1.049, depth: 1.049}) == flat
    assert best_plan({cut: 1.0, flat: 1.051}) == cut
    both = LayerPlan("depth 2", code="tiered")
    between = replace(both, inner_code="raw")
    assert best_plan({both: 1.0, between: 1.01}) == between
    assert best_plan({replace(flat, degree=4): 1.0, replace(flat, degree=2): 1.01}).degree == 2
    text = candidates_text(CostModel(SHAPE, ALONE, rates(), COUNTS).candidates(), "", {depth: 1.0, flat: 1.01})
    assert "choice: flat: plainer than depth 1, which takes 1.0% less, of 2 that were run" in text


def test_rows_may_be_coded_between_nodes_alone() -> None:
    codec = CodecRates(Line(0.0, 1e-9), Line(0.0, 1e-9), Line(0.0, 1e-9), 1.5)
    known = replace(rates(), codecs={"bfloat16": {"int8": codec}})
    cost_model = CostModel(SHAPE, ALONE, known, COUNTS)
    found = {(one.plan.path, one.plan.rows): one for one in cost_model.candidates(("raw", "int8"))}
    paths = ("flat", "depth 1", "depth 2")
    mixed = ("depth 2", "int8, raw inside")
    assert set(found) == {(path, code) for path in paths for code in ("raw", "int8")} | {mixed}
    for name, code in (("inter1", "int8"), ("intra1", "raw")):
        for way in ("dispatch", "combine"):
            steps = {one: step for one in found for step in found[one].forward.steps if step.name == f"{way} {name}"}
            assert steps[mixed] == steps["depth 2", code]
            assert steps[mixed].code == code
    dear = {way: Overhead(1.0) for way in ("forward", "backward")}
    measured = replace(
        known, overheads={"depth 2 int8, raw inside": dear, "depth 2 raw": {w: Overhead(0.0) for w in dear}}
    )
    found = {one.plan.rows: one.seconds for one in replace(cost_model, rates=measured).candidates(("raw", "int8"))[-7:]}
    assert found["int8, raw inside"] > 2 > found["int8"]


def test_the_busiest_rank_sends_or_receives_most() -> None:
    assert busiest_rows(np.full((4, 4), 10.0)) == 30
    sent = np.zeros((4, 4))
    sent[0, 2], sent[1, 1] = 60.0, 90.0  # what stays on its rank does not travel
    assert busiest_rows(sent) == busiest_rows(sent.T) == 60
