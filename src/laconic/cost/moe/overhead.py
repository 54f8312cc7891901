"""Fixed overhead of a route beside the time of its links: sorting and packing rows, announcing counts, small rounds.

It is measured as a whole, since its parts are many and short: a route with experts that do nothing, forward and
backward, less the time that the lines of its links predict (`laconic.moe.tuning.measure_dispatch`). The model is

    seconds = alpha + seconds_per_row * rows + seconds_per_byte * nbytes

rows are assignments, for which indices are made and sorted; bytes are those of the rows that are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import fsum
from typing import Annotated

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic reads no typing.TypedDict before Python 3.12

from laconic.cost.comm.rates import NonNegative


@dataclass(frozen=True)
class Overhead:
    """Seconds of one route in one direction without links, gate and experts."""

    alpha_seconds: Annotated[float, Field(ge=-3600, allow_inf_nan=False)]
    """May be negative: a line of a group includes announcements, which a route with agreed sizes does not need."""
    seconds_per_row: NonNegative = 0.0
    seconds_per_byte: NonNegative = 0.0
    error: NonNegative = 0.0
    """Largest error at the measured sizes, as a share of the whole time there."""

    def seconds(self, num_rows: float, nbytes: float) -> float:
        """Predict for `num_rows` assignments, whose rows have `nbytes` bytes."""
        return self.alpha_seconds + self.seconds_per_row * num_rows + self.seconds_per_byte * nbytes


@with_config(ConfigDict(extra="forbid"))
class BothWays(TypedDict):
    """Overheads of one route, by direction."""

    forward: Overhead
    backward: Overhead


@dataclass(frozen=True)
class Sample:
    """One measurement of a route."""

    num_rows: float
    nbytes: float
    seconds: float
    """Without the links' time; noise may make it negative."""
    total_seconds: float
    """With the links' time: errors count as shares of it."""


def fit_overhead(samples: Iterable[Sample], *, rounds: int = 3) -> Overhead:
    """Fit by least squares of the errors' shares of the whole time; slopes are at least 0.

    With three unknowns the constrained optimum is the free one or one with some of them 0, so all seven are tried.
    A sample that was disturbed is long, and as a share of itself its error counts less, so that a fit would come out
    too short by the noise's variance. After the first of `rounds`, shares are those of the time that was fitted.
    """
    kept = [sample for sample in samples if sample.total_seconds > 0]
    if not kept:
        raise ValueError("samples are empty or all 0 s, but a fit needs one with a positive time")
    totals = [sample.total_seconds for sample in kept]
    found = _fit(kept, totals)
    for _ in range(rounds - 1):
        fitted = [s.total_seconds - s.seconds + found.seconds(s.num_rows, s.nbytes) for s in kept]
        totals = [max(new, old / 4) for new, old in zip(fitted, totals, strict=True)]
        found = _fit(kept, totals)
    return found


def _fit(samples: Sequence[Sample], totals: Sequence[float]) -> Overhead:
    rows = [[1 / t, s.num_rows / t, s.nbytes / t] for s, t in zip(samples, totals, strict=True)]
    wanted = [s.seconds / t for s, t in zip(samples, totals, strict=True)]

    def errors(found: Sequence[float]) -> list[float]:
        return [fsum(a * x for a, x in zip(row, found, strict=True)) - b for row, b in zip(rows, wanted, strict=True)]

    best = [0.0, 0.0, 0.0]
    for used in chain.from_iterable(combinations(range(3), number) for number in (1, 2, 3)):
        found = _least_squares([[row[i] for i in used] for row in rows], wanted)
        if found is None or any(value < 0 for i, value in zip(used, found, strict=True) if i):
            continue
        whole = [0.0, 0.0, 0.0]
        for i, value in zip(used, found, strict=True):
            whole[i] = value
        if fsum(e * e for e in errors(whole)) < fsum(e * e for e in errors(best)) - 1e-15:
            best = whole
    return Overhead(best[0], best[1], best[2], max(map(abs, errors(best))))


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Return the x with the least |rows x - wanted|, or None if it is not unique. Columns are scaled: units differ."""
    size = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) for i in range(size)]
    if 0.0 in scales:
        return None
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [fsum(row[i] * row[j] for row in scaled) for j in range(size)]
        + [fsum(row[i] * b for row, b in zip(scaled, wanted, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda j: abs(matrix[j][i]))
        if abs(matrix[pivot][i]) < 1e-12 * len(rows):
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(size):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scales[i] for i in range(size)]
