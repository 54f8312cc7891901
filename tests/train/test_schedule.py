"""The learning rate: warm-up, cosine, and the borders between them."""

import math

import pytest

from laconic.train.config.schema import OptimizerConfig
from laconic.train.lr_schedule import learning_rate

CONFIG = OptimizerConfig(learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_steps=4)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [learning_rate(CONFIG, step, 20) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_starts_at_the_peak_and_ends_at_the_floor() -> None:
    rates = [learning_rate(CONFIG, step, 20) for step in range(4, 20)]
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-15)
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(CONFIG, 9, 15) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_a_run_as_short_as_its_warm_up_only_warms_up(steps: int) -> None:
    assert [learning_rate(CONFIG, step, steps) for step in range(steps)] == [0.25, 0.5, 0.75, 1.0, 1.0][:steps]


def test_no_warm_up_starts_at_the_peak() -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=0)
    assert learning_rate(config, 0, 10) == 2.0
