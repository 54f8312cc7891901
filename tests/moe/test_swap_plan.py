"""The fast update of row counts against really exchanging experts; which pair is chosen; when it pays."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.cost.comm.rates import Line
from laconic.cost.moe import MoERates
from laconic.cost.moe.hierarchy import LevelCost, RowCounts, best_depth, count_vector, level_costs
from laconic.errors import ConfigError
from laconic.moe.placement.swap_search import (
    GAMMA,
    SwapPlan,
    SwapTables,
    group_rows,
    level_seconds,
    pair_seconds,
    plan_swaps,
    smooth_max,
    swap_tables,
)
from laconic.topology import Levels


def routing(seed: int, num_tokens: int, num_experts: int, top_k: int, skew: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tokens and slots, hot slots first."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64) ** skew
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    slots = torch.multinomial(weights.expand(num_tokens, -1), top_k, generator=generator)
    return torch.arange(num_tokens).repeat_interleave(top_k), slots.flatten()


def exchanged(slots: Tensor, a: int, b: int) -> Tensor:
    return torch.where(slots == a, b, torch.where(slots == b, a, slots))


def loads(tokens: Tensor, slots: Tensor, num_experts: int, num_groups: int) -> Tensor:
    """Distinct pairs of token and group, counted."""
    pairs = torch.unique(tokens * num_groups + slots // (num_experts // num_groups))
    return torch.bincount(pairs % num_groups, minlength=num_groups)


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 5), st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_every_exchange_equals_brute_force(seed: int, num_tokens: int, top_k: int, skew: float) -> None:
    num_experts, groups = 12, (2, 4, 12)
    tokens, slots = routing(seed, num_tokens, num_experts, top_k, skew)
    tables = swap_tables(tokens, slots, num_tokens, num_experts, groups)
    costs = [LevelCost(2, 1e-3, 1e-4), LevelCost(4, 1e-3, 3e-4), LevelCost(12, 0.0, 1e-5)]
    after = pair_seconds(tables, costs)
    for g in groups:
        assert torch.equal(tables.load(g), loads(tokens, slots, num_experts, g))
    for a, b in combinations(range(num_experts), 2):
        swapped = exchanged(slots, a, b)
        seconds = 0.0
        for cost in costs:
            g = cost.num_groups
            size, real = num_experts // g, loads(tokens, swapped, num_experts, g)
            predicted = tables.load(g).clone()
            predicted[a // size] += tables.change(g)[a, b]
            predicted[b // size] += tables.change(g)[b, a]
            assert torch.equal(predicted, real), (g, a, b)
            seconds += cost.alpha_seconds + cost.seconds_per_row * float(smooth_max(real.double()))
        assert float(after[a, b]) == pytest.approx(seconds, rel=1e-9)
        assert float(after[b, a]) == pytest.approx(seconds, rel=1e-9)
    unchanged = [cost.alpha_seconds + cost.seconds_per_row * float(smooth_max(tables.load(cost.num_groups).double()))
                 for cost in costs]  # fmt: skip
    assert level_seconds({g: tables.load(g) for g in groups}, costs) == pytest.approx(sum(unchanged))


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_weighing_pairs_finds_what_planning_them_promised(seed: int, num_tokens: int, top_k: int) -> None:
    """On the same tokens; on others it is whatever their rows say."""
    num_experts, groups = 12, (2, 4)
    tokens, slots = routing(seed, num_tokens, num_experts, top_k, 1.0)
    costs = [LevelCost(2, 1e-3, 1e-4), LevelCost(4, 1e-3, 3e-4)]
    plan = plan_swaps(swap_tables(tokens, slots, num_tokens, num_experts, groups), costs)
    moved = torch.tensor(plan.new_slots(num_experts))[slots]
    rows = [{g: group_rows(tokens, at, num_experts, g) for g in groups} for at in (slots, moved)]
    for at, found in zip((slots, moved), rows, strict=True):
        assert all(torch.equal(found[g], loads(tokens, at, num_experts, g)) for g in groups)
    before, after = (level_seconds(one, costs) for one in rows)
    assert before == pytest.approx(plan.before_seconds)
    assert after == pytest.approx(plan.after_seconds)


def test_the_four_cases_of_the_paper_in_numbers() -> None:
    """Slots 0, 1 in group 0 and 2, 3 in group 1; exchange 0 and 2."""
    # token 0 has slot 0 alone: moves to group 1. token 1 has 0 and 1: group 1 gets it too. token 2 has 0 and 3: leaves
    # group 0. token 3 has 0, 1, 3: nothing changes. token 4 has 0 and 2: nothing changes.
    tokens = torch.tensor([0, 1, 1, 2, 2, 3, 3, 3, 4, 4])
    slots = torch.tensor([0, 0, 1, 0, 3, 0, 1, 3, 0, 2])
    tables = swap_tables(tokens, slots, 5, 4, (2,))
    assert tables.load(2).tolist() == [5, 3]
    assert tables.change(2)[0, 2] == -2  # group 0 loses tokens 0 and 2
    assert tables.change(2)[2, 0] == +2  # group 1 gains tokens 0 and 1
    assert tables.change(2)[0, 1] == 0


def test_tables_of_ranks_add_up_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, slots = routing(3, 50, 8, 3)
    whole = swap_tables(tokens, slots, 50, 8, (2, 8))
    first = tokens < 20
    parts = [
        swap_tables(tokens[first], slots[first], 20, 8, (2, 8)),
        swap_tables(tokens[~first] - 20, slots[~first], 30, 8, (2, 8)),
    ]
    assert torch.equal(parts[0].flat + parts[1].flat, whole.flat)
    monkeypatch.setattr("laconic.moe.placement.swap_search._CHUNK_TOKENS", 7)
    assert torch.equal(swap_tables(tokens, slots, 50, 8, (2, 8)).flat, whole.flat)
    with torch.autocast("cpu", torch.bfloat16):
        many, to = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
        assert swap_tables(many, to, 1000, 8, (2,)).minus(2)[0, 7] == 1000


def test_smooth_max_lies_between_the_maximum_and_its_bound() -> None:
    x = torch.tensor([[3.0, 3.0, 1.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    found = smooth_max(x)
    assert found[0] == pytest.approx(3 * (2 + 3**-10) ** 0.1)
    assert found[1:].tolist() == [0.0, 5.0]
    assert float(smooth_max(x[0], gamma=200.0)) == pytest.approx(3.0, rel=4e-3)


def test_the_plan_takes_the_best_pair_of_all() -> None:
    tokens, slots = routing(5, 300, 16, 2)
    tables = swap_tables(tokens, slots, 300, 16, (4, 16))
    costs = [LevelCost(4, 1e-3, 1e-4), LevelCost(16, 1e-3, 2e-5)]
    after, before = pair_seconds(tables, costs), level_seconds({g: tables.load(g) for g in (4, 16)}, costs)
    plan = plan_swaps(tables, costs)
    assert plan.before_seconds == before
    assert plan.after_seconds == pytest.approx(float(after.min()))
    (pair,) = plan.pairs
    assert float(after[pair]) == float(after.min())
    assert plan.gain_seconds > 0.05 * before  # the hot slots are neighbours
    moved = plan.new_slots(16)
    assert sorted(moved) == list(range(16))
    assert (moved[pair[0]], moved[pair[1]]) == (pair[1], pair[0])


def test_pair_after_pair_gains_more() -> None:
    tokens, slots = routing(6, 2000, 32, 2, skew=0.9)
    costs = [LevelCost(8, 0.0, 1e-4)]
    plan = first = plan_swaps(swap_tables(tokens, slots, 2000, 32, (8,)), costs)
    for _ in range(3):
        moved = torch.tensor(plan.new_slots(32))[slots]
        plan = plan.then(plan_swaps(swap_tables(tokens, moved, 2000, 32, (8,)), costs))
    assert plan.pairs[0] == first.pairs[0]
    assert len(plan.pairs) == 4
    moved = torch.tensor(plan.new_slots(32))[slots]
    real = 1e-4 * float(smooth_max(loads(tokens, moved, 32, 8).double()))
    assert real == pytest.approx(plan.after_seconds)
    assert real < first.after_seconds


def test_plans_join_in_order() -> None:
    first, second = SwapPlan(((0, 1),), 5.0, 4.0), SwapPlan(((1, 2),), 4.0, 3.0)
    both = first.then(second)
    assert both.gain_seconds == 2.0
    assert both.new_slots(4) == [2, 0, 1, 3]  # what was in 0 went to 1, then to 2
    step_by_step = [second.new_slots(4)[slot] for slot in first.new_slots(4)]
    assert both.new_slots(4) == step_by_step


def test_what_cannot_be_improved_is_left() -> None:
    even = torch.arange(8)
    tables = swap_tables(even, even, 8, 8, (2, 4, 8))
    plan = plan_swaps(tables, [LevelCost(4, 0.0, 1.0)])
    assert plan.pairs == ()
    assert plan.gain_seconds == 0.0
    assert plan.new_slots(8) == list(range(8))
    nothing = swap_tables(even[:0], even[:0], 0, 8, (2,))
    assert plan_swaps(nothing, [LevelCost(2, 0.0, 1.0)]).pairs == ()


def test_swaps_repeated_shorten_what_the_cost_model_predicts() -> None:
    """Until no pair helps; seconds are those of the model on counts of the exchanged slots."""
    levels, num_experts, num_ranks = Levels(8, (1, 4)), 32, 8
    routes = [routing(seed, 200, num_experts, 2, skew=1.0) for seed in range(num_ranks)]
    names = ("all_to_all",)
    lines = {
        kind: dict.fromkeys(names, Line(alpha, beta))
        for kind, alpha, beta in (("node", 1e-5, 1e-9), ("across", 1e-4, 1e-7), ("all", 1e-4, 1e-7))
    }
    rates = MoERates.of_lines(lines, Line(0.0, 0.0))

    def counts() -> RowCounts:
        vectors = [count_vector(t.numpy(), s.numpy(), num_experts, levels) for t, s in routes]
        return RowCounts.of_vectors(vectors, levels)

    start = best_depth(counts(), 1024, rates)
    assert start.depth == 2
    for _ in range(20):
        costs = level_costs(counts(), start.depth, 1024, rates)
        groups = [cost.num_groups for cost in costs]
        flat = torch.stack([swap_tables(t, s, 200, num_experts, groups).flat for t, s in routes]).sum(0)
        plan = plan_swaps(SwapTables(num_experts, tuple(groups), flat), costs)
        if not plan.pairs:
            break
        ((a, b),) = plan.pairs
        routes = [(tokens, exchanged(slots, a, b)) for tokens, slots in routes]
    else:
        pytest.fail("swaps go on for ever")
    end = best_depth(counts(), 1024, rates)
    assert end.seconds < 0.97 * start.seconds


def test_impossible_questions_are_refused() -> None:
    tokens, slots = routing(0, 4, 8, 2)
    with pytest.raises(ConfigError, match="num_groups has 3, but it must divide num_experts = 8"):
        swap_tables(tokens, slots, 4, 8, (3,))
    tables = swap_tables(tokens, slots, 4, 8, (2,))
    with pytest.raises(ConfigError, match=r"num_groups is 4, but tables were made for \(2,\)"):
        tables.load(4)
    assert GAMMA == 10.0
