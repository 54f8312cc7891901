"""The search for places of experts, against enumeration: prices of all changes, the best pair, copies, balance."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.cost.comm.rates import Line
from laconic.cost.moe import MoERates
from laconic.cost.moe.hierarchy import RowCounts, best_depth, count_vector, level_costs
from laconic.errors import ConfigError
from laconic.moe.placement.query import sample, sampled
from laconic.moe.placement.search import (
    Cost,
    SwapPlan,
    _copied_seconds,
    best_swaps,
    copies_of,
    packed,
    place,
    rows_of,
    seconds_of,
    swap_seconds,
)
from laconic.moe.routing import Routing
from laconic.topology import Levels


def routing(seed: int, num_tokens: int, num_slots: int, top_k: int, skew: float = 1.0) -> Tensor:
    """Slots of tokens [n, k], low slots hot."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 1 / torch.arange(1, num_slots + 1, dtype=torch.float64) ** skew
    if num_tokens == 0:
        return torch.empty(0, top_k, dtype=torch.int64)
    return torch.multinomial(popularity.expand(num_tokens, -1), top_k, generator=generator)


def chosen_of(slots: Tensor, num_slots: int) -> Tensor:
    return torch.zeros(len(slots), num_slots).scatter_(1, slots, 1.0)


def groups_of(num_slots: int, num_groups: int) -> Tensor:
    return torch.arange(num_slots) // (num_slots // num_groups)


def counted(slots: Tensor, weights: Tensor, cost: Cost) -> list[float]:
    """Rows of each group, one token after the other."""
    rows = [0.0] * (int(cost.groups.max()) + 1)
    for token, weight in zip(slots.tolist(), weights.tolist(), strict=True):
        reached = [int(cost.groups[slot]) for slot in token]
        for group in set(reached) if cost.once else reached:
            rows[group] += weight
    return rows


def smooth(rows: list[float]) -> float:
    return max(rows) * sum((one / max(rows)) ** 10 for one in rows) ** 0.1 if any(rows) else 0.0


def enumerated(slots: Tensor, weights: Tensor, costs: list[Cost]) -> float:
    return sum(cost.alpha_seconds + cost.seconds_per_row * smooth(counted(slots, weights, cost)) for cost in costs)


COSTS = [
    Cost(groups_of(12, 2), 1e-3, 1e-4),
    Cost(groups_of(12, 4), 1e-3, 3e-4),
    Cost(groups_of(12, 12), 0.0, 1e-5),
    Cost(groups_of(12, 4), 0.0, 2e-4, once=False),
]


@given(st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 5), st.floats(0, 2))
@settings(max_examples=10)
def test_every_exchange_is_priced_as_if_it_were_made_and_the_best_is_taken(
    seed: int, num_tokens: int, top_k: int, skew: float
) -> None:
    slots, weights = routing(seed, num_tokens, 12, top_k, skew), 1.0 + torch.arange(num_tokens) % 3
    chosen = chosen_of(slots, 12)
    for cost in COSTS:
        assert rows_of(chosen, weights, cost).tolist() == counted(slots, weights, cost)
    before = seconds_of(chosen, weights, COSTS)
    assert before == pytest.approx(enumerated(slots, weights, COSTS))
    after, real = swap_seconds(chosen, weights, COSTS), {}
    for a, b in combinations(range(12), 2):
        moved = torch.where(slots == a, b, torch.where(slots == b, a, slots))
        real[a, b] = enumerated(moved, weights, COSTS)
        assert float(after[a, b]) == pytest.approx(real[a, b], rel=1e-6)
        assert float(after[b, a]) == pytest.approx(real[a, b], rel=1e-6)
    plan = best_swaps(chosen, weights, COSTS)
    assert plan.after_seconds == pytest.approx(min(before, *real.values()), rel=1e-6)
    if plan.pairs:
        assert real[plan.pairs[0]] == pytest.approx(plan.after_seconds, rel=1e-6)


def test_the_four_cases_of_the_paper_in_numbers() -> None:
    """Slots 0, 1 in group 0 and 2, 3 in group 1; exchange 0 and 2."""
    # Token 0 has slot 0 alone: moves to group 1. Token 1 has 0 and 1: group 1 gets it too. Token 2 has 0 and 3: leaves
    # group 0. Token 3 has 0, 1, 3: nothing changes. Token 4 has 0 and 2: nothing changes. So 5, 3 becomes 3, 5.
    chosen = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1], [1, 0, 1, 0]])
    cost = Cost(groups_of(4, 2), 0.0, 1.0)
    assert rows_of(chosen, torch.ones(5), cost).tolist() == [5, 3]
    assert rows_of(chosen[:, [2, 1, 0, 3]], torch.ones(5), cost).tolist() == [3, 5]
    assert float(swap_seconds(chosen, torch.ones(5), [cost])[0, 2]) == pytest.approx(smooth([3, 5]))


