"""Parm's routes: equal to the formulas, smaller where they must be, chosen by what they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.moe import GridLayout, LayerShape, MoERates, fastest, parm_routes, saa_seconds
from laconic.cost.moe.shape import group_shape
from laconic.errors import ConfigError

NAMES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
NOTHING = Line(0.0, 0.0)


def rates(node: float = 1e-10, across: float = 1e-9, gemm: Line = NOTHING, copy: Line = NOTHING) -> MoERates:
    lines = {
        kind: {name: Line(alpha * (1 + i), beta * (1 + i)) for i, name in enumerate(NAMES)}
        for kind, beta, alpha in (("node", node, 1e-5), ("across", across, 1e-4), ("all", 1.5 * across, 2e-4))
    }
    return MoERates.of_lines(lines, gemm, copy=copy)


def layer(num_tokens: int = 512, capacity_factor: float | None = 1.2, **others: int) -> LayerShape:
    sizes = {"model_dim": 64, "hidden_dim": 128, "num_experts": 8, "top_k": 2} | others
    return LayerShape(num_tokens=num_tokens, capacity_factor=capacity_factor, **sizes)


GRID = GridLayout(8, mp=4, ep=2, esp=4, ranks_per_node=4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "grid", [GRID, GridLayout(8, 2, 2, 2, 4), GridLayout(8, 4, 4, 2, 4), GridLayout(8, 2, 2, 4, 4)]
)
def test_seconds_equal_the_formulas(grid: GridLayout, backward: bool) -> None:
    """t_base, t_S1, t_S2, with every size spelled out."""
    shape, found = layer(), rates()
    blm = 512 * 64 * 2  # bytes of the layer's input
    etm = blm * 2 * 1.2

    def seconds(operation: str, group: str, nbytes: float) -> float:
        world = group_shape(grid, group)
        if world.num_ranks == 1:
            return 0.0
        return found.link(group, world).line(operation).seconds(sent_nbytes(operation, nbytes, world.num_ranks))

    mp, esp = grid.mp, grid.esp
    gathered = etm if backward else blm
    joint = seconds("all_to_all", "joint", etm * esp / mp)
    base = seconds("all_gather", "esp", gathered) + seconds("all_reduce", "esp", etm * esp)
    base += 2 * seconds("all_to_all", "ep", etm * esp)
    s1 = 2 * joint + seconds("all_gather", "mp", blm / mp)
    gather = seconds("all_gather", "mp", etm / mp)
    steps = grid.ep * grid.esp
    apart = group_shape(grid, "joint").num_nodes > 1
    overlapped = max(joint, (steps - 1) / steps * gather) + gather / steps if apart else joint + gather
    found_routes = parm_routes(shape, grid, found, backward=backward)
    assert [route.name for route in found_routes] == ["baseline", "s1", "s2"]
    assert [route.seconds for route in found_routes] == pytest.approx([base, s1, joint + overlapped])


@given(st.integers(2, 12), st.floats(0, 1), st.floats(0, 1))
def test_saa_equals_its_simulation(num_ranks: int, step: float, slot: float) -> None:
    """The authors' kernel: step i's exchange sends on what step i - 1 brought; a last one follows the loop."""
    gathered = slot  # the rank's own chunk is there at once
    for i in range(1, num_ranks):
        gathered = max(gathered, i * step) + slot
    predicted = saa_seconds((num_ranks - 1) * step, num_ranks * slot, num_ranks)
    assert predicted == pytest.approx((num_ranks - 1) * max(step, slot) + slot)
    assert gathered == pytest.approx(predicted)


def test_without_overlap_or_peers_saa_is_a_sum() -> None:
    assert saa_seconds(2.0, 3.0, 4, overlap=0.0) == 5.0
    assert saa_seconds(2.0, 3.0, 1) == 5.0
    assert saa_seconds(2.0, 3.0, 4, overlap=0.5) == pytest.approx((5.0 + saa_seconds(2.0, 3.0, 4)) / 2)


def test_experts_and_their_rows_fall_by_the_size_of_the_mp_group() -> None:
    baseline, s1, s2 = parm_routes(layer(), GRID, rates(gemm=Line(0.0, 1e-12)))
    seconds = [next(s.seconds for s in route.steps if s.name == "experts") for route in (baseline, s1, s2)]
    assert seconds[0] == pytest.approx(GRID.mp * seconds[1])
    assert seconds[1] == seconds[2]
    assert seconds[0] == pytest.approx(1e-12 * 3 * 2 * 1.2 * 512 * 64 * 128)  # g * c * n * M * H
    sent = [sum(s.sent_nbytes for s in route.steps if s.operation == "all_to_all") for route in (baseline, s1)]
    assert sent[0] / sent[1] == pytest.approx(GRID.mp * (1 / 2) / (7 / 8))  # of 2 and of 8 ranks


def test_backward_multiplies_twice_and_reverses_the_way() -> None:
    gemm = Line(1e-6, 1e-12)
    for forward, backward in zip(
        parm_routes(layer(), GRID, rates(gemm=gemm)),
        parm_routes(layer(), GRID, rates(gemm=gemm), backward=True),
        strict=True,
    ):
        one, two = ({step.name: step.seconds for step in route.steps} for route in (forward, backward))
        assert two["experts"] == pytest.approx(2 * one["experts"])
        assert two["gate"] == pytest.approx(2 * one["gate"])
        names = [step.name for step in backward.steps]
        assert names.index("combine") < names.index("experts") < names.index("dispatch") < names.index("gate")


def test_few_rows_per_token_choose_s2_and_many_s1() -> None:
    """s1 gathers n rows, s2 c*n behind the all-to-all: s2 where its gather hides or is small."""

    def chosen(rates: MoERates, **others: float) -> str:
        return fastest(parm_routes(layer(1 << 16, **others), GRID, rates)[1:]).name  # type: ignore[arg-type]

    slow_inside = rates(node=2e-9, across=1e-10)
    assert chosen(slow_inside, capacity_factor=0.25) == "s2"
    assert chosen(slow_inside, top_k=4) == "s1"
    assert chosen(rates(node=1e-11, across=1e-8), top_k=4) == "s2"


def test_a_gain_needs_an_mp_group() -> None:
    flat = GridLayout(8, ep=8, ranks_per_node=8)
    baseline, s1, s2 = parm_routes(layer(), flat, rates(gemm=Line(1e-6, 1e-12)))
    assert baseline.seconds == pytest.approx(s1.seconds) == pytest.approx(s2.seconds)


def test_load_lengthens_what_the_busiest_rank_does() -> None:
    found = rates(gemm=Line(0.0, 1e-12), copy=Line(0.0, 1e-12))
    balanced, skewed = (parm_routes(layer(), GRID, found, load=load)[1] for load in (1.0, 3.0))
    one, two = ({step.name: step.seconds for step in route.steps} for route in (balanced, skewed))
    assert two["experts"] == pytest.approx(3 * one["experts"])
    assert two["dispatch"] > one["dispatch"]
    assert two["gate"] == one["gate"]
    with pytest.raises(ConfigError, match=r"load is 0.5, but the busiest rank has at least the mean"):
        parm_routes(layer(), GRID, found, load=0.5)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts is 9"):
        parm_routes(replace(layer(), num_experts=9), GRID, rates())
    with pytest.raises(ConfigError, match="routes are empty"):
        fastest(())
