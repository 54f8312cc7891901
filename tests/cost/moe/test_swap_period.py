"""When swapping experts pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cost.moe import LayerShape, MoERates
from laconic.cost.moe.swap_period import SwapPeriod, best_period, expert_nbytes, move_seconds
from laconic.cost.wire.rates import Line
from laconic.cost.wire.seconds import World
from laconic.errors import ConfigError


@given(st.floats(0, 10), st.floats(1e-6, 10))
def test_the_period_is_the_best_of_all(cost: float, growth: float) -> None:
    def seconds(period: int) -> float:
        return cost / period + growth * (period - 1) / 2

    found = best_period(cost, growth, max_period=300)
    assert seconds(found) == pytest.approx(min(seconds(period) for period in range(1, 301)))


def test_without_growth_one_waits() -> None:
    assert best_period(1.0, 0.0, max_period=77) == 77
    assert best_period(0.0, 1.0) == 1


def run(policy: SwapPeriod, drift: Sequence[float]) -> tuple[float, int, int]:
    """Seconds lost or spent, swaps and looks, where the loss per step grows by drift[step] and a swap removes it."""
    spent, gain, swaps, looks = 0.0, 0.0, 0, 0
    for step, more in enumerate(drift):
        gain = max(0.0, gain + more)
        if policy.due(step):
            looks += 1
            if policy.decide(step, gain):
                spent += policy.cost_seconds
                gain, swaps = 0.0, swaps + 1
        spent += gain
    return spent, swaps, looks


def test_where_losses_grow_evenly_the_policy_is_the_best_period() -> None:
    cost, drift, steps = 0.5, 0.002, 2000
    spent, swaps, looks = run(SwapPeriod(cost), [drift] * steps)
    best = min(steps * (cost / p + drift * (p - 1) / 2) for p in range(1, steps))
    assert spent < 1.05 * best
    assert steps / swaps == pytest.approx(best_period(cost, drift), rel=0.1)
    assert looks < 8 * swaps


def test_what_does_not_drift_is_swapped_once_it_has_cost_as_much() -> None:
    spent, swaps, looks = run(SwapPeriod(5.0, max_period=512), [0.1] + [0.0] * 2000)
    assert swaps == 1
    assert spent == pytest.approx(2 * 5.0, rel=0.05)
    assert looks < 25


def test_what_gains_nothing_is_never_swapped() -> None:
    spent, swaps, looks = run(SwapPeriod(1.0, max_period=100), [0.0] * 1000)
    assert swaps == spent == 0
    assert looks < 20


def test_looks_keep_their_distance() -> None:
    policy = SwapPeriod(0.0, min_period=8)
    looked = []
    for step in range(40):
        if policy.due(step):
            looked.append(step)
            policy.decide(step, 1.0)
    assert looked == [0, 8, 16, 24, 32]


def test_moving_takes_the_line_of_send() -> None:
    shape = LayerShape(1, 1024, 4096, 8, 2)
    assert expert_nbytes(shape, esp=2, nbytes_per_parameter=6) == 3 * 1024 * 4096 / 2 * 6
    lines = {"across": {"all_to_all": Line(1.0, 1.0), "send": Line(1e-4, 1e-9)}}
    rates = MoERates.of_lines(lines, Line(0.0, 0.0))
    assert move_seconds(1e6, World(4, 1), rates) == pytest.approx(1e-4 + 1e-3)


def test_impossible_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost_seconds is -1, but seconds must not be negative"):
        SwapPeriod(-1)
    with pytest.raises(ConfigError, match="min_period is 9, but it must be from 1 to max_period 8"):
        SwapPeriod(1.0, min_period=9, max_period=8)
