"""Activations that the gated ops compute: x * sigmoid(x * (linear + cubic * x**2)), and the arithmetic they share.

The three that nearly all gated feed-forward blocks have are one formula with two numbers: silu, CLIP's approximation of
GELU, and GELU by tanh, since 1 + tanh(z) = 2 * sigmoid(2 * z). So one kernel serves them all.
"""

from __future__ import annotations

import math

import torch


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)

CURVES: dict[str, tuple[float, float, float]] = {
    "silu": (1.0, 0.0, 0.0),
    "quick_gelu": (_fp32(1.702), 0.0, 0.0),
    "gelu_tanh": (_fp32(_TANH_SLOPE), _fp32(_TANH_SLOPE * 0.044715), _fp32(_TANH_SLOPE * 0.134145)),
}
"""(linear, cubic, 3 * cubic) of each activation, fp32 numbers."""

ACTIVATION_LIMIT = 128.0
"""Beyond it every sigmoid here is 0 or 1 in fp32; its argument is cut off there, so that no square overflows."""
EXP_LIMIT = 86.0
"""Arguments of exp lie between it and its negative; 2**-126 < exp(-86), so that no result is subnormal."""

# exp(z) = 2**k * exp(f) with k = round(z / ln 2), f = z - k ln 2 in two steps (Cody and Waite), and the polynomial of
# Cephes' expf (S. Moshier) for |f| <= ln(2) / 2: within 2 units of the last place.
LOG2_E = _fp32(1.44269504088896341)
LN2_HIGH = 0.693359375
LN2_LOW = _fp32(-2.12194440e-4)
ROUNDER = 12582912.0
"""1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low bits."""
EXP_COEFFICIENTS = tuple(
    map(_fp32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
)
"""From the highest power: exp(f) = 1 + f + f**2 * (c5 + f * (c4 + ...))."""
