"""The one way to take times: all cases in turn, round after round; what counts of a case is the median of its rounds.

Times are only comparable within one run, because machines drift and share their memory with others. So every table
times its cases in the same rounds and reports medians and ratios within the run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Case = Callable[[], object]

Clock = Callable[[Case], Callable[[], float]]
"""Runs a case and returns what reads its seconds, which is called when all rounds are over."""


class Timing(float):
    """Median seconds of a case; `samples` holds the seconds of every round that counted."""

    samples: tuple[float, ...]

    def __new__(cls, samples: Sequence[float]) -> Timing:
        timing = super().__new__(cls, median(samples))
        timing.samples = tuple(samples)
        return timing

    def __getnewargs__(self) -> tuple[tuple[float, ...]]:
        return (self.samples,)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the rounds, as a share of the median."""
        if len(self.samples) < 2 or not self:
            return 0.0
        first, _, third = quantiles(self.samples, method="inclusive")
        return (third - first) / self

    def over(self, other: Timing) -> float:
        """Median of the quotients of each round, so that what disturbs a round disturbs both of its times."""
        return median(mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True))


@dataclass(frozen=True)
class Protocol:
    """How times of some cases were taken: what came before, how many rounds count, and how far these are apart."""

    warm_up_rounds: int
    warm_ups: int
    rounds: int
    spreads: Mapping[str, float]


protocols: list[Protocol] = []
"""Of all calls of `seconds_of` so far, and of those that ranks of a lab made."""


def wall_clock(case: Case) -> Callable[[], float]:
    """Seconds on the wall until the case returns."""
    started = time.perf_counter()
    case()
    taken = time.perf_counter() - started
    return lambda: taken


def processor_clock(case: Case) -> Callable[[], float]:
    """Seconds of this process, whatever else the machine does."""
    started = time.process_time()
    case()
    taken = time.process_time() - started
    return lambda: taken


def in_rounds(
    cases: Mapping[str, Case],
    rounds: int,
    read: Callable[[Case], Any],
    *,
    warm_up_rounds: int = 1,
    warm_ups: int = 0,
    before: Callable[[str], object] | None = None,
    shuffle: bool = False,
) -> dict[str, list[Any]]:
    """What `read` returned for each case in each round that counts; arguments as in `seconds_of`."""
    found: dict[str, list[Any]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(-warm_up_rounds, rounds):
        for name in random.Random(number).sample(names, len(names)) if shuffle else names:
            for _ in range(warm_ups):
                cases[name]()
            if before is not None:
                before(name)
            value = read(cases[name])
            if number >= 0:
                found[name].append(value)
    return found


UNUSUAL_ROUNDS = 10
"""Warm-up rounds of training steps: a converted model's first ten compare themselves with what forward held
(`ALWAYS` of activations/keep/witnesses.py), and one in fifty of the thousands behind."""


def seconds_of(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    warm_up_rounds: int = 1,
    warm_ups: int = 0,
    before: Callable[[str], object] | None = None,
    shuffle: bool = False,
    clock: Clock = wall_clock,
) -> dict[str, Timing]:
    """Median seconds of each case over `rounds` rounds that take every case in turn.

    Arguments:
        warm_up_rounds: rounds before them, which do not count.
        warm_ups: how often a case runs before each time that counts, so that it finds warm caches; without, it pays
            for the caches that the case before it left.
        before: called with the name of a case before each of its times, and not timed.
        shuffle: every round has an order of its own, the same on all ranks: no case always follows the same one.
        clock: how one run is timed.
    """
    found = in_rounds(
        cases, rounds, clock, warm_up_rounds=warm_up_rounds, warm_ups=warm_ups, before=before, shuffle=shuffle
    )
    timings = {name: Timing([read() for read in readings]) for name, readings in found.items()}
    note(timings, warm_up_rounds, warm_ups)
    return timings


def note(timings: Mapping[str, Timing], warm_up_rounds: int, warm_ups: int) -> None:
    """Remember how these times were taken, for `summary`."""
    rounds = len(next(iter(timings.values())).samples)
    protocols.append(
        Protocol(warm_up_rounds, warm_ups, rounds, {name: timing.spread for name, timing in timings.items()})
    )


def summary() -> str:
    """How all times so far were taken, in a few sentences; empty if there are none."""
    if not protocols:
        return ""
    warm = {protocol.warm_ups > 0 for protocol in protocols}
    caches = {
        frozenset({True}): "each right after a run of the same case (warm caches)",
        frozenset({False}): "each right after another case (cold caches)",
    }.get(frozenset(warm), "some right after a run of the same case (warm caches), some after another (cold caches)")
    spreads = [
        (spread, name) for protocol in protocols for name, spread in protocol.spreads.items() if protocol.rounds > 1
    ]
    spread_text = "one round has none"
    if spreads:
        worst, name = max(spreads)
        middle = median(spread for spread, _ in spreads)
        spread_text = f"{middle:.1%} in the middle of {len(spreads)} cases, at most {worst:.1%} ({name})"
    return (
        f"Times: medians of rounds in which all cases of a table take turns, {caches}. Rounds that count:"
        f" {_range([protocol.rounds for protocol in protocols])}; rounds before them:"
        f" {_range([protocol.warm_up_rounds for protocol in protocols])}. Spread (distance of the quartiles over the"
        f" median): {spread_text}.\n"
    )


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"
