"""The fastest of several cases, in rounds in which they take turns, until it is clear (successive elimination).

Other work on a machine slows neighbours in a round alike, so cases are compared within rounds: by the ratios of their
seconds to those of the case that leads. A ratio's bounds are order statistics, as in the sign test: no distribution is
assumed, and one disturbed round does not move them. A case whose lower bound says that it is not faster than the leader
runs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, inf
from statistics import median

Seconds = tuple[float, float]
"""Of forward and of backward."""

_MAX_ROUNDS = 40
_CHANCE = 1 / 16
"""That a bound is on the wrong side of the median ratio, at most."""
_FEW = (inf, 0.25, 0.1)
"""With one, two, three rounds bounds are the extremes, this share wider."""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`."""

    seconds: tuple[Seconds, ...]
    """By case, as if all had run in all rounds."""
    fastest: int
    rivals: Mapping[int, Seconds] = field(default_factory=dict)
    """Cases that noise leaves open: bounds of their seconds over those of the fastest."""


def compare(
    measure: Callable[[int], Seconds], num_cases: int, budget_seconds: float, tolerance: float = 0.02
) -> Comparison:
    """Run cases in turn until one is the fastest, or no other can be faster by more than the share `tolerance`.

    `measure` runs a case and returns its seconds, the same on all ranks. No round begins that would exceed
    `budget_seconds`, but one always runs.
    """
    samples: list[list[Seconds]] = [[] for _ in range(num_cases)]
    running, bounds = list(range(num_cases)), dict[int, Seconds]()
    spent = sum(sum(measure(case)) for case in running)  # first runs build what later ones use, and do not count
    for number in range(_MAX_ROUNDS if num_cases > 1 else 3):
        for case in running if number % 2 else running[::-1]:  # what drifts within a round cancels over two
            samples[case].append(measure(case))
            spent += sum(samples[case][-1])
        fastest = min(running, key=lambda case: median(map(sum, samples[case])))
        bounds = {case: ratio_bounds(_ratios(samples[case], samples[fastest])) for case in running if case != fastest}
        bounds = {case: bound for case, bound in bounds.items() if bound[0] < 1 - tolerance}
        running = [case for case in running if case == fastest or case in bounds]
        ahead = sum(sum(samples[case][-1]) for case in running)
        if spent + ahead > budget_seconds or (len(running) == 1 < num_cases):
            break
    return Comparison(tuple(_as_in_all(one, samples[fastest]) for one in samples), fastest, bounds)


def ratio_bounds(ratios: Sequence[float]) -> Seconds:
    """Bounds of the median that these ratios scatter around, each wrong with a chance of at most 1 in 16."""
    ordered, number = sorted(ratios), len(ratios)
    if number <= len(_FEW):
        return max(0.0, ordered[0] * (1 - _FEW[number - 1])), ordered[-1] * (1 + _FEW[number - 1])
    left_out, below = 0, 0.0
    while (below := below + comb(number, left_out) / 2**number) <= _CHANCE:
        left_out += 1
    return ordered[left_out - 1], ordered[-left_out]


def _ratios(samples: Sequence[Seconds], others: Sequence[Seconds]) -> list[float]:
    """Ratios of the rounds that both were in."""
    return [sum(mine) / max(sum(its), 1e-12) for mine, its in zip(samples, others, strict=False)]


def _as_in_all(samples: Sequence[Seconds], fastest: Sequence[Seconds]) -> Seconds:
    """Median seconds of a case that ran in the first rounds only, which may have been slow ones."""
    forward, backward = (median(column) for column in zip(*samples, strict=True))
    whole = median(_ratios(samples, fastest)) * median(map(sum, fastest))
    share = forward / max(forward + backward, 1e-12)
    return whole * share, whole * (1 - share)
