"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from laconic.train.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) in a run of `steps`: linear warm-up, then half a cosine.

    The warm-up ends at the peak on step `warmup_steps - 1`; the last step, `steps - 1`, uses
    `min_learning_rate_ratio` times the peak, unless it is the only one behind the warm-up, which is at the peak. A run
    shorter than its warm-up only warms up.
    """
    if step < config.warmup_steps:
        return config.peak_learning_rate * (step + 1) / config.warmup_steps
    decay_steps = steps - 1 - config.warmup_steps
    if decay_steps <= 0:
        return config.peak_learning_rate
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    floor = config.min_learning_rate_ratio
    return config.peak_learning_rate * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
