"""Successive elimination: what is clearly slower leaves, what is close is run most, and noise is not taken for gain."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.moe.tuning.elimination import compare, ratio_bounds


class _Cases:
    """Cases of known seconds, times noise of their own and a disturbance that lasts for a few runs."""

    def __init__(self, seconds: list[float], noise: float = 0.0, disturbance: float = 0.0, seed: int = 0) -> None:
        self.seconds, self.noise, self.disturbance = seconds, noise, disturbance
        self.random, self.slowed, self.spent = random.Random(seed), 0.0, 0.0
        self.runs = [0] * len(seconds)

    def measure(self, case: int) -> tuple[float, float]:
        self.runs[case] += 1
        if self.random.random() < 0.2:
            self.slowed = abs(self.random.gauss(0, self.disturbance))
        taken = self.seconds[case] * math.exp(self.random.gauss(0, self.noise) + self.slowed)
        self.spent += taken
        return taken / 3, taken * 2 / 3


def test_without_noise_what_is_slower_leaves_after_few_rounds() -> None:
    cases = _Cases([0.1, 0.101, 0.115, 0.2])
    found = compare(cases.measure, 4, 100.0)
    assert found.fastest == 0
    assert not found.rivals
    assert cases.runs == [5, 5, 4, 3]  # the first run of each does not count
    assert [sum(both) for both in found.seconds] == pytest.approx(cases.seconds)
    assert found.seconds[0] == pytest.approx((0.1 / 3, 0.2 / 3))


def test_a_case_alone_is_measured_and_not_for_long() -> None:
    cases = _Cases([0.1])
    assert sum(compare(cases.measure, 1, 100.0).seconds[0]) == pytest.approx(0.1)
    assert cases.runs == [4]


@pytest.mark.parametrize(("budget", "runs"), [(1.0, 2), (18.2, 2), (18.4, 3)])
def test_no_round_begins_that_would_exceed_the_budget_but_one(budget: float, runs: int) -> None:
    cases = _Cases([3.0, 3.1])
    found = compare(cases.measure, 2, budget)
    assert cases.runs == [runs, runs]
    assert {*found.rivals} == {1}  # one round tells nothing


def test_noise_above_the_difference_is_said() -> None:
    found = compare(_Cases([0.1, 0.103], noise=0.3).measure, 2, 3.0)
    ((low, high),) = found.rivals.values()
    assert low < 0.98
    assert high > 1.03


def test_seconds_of_who_left_early_are_those_of_the_same_machine() -> None:
    """The machine is three times as slow in the first rounds."""
    cases = _Cases([0.1, 0.2, 0.1])
    slow = iter([3.0] * 12)
    found = compare(lambda case: tuple(next(slow, 1.0) * one for one in cases.measure(case)), 3, 8.0, tolerance=-1.0)
    assert sum(found.seconds[1]) / sum(found.seconds[0]) == pytest.approx(2.0)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=41, unique=True))
@settings(max_examples=50)
def test_bounds_are_around_the_median(ratios: list[float]) -> None:
    low, high = ratio_bounds(ratios)
    assert low <= sorted(ratios)[len(ratios) // 2] <= high
    if len(ratios) > 7:
        assert min(ratios) < low
        assert high < max(ratios)


@pytest.mark.parametrize("number", [4, 5, 8, 12, 20])
def test_bounds_are_wrong_as_seldom_as_they_say(number: int) -> None:
    generator = random.Random(number)
    wrong = sum(ratio_bounds([generator.gauss(1, 0.1) for _ in range(number)])[0] > 1 for _ in range(2000))
    assert wrong / 2000 < 1 / 16 + 0.02


@pytest.mark.parametrize(("noise", "disturbance"), [(0.03, 0.1), (0.05, 0.15)])
def test_choices_are_within_5_percent_of_the_fastest_in_95_of_100_layers(noise: float, disturbance: float) -> None:
    """Predictions are 10 % off, so candidates differ by that much; layers take 100 ms; the budget is autotune's."""
    good, longest = 0, 0.0
    for seed in range(100):
        generator = random.Random(seed)
        seconds = [0.1 * math.exp(0.03 * place + generator.gauss(0, 0.1)) for place in range(5)]
        cases = _Cases(seconds, noise, disturbance, seed)
        found = compare(cases.measure, 5, 6.0, 0.03)
        good += seconds[found.fastest] <= 1.05 * min(seconds)
        longest = max(longest, cases.spent)
    assert good >= 95
    assert longest < 6.5


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=30)
def test_the_true_fastest_is_chosen_or_open_or_tied(seed: int, number: int) -> None:
    generator = random.Random(seed)
    seconds = [0.1 * generator.uniform(1, 2) for _ in range(number)]
    found = compare(_Cases(seconds, 0.02, 0.0, seed).measure, number, 20.0)
    best = min(range(number), key=lambda case: seconds[case])
    assert best == found.fastest or best in found.rivals or seconds[found.fastest] <= 1.06 * seconds[best]