def test_pair_after_pair_gains_more_and_new_slots_are_those_of_the_pairs_in_order() -> None:
    slots = routing(6, 1000, 32, 2, skew=0.9)
    chosen, weights, costs = chosen_of(slots, 32), torch.ones(1000), [Cost(groups_of(32, 8), 0.0, 1e-4)]
    first, plan = best_swaps(chosen, weights, costs), best_swaps(chosen, weights, costs, 4)
    assert plan.pairs[:1] == first.pairs
    assert len(plan.pairs) == 4
    moved = torch.tensor(plan.new_slots(32))[slots]
    assert seconds_of(chosen_of(moved, 32), weights, costs) == pytest.approx(plan.after_seconds)
    assert plan.after_seconds < first.after_seconds < first.before_seconds
    assert SwapPlan(((0, 1), (1, 2)), 5.0, 3.0).new_slots(4) == [2, 0, 1, 3]  # what was in 0 went to 1, then to 2


def test_what_cannot_be_improved_is_left() -> None:
    for chosen in (torch.eye(8), torch.zeros(0, 8)):
        plan = best_swaps(chosen, torch.ones(len(chosen)), [Cost(groups_of(8, 4), 0.0, 1.0)], 3)
        assert plan.pairs == ()
        assert plan.gain_seconds == 0.0
        assert plan.new_slots(8) == list(range(8))


def test_experts_of_a_busy_rank_move_though_no_link_gains() -> None:
    """All in one node: links cost nothing, and what each rank computes counts."""
    chosen = chosen_of(routing(1, 200, 8, 1, skew=2.0), 8)
    links = [Cost(groups_of(8, 1), 0.0, 1.0)]
    assert best_swaps(chosen, torch.ones(200), links).pairs == ()
    computing = Cost(groups_of(8, 4), 0.0, 1.0, once=False)
    plan = best_swaps(chosen, torch.ones(200), [*links, computing], 4)
    moved = chosen.new_zeros(chosen.shape)
    moved[:, plan.new_slots(8)] = chosen
    assert rows_of(moved, torch.ones(200), computing).max() < rows_of(chosen, torch.ones(200), computing).max()


def test_swaps_repeated_shorten_what_the_cost_model_predicts() -> None:
    """Until no pair helps; seconds are those of the model on counts of the exchanged slots."""
    levels, num_experts, num_ranks = Levels(8, (1, 4)), 32, 8
    routes = [routing(seed, 200, num_experts, 2, skew=1.0) for seed in range(num_ranks)]
    lines = {
        kind: {"all_to_all": Line(alpha, beta)}
        for kind, alpha, beta in (("node", 1e-5, 1e-9), ("across", 1e-4, 1e-7), ("all", 1e-4, 1e-7))
    }
    rates = MoERates.of_lines(lines, Line(0.0, 0.0))
    tokens = torch.arange(200).repeat_interleave(2).numpy()

    def counts() -> RowCounts:
        vectors = [count_vector(tokens, slots.flatten().numpy(), num_experts, levels) for slots in routes]
        return RowCounts.of_vectors(vectors, levels)

    start = best_depth(counts(), 1024, rates)
    assert start.depth == 2
    costs = [
        Cost(groups_of(num_experts, one.num_groups), one.alpha_seconds, one.seconds_per_row)
        for one in level_costs(counts(), start.depth, 1024, rates)
    ]
    plan = best_swaps(torch.cat([chosen_of(slots, num_experts) for slots in routes]), torch.ones(1600), costs, 20)
    assert 1 < len(plan.pairs) < 20
    routes = [torch.tensor(plan.new_slots(num_experts))[slots] for slots in routes]
    assert best_depth(counts(), 1024, rates).seconds < 0.97 * start.seconds


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 3), st.integers(1, 30))
@settings(max_examples=20)
def test_a_sample_says_which_slots_and_of_how_many_tokens(seed: int, num_tokens: int, top_k: int, most: int) -> None:
    slots = routing(seed, num_tokens, 10, top_k)
    one = Routing.of_choices(slots, torch.ones(slots.shape), 10)
    none = Routing.of_choices(slots[:0], torch.ones(0, top_k), 10)
    chosen, weights = sampled(torch.stack([sample(one, most), sample(none, most)]), 10)
    taken = min(num_tokens, most)
    rows = [index * num_tokens // taken for index in range(taken)]
    assert torch.equal(chosen[:taken], chosen_of(slots, 10)[rows])
    assert not chosen[taken:].any()
    if taken:
        assert float(weights[:taken].sum()) == pytest.approx(num_tokens)


# --- copies ---


def busiest(held: list[list[int]], loads: list[float]) -> float:
    """Tokens of the busiest rank, where copies share theirs evenly."""
    copies = Counter(expert for rank in held for expert in rank)
    return max(sum(loads[expert] / copies[expert] for expert in rank) for rank in held)


def generated(kind: str, num_experts: int, generator: random.Random) -> list[float]:
    loads = {
        "zipf": [1000 / (place + 1) ** generator.uniform(0.5, 1.5) for place in range(num_experts)],
        "uniform": [100.0] * num_experts,
        "one hot": [1000.0] + [1.0] * (num_experts - 1),
        "none": [0.0] * num_experts,
        "routed": routing(generator.randrange(99), 500, num_experts, 2, 0.7).flatten().bincount(minlength=num_experts),
    }[kind]
    loads = [float(load) for load in loads]
    generator.shuffle(loads)
    return loads


@pytest.mark.parametrize("kind", ["zipf", "uniform", "one hot", "none", "routed"])
def test_placements_are_at_least_as_balanced_as_greedy_copies_packed(kind: str) -> None:
    """What EPLB does within one level: copies of the busiest, then the busiest first onto the lightest rank."""
    generator = random.Random(kind)
    for num_experts, num_ranks, extra in ((8, 2, 2), (16, 4, 0), (32, 4, 4), (32, 8, 8), (12, 5, 3)):
        loads, num_slots = generated(kind, num_experts, generator), num_experts + extra
        rooms = [num_slots // num_ranks + (rank < num_slots % num_ranks) for rank in range(num_ranks)]
        held = place(loads, rooms)
        assert [len(rank) for rank in held] == rooms
        assert {expert for rank in held for expert in rank} == set(range(num_experts))
        copies = copies_of(loads, num_slots)
        items = [expert for expert, number in enumerate(copies) for _ in range(number)]
        ranks = packed([loads[item] / copies[item] for item in items], rooms)
        greedy = busiest([[items[item] for item in rank] for rank in ranks], loads)
        assert busiest(held, loads) <= greedy * (1 + 1e-9)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 4))
