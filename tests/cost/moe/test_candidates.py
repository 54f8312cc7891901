"""Every way through a layer priced: what the parts say, which paths a grid has, what skew and shared wires change."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from laconic.cost.comm.rates import CodecRates, Line, LinkRates
from laconic.cost.moe import GridLayout, LayerShape, MoERates, fsmoe_route, parm_routes
from laconic.cost.moe.hierarchy import RowCounts, count_vector, level_rows, rows_between, slowest_rows
from laconic.cost.moe.layer_time import LayerWork
from laconic.cost.moe.overhead import Overhead
from laconic.cost.moe.search import AROUND, FLAT, LayerPlan, Pricing, best_candidate, best_plan, overhead_size
from laconic.cost.moe.table import candidates_text
from laconic.errors import ConfigError
from laconic.topology import Levels

SHAPE = LayerShape(num_tokens=64, model_dim=32, hidden_dim=48, num_experts=8, top_k=4)
NODES = Levels(4, (1, 2), 2)
ALONE = GridLayout(4, ep=4, ranks_per_node=2)
INSIDE = GridLayout(4, mp=2, ep=2, esp=2, ranks_per_node=2)
WORK = LayerWork(Line(1e-4, 1e-6), Line(2e-4, 2e-6), Line(1e-3, 1e-6), Line(2e-3, 3e-6))
COUNTS = RowCounts.uniform(64, 8, 4, NODES)


def rates(alpha: float = 1e-3, beta: float = 1e-7, overlap: float = 1.0, **others: object) -> MoERates:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    links = {
        kind: LinkRates(4, {name: Line(alpha, beta) for name in names}, 0.0, overlap)
        for kind in ("all", "across", "node")
    }
    plain = MoERates.of_lines({kind: dict(link.operations) for kind, link in links.items()}, Line(0.0, 0.0), world=4)
    return replace(plain, wire=replace(plain.wire, links=links), **others)  # type: ignore[arg-type]


def test_a_path_takes_what_its_parts_take() -> None:
    around = {"forward": Overhead(5e-4, 1e-6, 1e-9), "backward": Overhead(1e-4)}
    pricing = Pricing(SHAPE, ALONE, rates(overheads={"flat raw": around}), WORK, COUNTS)
    flat = pricing.candidate(LayerPlan(FLAT))
    rows = 64 * 4
    sent = rows * 3 / 4 * SHAPE.row_nbytes
    forward = 1e-4 + 64e-6 + 1e-3 + rows * 1e-6 + 2 * (1e-3 + sent * 1e-7)
    forward += 5e-4 + 2 * rows * 1e-6 + 2 * rows * SHAPE.row_nbytes * 1e-9
    assert flat.forward.seconds == pytest.approx(forward)
    assert flat.backward.seconds == pytest.approx(
        2e-4 + 64 * 2e-6 + 2e-3 + rows * 3e-6 + 2 * (1e-3 + sent * 1e-7) + 1e-4
    )
    assert flat.plus(1e-3, -1e-4).seconds == pytest.approx(flat.seconds + 9e-4)
    assert overhead_size(FLAT, SHAPE, ALONE, COUNTS) == (2 * rows, 2 * rows * SHAPE.row_nbytes)


def test_a_grid_has_the_paths_that_differ_on_it() -> None:
    assert Pricing(SHAPE, ALONE, rates(), WORK, COUNTS).paths == [("flat", ""), ("depth 1", ""), ("depth 2", "")]
    inside = Pricing(SHAPE, INSIDE, rates(), WORK)
    assert [path for path, _ in inside.paths] == ["baseline", "s1", "s2", "s1", "s2", "sharded"]
    mixed = inside.candidate(LayerPlan("s1", "s2"))
    assert mixed.forward == inside.candidate(LayerPlan("s1")).forward
    assert mixed.backward == inside.candidate(LayerPlan("s2")).backward
    with pytest.raises(ConfigError, match="counts are missing with mp = 1 and esp = 1"):
        Pricing(SHAPE, ALONE, rates(), WORK)
    with pytest.raises(ConfigError, match="counts are given with mp = 2 and esp = 2"):
        Pricing(SHAPE, INSIDE, rates(), WORK, COUNTS)


def test_inside_mp_groups_prices_are_those_of_parm_and_fsmoe() -> None:
    pricing = Pricing(SHAPE, INSIDE, rates(), WORK, load=1.5)
    for backward in (False, True):
        routes = parm_routes(SHAPE, INSIDE, rates(), backward=backward, load=1.5, work=WORK)
        for route in routes:
            one = pricing.candidate(LayerPlan(route.name))
            assert (one.backward if backward else one.forward).seconds == pytest.approx(route.seconds)
        sharded = fsmoe_route(SHAPE, INSIDE, rates(), degree=1, backward=backward, load=1.5, work=WORK)
        one = pricing.candidate(LayerPlan("sharded"))
        assert (one.backward if backward else one.forward).seconds == pytest.approx(sharded.seconds)


def test_chunks_hide_wires_behind_experts_as_far_as_the_processor_can() -> None:
    free = {way: Overhead(0.0) for way in ("forward", "backward")}
    known = {"flat raw": free, "flat raw per chunk": free, "depth 1 raw": free}
    hiding = {"flat raw": {"forward": 0.0, "backward": 0.5}}
    work = replace(WORK, experts=Line(0.0, 1e-4), experts_backward=Line(0.0, 1e-4))
    seconds = {}
    for overlap in (0.0, 0.5, 1.0):
        pricing = Pricing(SHAPE, ALONE, rates(1e-6, 1e-6, overlap, overheads=known), work, COUNTS)
        best = pricing.candidate(LayerPlan(FLAT), (1, 2, 4))
        seconds[overlap] = best.seconds
        assert max(best.plan.degrees) == (1 if overlap == 0 else 4)
        # What a chunk of this path costs was not measured, so it is not cut.
        assert pricing.candidate(LayerPlan("depth 1"), (1, 2, 4)).plan.degrees == (1, 1)
    assert seconds[1.0] < seconds[0.5] < seconds[0.0]
    # Where it was measured how much chunks of a path hide, that counts.
    measured = Pricing(SHAPE, ALONE, rates(1e-6, 1e-6, overheads=known, hiding=hiding), work, COUNTS)
    degrees = measured.candidate(LayerPlan(FLAT), (1, 2, 4)).plan.degrees
    assert degrees[0] == 1 < degrees[1]
    dear = {**known, "flat raw per chunk": {way: Overhead(1.0) for way in ("forward", "backward")}}
    pricing = Pricing(SHAPE, ALONE, rates(1e-6, 1e-6, overheads=dear), work, COUNTS)
    assert pricing.candidate(LayerPlan(FLAT), (1, 2, 4)).plan.degrees == (1, 1)


def test_the_best_is_the_fastest_and_of_equals_the_plainest() -> None:
    nothing = replace(WORK, gate=Line(0.0, 0.0))
    pricing = Pricing(SHAPE, ALONE, rates(0.0, 1e-6), nothing, COUNTS)
    ranked = pricing.candidates()
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert best_candidate(reversed(ranked)) == ranked[0]
    assert ranked[-1].plan.path == "flat"  # duplicates travel
    text = candidates_text(ranked, "a layer", {ranked[1].plan: 1.0, ranked[0].plan: 2.0})
    assert text.startswith("a layer\n\npath")
    assert f"choice: {ranked[1].plan}: 2 were run, and it was the fastest" in text
    assert f"choice: {ranked[0].plan}: " in candidates_text(ranked)
    assert all(step.name != AROUND or step.seconds == 0 for step in ranked[0].forward.steps)
    with pytest.raises(ConfigError, match="candidates are empty"):
        best_candidate([])


def test_what_is_more_complicated_has_to_win_clearly() -> None:
    flat, depth = LayerPlan(FLAT), LayerPlan("depth 1")
    cut, coded = replace(flat, degrees=(1, 4)), replace(flat, code="tiered")
    assert best_plan({depth: 1.0, flat: 1.019}) == flat
    assert best_plan({depth: 1.0, flat: 1.021}) == depth
    assert best_plan({coded: 1.0, depth: 1.01, flat: 1.015}) == flat
    assert best_plan({cut: 1.0, flat: 1.049, depth: 1.049}) == flat
    assert best_plan({cut: 1.0, flat: 1.051}) == cut
    both = LayerPlan("depth 2", code="tiered")
    between = replace(both, inner_code="raw")
    assert best_plan({both: 1.0, between: 1.01}) == between
    assert best_plan({replace(flat, degrees=(4, 4)): 1.0, replace(flat, degrees=(2, 2)): 1.01}).degrees == (2, 2)
    text = candidates_text(Pricing(SHAPE, ALONE, rates(), WORK, COUNTS).candidates(), "", {depth: 1.0, flat: 1.01})
    assert "choice: flat: plainer than depth 1, which takes 1.0% less, of 2 that were run" in text


def test_rows_may_be_coded_between_nodes_alone() -> None:
    codec = CodecRates(Line(0.0, 1e-9), Line(0.0, 1e-9), Line(0.0, 1e-9), 1.5)
    known = replace(rates(), codecs={"bfloat16": {"int8": codec}})
    pricing = Pricing(SHAPE, ALONE, known, WORK, COUNTS)
    found = {(one.plan.path, one.plan.rows): one for one in pricing.candidates(("raw", "int8"))}
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
    found = {one.plan.rows: one.seconds for one in replace(pricing, rates=measured).candidates(("raw", "int8"))[-7:]}
    assert found["int8, raw inside"] > 2 > found["int8"]


def _skewed() -> RowCounts:
    generator = np.random.default_rng(0)
    vectors = []
    for _ in range(4):
        experts = np.argsort(generator.random((32, 8)) * np.arange(1, 9))[:, :3].ravel()
        vectors.append(count_vector(np.repeat(np.arange(32), 3), experts, 8, NODES))
    return RowCounts.of_vectors(vectors, NODES)


def test_rows_between_ranks_are_those_of_every_level() -> None:
    counts = _skewed()
    assert (rows_between(counts, None) == counts.assignments).all()
    for depth in NODES.depths:
        for level in NODES.stages(depth):
            between, rows = rows_between(counts, level), level_rows(counts, level)
            assert between.sum() == rows.sum()
            for source, target in itertools.product(range(4), repeat=2):
                parent, position = divmod(source, level.num_positions)
                other, there = divmod(target, level.num_positions)
                if parent != other or position % level.stride != there % level.stride:
                    assert between[source, target] == 0
                else:
                    assert between[source, target] == rows[parent, position, there // level.stride]


def test_a_shared_wire_carries_the_sum_of_its_ranks() -> None:
    (level,) = NODES.stages(1)
    even = np.full((4, 4), 10.0)
    for sharing in (0.0, 0.5, 1.0):
        assert slowest_rows(even, NODES, level, sharing) == 30
    one = np.zeros((4, 4))
    one[0, 2] = 60.0  # one rank sends to the other node, its neighbor does not
    assert slowest_rows(one, NODES, level, 0.0) == 60
    assert slowest_rows(one, NODES, level, 1.0) == 60 * 3 / 4  # even sending of n puts 2 * n * 2/3 on the wire
    inside = np.zeros((4, 4))
    inside[0, 1] = 60.0
    assert slowest_rows(inside, NODES, level, 1.0) == 0
