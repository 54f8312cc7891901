"""Scalars of one AdamW step, computed once for all elements, and the bound on its largest update.

With gradients g_1..g_t Adam's moments are m = (1 - b1) sum b1**(t-i) g_i and v = (1 - b2) sum b2**(t-i) g_i**2. By
Cauchy-Schwarz, and with equality for g_i proportional to (b1 / b2)**(t-i),

    |m| <= K_t sqrt(v),    K_t**2 = (1 - b1)**2 / (1 - b2) * (1 + r + ... + r**(t-1)),    r = b1**2 / b2,

so |dW| <= lr C_t + lr weight_decay |W| with C_t = K_t sqrt(1 - b2**t) / (1 - b1**t). That is Adam's own worst case for
any gradients: C_1 = 1, with the default betas C_10 = 1.04, C_200 = 3.1 and C_t < 7.3 always. (The often quoted (1 - b1)
/ sqrt(1 - b2) is K_1, the case of a single gradient after many zeros.) Exact moments keep within the bound. Quantized
ones need not, because rounding can make v small and leave m large; therefore m is limited to K_t sqrt(v) before it is
used and stored. If the moments of one step are within K_t, those of the next are within K_t+1 (the recursion K_t+1**2 =
r K_t**2 + K_1**2 is the same inequality), so the limit corrects rounding and never changes Adam.

Betas may change between steps. With all of them in ranges, each step's recursion has r and K_1 no larger than those of
the largest b1 and the smallest b2, and of the smallest b1 and the largest b2: K_t of these is a bound again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BetaRanges = tuple[float, float, float, float]
"""The smallest and the largest beta1, and the smallest and the largest beta2, of some steps."""

LARGEST_GRADIENT = 2.0**62
"""A finite gradient counts as no larger than this: the square of a larger one overflows fp32 (beyond 2**64), and the
reciprocal of a block's scale made of such squares underflows (beyond 2**126). Adam with gradients that are limited is
still Adam, so the bound above holds."""

# The limit lies this much above K_t, so that the roundings of fp32 alone never reach it.
_MARGIN = 1 + 2.0**-16
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_EPS = 2.0**-126


@dataclass(frozen=True)
class AdamWScalars:
    """Numbers representable in fp32, in the order of struct AdamWScalars in csrc/kernels/adamw.h."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    ratio_max: float
    """K_t: |m| is limited to this times sqrt(v)."""
    inverse_correction2: float
    """1 / sqrt(1 - beta2**step)."""
    eps: float
    """At least 2**-126, so that an element without any gradient is not 0 / 0."""
    decay: float
    """1 - lr * weight_decay."""
    step_size: float
    """lr / (1 - beta1**step)."""


def adamw_scalars(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, ratio: float | None = None
) -> AdamWScalars:
    """The scalars of step `step` (1 is the first); `ratio` is K_t where steps before had other betas."""
    if ratio is None:
        ratio = largest_ratio((beta1, beta1, beta2, beta2), step)
    return AdamWScalars(
        *(
            float(np.float32(number))
            for number in (
                beta1,
                1.0 - beta1,
                beta2,
                1.0 - beta2,
                min(ratio * _MARGIN, _LARGEST),
                1.0 / math.sqrt(1.0 - beta2**step),
                max(eps, _SMALLEST_EPS),
                1.0 - lr * weight_decay,
                lr / (1.0 - beta1**step),
            )
        )
    )


def widened(ranges: BetaRanges | None, beta1: float, beta2: float) -> BetaRanges:
    """Ranges that have the betas of one more step in them."""
    low1, high1, low2, high2 = (beta1, beta1, beta2, beta2) if ranges is None else ranges
    return min(low1, beta1), max(high1, beta1), min(low2, beta2), max(high2, beta2)


def largest_ratio(ranges: BetaRanges, step: int) -> float:
    """K_t, the largest |m| / sqrt(v) after `step` steps of exact Adam; infinity where there is none (beta2 = 0)."""
    low1, high1, low2, high2 = ranges
    first = (1.0 - low1) / math.sqrt(1.0 - high2)
    if high1 == 0.0 or step == 1:
        return first
    if low2 == 0.0:
        return math.inf
    log_r = 2.0 * math.log(high1) - math.log(low2)
    if log_r == 0.0:
        return first * math.sqrt(step)
    if log_r * step > 600.0:
        return math.inf
    return first * math.sqrt(math.expm1(step * log_r) / math.expm1(log_r))


def largest_step(beta1: float, beta2: float, step: int) -> float:
    """C_t: step `step` moves no weight by more than lr times this, apart from weight decay."""
    return largest_ratio((beta1, beta1, beta2, beta2), step) * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
