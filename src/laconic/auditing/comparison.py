"""Whether two runs of an audit have computed the same, parameter by parameter.

Four runs make a chain in which every link is the order of floating-point sums, whatever the format:

    exact       the code as it was
    unrounded   laconic's forwards and backwards, where every tensor that is packed is kept as it is
    rounded     the same, where it is kept as what its codes rebuild, each value of which was held to the format's bound
    compressed  codes, scales, and the kernels that read them

So `unrounded` has to equal `exact`, and `compressed` has to equal `rounded`, up to sums in another order; the error
that the formats make lies between `unrounded` and `rounded`, where it was bounded value by value (rounding_bound.py).
What remains to be allowed is relative: `TOLERANCE`. Two orders of a sum differ by some roundings of the dtype per
layer: fp32 language models under test by 1.7e-5 at most, bfloat16 by 0.011, float16, whose small gradients underflow,
by 0.015. Where the exact run itself does not repeat, twice what it differs by is allowed; and where a gradient is off
by more than the tolerance, twice what noise of some roundings in the exact run's backward makes of it: some models
(a DenseNet on two images, 6e-4) amplify rounding.

A gradient may be zero but for rounding, as that of a bias in front of a norm; its error is held to a share of the
model's gradients as a whole, `NEGLIGIBLE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 2.0**-4, torch.bfloat16: 2.0**-3}
"""Relative error of a gradient that the order of sums may make, by dtype."""

NEGLIGIBLE = 1e-2
"""Share of the gradients' root mean square, below which a gradient counts as zero but for rounding."""


@dataclass(frozen=True)
class Difference:
    """A parameter whose gradient is not what it has to be.

    Attributes:
        name: of the parameter.
        error: norm of the difference over that of the expected gradient; infinite if one of the two is missing.
        slope: the gradient regressed on the expected one: 2.0 where it is twice as large.
        what: in words.
    """

    name: str
    error: float
    slope: float
    what: str


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two losses have the same bits, not-a-numbers of any kind being alike."""
    return bool(torch.equal(a, b) or (a.isnan().all() and b.isnan().all()))


def compare(
    got: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    tolerance: float,
    allowed: Mapping[str, float] | None = None,
) -> list[Difference]:
    """The parameters whose gradients differ by more than `tolerance`, the worst first.

    Args:
        got, expected: gradients by name; None where a parameter got none.
    """
    scale = _root_mean_square(expected)
    found = []
    for name, wanted in expected.items():
        gradient = got.get(name)
        if wanted is None or gradient is None:
            missing = gradient if wanted is None else wanted
            if missing is None or float(in_doubles(missing).norm()) <= NEGLIGIBLE * scale * math.sqrt(missing.numel()):
                continue
            what = "has a gradient, and none in the exact run" if wanted is None else "has no gradient"
            found.append(Difference(name, math.inf, 0.0, what))
            continue
        error, slope = relative_error(gradient, wanted, scale)
        limit = max(tolerance, (allowed or {}).get(name, 0.0))
        if error <= limit:
            continue
        what = f"has {slope:.3f} times the expected gradient" if _is_scaled(error, slope) else f"is off by {error:.2g}"
        found.append(Difference(name, error, slope, what if math.isfinite(error) else "is not finite"))
    return sorted(found, key=lambda one: -one.error if not math.isnan(one.error) else -math.inf)


def relative_error(got: Tensor, expected: Tensor, scale: float) -> tuple[float, float]:
    """Norm of the difference over that of `expected` and of its negligible part; and the slope of one on the other."""
    if expected.numel() == 0:
        return 0.0, 1.0
    wanted, found = in_doubles(expected), in_doubles(got)
    finite = wanted.isfinite()
    if not bool(finite.all()):
        if not torch.equal(finite, found.isfinite()):
            return math.nan, math.nan
        wanted, found = wanted[finite], found[finite]
    norm = float(wanted.norm())
    size = norm + NEGLIGIBLE * scale * math.sqrt(expected.numel())
    difference = float((found - wanted).norm())
    slope = float(found @ wanted) / norm**2 if norm else 1.0
    return (difference / size if size else (math.inf if difference else 0.0)), slope


def in_doubles(x: Tensor) -> Tensor:
    """All numbers of x, float64 [n]; of complex ones both parts."""
    x = x.detach()
    return (torch.view_as_real(x) if x.is_complex() else x).double().flatten()


def _is_scaled(error: float, slope: float) -> bool:
    return math.isfinite(slope) and abs(abs(slope - 1) - error) <= 0.05 * error


def _root_mean_square(gradients: Mapping[str, Tensor | None]) -> float:
    total = count = 0.0
    for gradient in gradients.values():
        if gradient is not None:
            values = in_doubles(gradient)
            total += float(values[values.isfinite()].square().sum())
            count += gradient.numel()
    return math.sqrt(total / count) if count else 0.0