@settings(max_examples=40)
def test_no_other_numbers_of_copies_leave_the_busiest_copy_less(loads: list[int], extra: int) -> None:
    copies = copies_of(loads, len(loads) + extra)
    assert sum(copies) == len(loads) + extra
    most = max(load / number for load, number in zip(loads, copies, strict=True))
    for other in product(range(1, extra + 2), repeat=len(loads)):
        if sum(other) == sum(copies):
            assert most <= max(load / number for load, number in zip(loads, other, strict=True))


def test_every_other_expert_in_a_slot_is_priced_as_if_it_were_there() -> None:
    loads, experts, groups = (
        torch.tensor([9.0, 4.0, 2.0, 7.0]).double(),
        torch.tensor([0, 1, 2, 0, 3, 3]),
        [0, 0, 1, 1, 2, 2],
    )
    found = _copied_seconds(experts, loads, Cost(torch.tensor(groups), 0.0, 1.0, once=False))
    for slot, expert in product(range(6), range(4)):
        if (experts == experts[slot]).sum() == 1 or expert == experts[slot]:
            assert found[slot, expert] == torch.inf  # its only copy, or no change
            continue
        other = experts.tolist()
        other[slot] = expert
        shares = [float(loads[one]) / other.count(one) for one in other]
        rows = [sum(share for share, group in zip(shares, groups, strict=True) if group == g) for g in range(3)]
        assert float(found[slot, expert]) == pytest.approx(smooth(rows))


def test_small_placements_are_nearly_those_of_enumeration() -> None:
    generator, losses = random.Random(0), []
    for _ in range(30):
        loads, rooms = (
            [float(generator.randrange(1, 100)) for _ in range(3)],
            generator.choice([[2, 2], [3, 2], [2, 2, 1]]),
        )
        slots = [rank for rank, room in enumerate(rooms) for _ in range(room)]
        best = min(
            busiest(
                [[e for e, rank in zip(content, slots, strict=True) if rank == r] for r in range(len(rooms))], loads
            )
            for content in product(range(3), repeat=len(slots))
            if len({*content}) == 3
        )
        losses.append(busiest(place(loads, rooms), loads) / best - 1)
    assert sum(losses) / len(losses) < 0.01
    assert sum(loss < 1e-6 for loss in losses) >= 24


def test_a_hot_expert_is_on_every_rank_that_has_room_for_it() -> None:
    held = place([100.0, 1.0, 1.0, 1.0], [2, 2, 2])
    assert all(0 in rank for rank in held)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_slots is 3, but each of the 4 experts needs one"):
        place([1.0] * 4, [2, 1])
    for load in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be numbers from 0 on"):
            place([1.0, load], [1, 1])
