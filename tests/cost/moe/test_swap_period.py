"""When swapping experts pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line, LinkRates
from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe import MoERates
from laconic.cost.moe.swap_period import (
    QUERY_SHARE,
    SwapPeriod,
    move_seconds,
    query_distance,
    query_seconds,
)
from laconic.errors import ConfigError
from laconic.json_text import read_record

PAIRS = ((0, 5),)


def run(policy: SwapPeriod, drift: Sequence[float], distance: int = 1) -> tuple[float, int, int]:
    """Seconds lost or spent, swaps and looks, where the loss per step grows by drift[step] and a swap removes it."""
    spent, gain, swaps, looks = 0.0, 0.0, 0, 0
    for step, more in enumerate(drift):
        gain = max(0.0, gain + more)
        if policy.due(step):
            looks += 1
            if not policy.pairs:
                policy.found(step, PAIRS if gain else (), gain, distance)
            elif policy.weighed(step, gain, distance):
                spent += policy.cost_seconds
                gain, swaps = 0.0, swaps + 1
        spent += gain
    return spent, swaps, looks


def test_where_losses_grow_evenly_the_policy_is_the_best_period() -> None:
    cost, drift, steps = 0.5, 0.002, 2000
    spent, swaps, looks = run(SwapPeriod(cost), [drift] * steps)
    best = min(steps * (cost / p + drift * (p - 1) / 2) for p in range(1, steps))
    assert spent < 1.1 * best
    assert steps / swaps == pytest.approx((2 * cost / drift) ** 0.5, rel=0.15)
    assert looks < 8 * swaps


def test_what_does_not_drift_is_swapped_once_it_has_cost_as_much() -> None:
    spent, swaps, looks = run(SwapPeriod(5.0, max_period=512), [0.1] + [0.0] * 2000)
    assert swaps == 1
    assert spent == pytest.approx(2 * 5.0, rel=0.05)
    assert looks < 25


def test_what_gains_nothing_is_never_swapped_and_rarely_looked_at() -> None:
    spent, swaps, looks = run(SwapPeriod(1.0, max_period=100), [0.0] * 1000)
    assert swaps == spent == 0
    assert looks < 20


def test_looks_keep_their_distance() -> None:
    for policy, distance in ((SwapPeriod(0.0, min_period=8), 1), (SwapPeriod(0.0, min_period=3), 8)):
        looked = []
        for step in range(40):
            if policy.due(step):
                looked.append(step)
                if policy.pairs:
                    policy.weighed(step, 1.0, distance)
                else:
                    policy.found(step, PAIRS, 1.0, distance)
        assert looked == [0, 8, 16, 24, 32]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.floats(0, 3))
def test_a_swap_is_judged_by_later_steps_only(gains: list[float], cost: float) -> None:
    policy, lost, last = SwapPeriod(cost), 0.0, gains[0]
    policy.found(0, PAIRS, 1e9)  # the best of many looked marvellous
    assert policy.next_step == 1
    for step, gain in enumerate(gains, 1):
        lost, last = lost + (last + gain) / 2, gain
        swaps = policy.weighed(step, gain)
        assert swaps == (gain > 0 and lost >= cost)
        assert bool(policy.pairs) == (not swaps and lost > 0)
        if not policy.pairs:
            assert policy.lost_seconds == 0
            break


def test_state_survives_json() -> None:
    policy = SwapPeriod(2.0, min_period=2)
    policy.found(4, PAIRS, 0.5)
    assert not policy.weighed(6, 0.25)
    again = read_record(SwapPeriod, asdict(policy))
    assert again == policy
    for step, gain in ((8, 0.5), (10, 0.5), (12, 1.0)):
        assert again.weighed(step, gain) == policy.weighed(step, gain)
        assert again == policy


def test_a_look_takes_what_its_parts_take() -> None:
    none = Line(0.0, 0.0)
    lines = {"across": {"all_to_all": none, "all_gather": Line(1e-3, 1e-6)}}
    world = GroupShape(4, 1)
    # 1024 tokens of each rank, a bit for each of 8 experts; and two messages that tell the plan.
    found = query_seconds(10, 8, (2, 4), world, MoERates.of_lines(lines, none, world=4))
    assert found == pytest.approx(1e-3 + 1e-6 * 3 * 1024 + 2e-3)
    # Two levels of 2 and 4 groups; one rank counts the tokens of all, no more than the sample.
    for num_tokens, counted in ((10, 40), (5000, 4096)):
        multiply_adds = counted * 8 * (2 + 8) + counted * 8 * (4 + 8)
        computing = MoERates.of_lines({"across": {"all_to_all": none}}, Line(0.0, 1.0))
        assert query_seconds(num_tokens, 8, (2, 4), world, computing) == multiply_adds
    copying = MoERates.of_lines({"across": {"all_to_all": none}}, none, copy=Line(0.0, 1.0))
    assert query_seconds(10, 8, (2, 4), world, copying) == 16 * 2 * 40 * 8


def test_looks_take_a_small_share() -> None:
    assert query_distance(0.003, 0.010) == 30
    assert query_distance(0.0, 0.010) == query_distance(0.0, 0.0) == 1
    assert query_distance(1.0, 0.0) == 4096
    for seconds in (1e-4, 3e-3, 0.2):
        assert seconds / query_distance(seconds, 0.05) <= QUERY_SHARE * 0.05


def test_moving_takes_the_line_of_send() -> None:
    lines = {"across": {"all_to_all": Line(1.0, 1.0), "send": Line(1e-4, 1e-9)}}
    rates = MoERates.of_lines(lines, Line(0.0, 0.0))
    assert move_seconds(1e6, GroupShape(4, 1), rates) == pytest.approx(1e-4 + 1e-3)


def test_between_nodes_the_group_that_joins_them_counts() -> None:
    """In a group of several nodes a neighbour is mostly in the same node: its `send` says nothing of wires between."""
    all_ = {"all_to_all": Line(1e-3, 1e-8), "send": Line(0.0, 1e-10)}
    rates = MoERates.of_lines({"all": all_}, Line(0.0, 0.0), world=4)
    assert move_seconds(1e6, GroupShape(4, 2), rates) == pytest.approx(1e-3 + 1e-2)
    across = LinkRates(2, {"all_to_all": Line(0.0, 0.0), "send": Line(2e-3, 2e-8)}, 0.0, 0.0)
    assert move_seconds(1e6, GroupShape(4, 2), replace(rates, groups={"inter1": across})) == pytest.approx(2e-3 + 2e-2)
    assert move_seconds(1e6, GroupShape(4, 4), replace(rates, groups={"inter1": across})) == pytest.approx(1e-4)


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost_seconds is -1, but seconds must not be negative"):
        SwapPeriod(-1)
    with pytest.raises(ConfigError, match="min_period is 9, but it must be from 1 to max_period 8"):
        SwapPeriod(1.0, min_period=9, max_period=8)
