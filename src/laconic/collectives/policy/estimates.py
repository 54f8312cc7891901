"""What ranks have learnt from earlier messages: how far data shrinks, and what raw and coded calls really take.

Everything is updated with numbers that are the same on all ranks, at the same call of each, so that ranks which choose
by it choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laconic.cost.comm.seconds import MIN_GAIN

__all__ = ["FINENESS", "Pace", "Shrinkage"]

FINENESS = 64
"""Shrinkage is rounded to this fraction when a choice is made, so that choices can be kept."""

_WEIGHT = 0.25
"""Of a new observation in a running estimate."""

_FIRST_PROBE, _LAST_PROBE = 64, 4096
"""Calls left raw because of the ratio, after which one is coded to see whether that still holds; doubled each time."""


@dataclass
class Shrinkage:
    """How far one kind of data shrinks, as bytes observed over bytes expected of Gaussian data."""

    factor: float | None = None
    num_refused: int = 0
    probe_after: int = _FIRST_PROBE
    probing: bool = False

    @property
    def steps(self) -> int | None:
        """The factor in 1 / FINENESS; None if nothing was observed."""
        return None if self.factor is None else max(1, round(self.factor * FINENESS))

    def update(self, message_nbytes: int, expected_nbytes: int) -> None:
        """Take what the messages of all ranks came to."""
        if expected_nbytes == 0:
            return
        found = message_nbytes / expected_nbytes
        if self.factor is None or self.probing:
            if self.factor is not None and found < 0.98 * self.factor:
                self.probe_after = _FIRST_PROBE  # the data has changed
            self.factor, self.probing = found, False
        else:
            self.factor += _WEIGHT * (found - self.factor)

    def wants_probe(self) -> bool:
        """Whether this call, which would be left raw because of the ratio, should be coded nevertheless."""
        self.num_refused += 1
        if self.num_refused < self.probe_after:
            return False
        self.num_refused, self.probe_after = 0, min(2 * self.probe_after, _LAST_PROBE)
        self.probing = True
        return True


_FIRST_RAW, _LAST_RAW = 4, 256
"""Coded calls after which one is left raw to see what that takes; doubled each time."""

_NUM_RAW = 3
"""Newest observations of raw calls, of which the fastest counts: one that was held up would stand for long."""

_FIRST_CODED, _LAST_CODED = 8, 512
"""Calls left raw because coding was slower, after which two are coded to see whether it still is; doubled each time."""

_NUM_CODED = 2
"""Coded calls of a probe: what one took is told with the next."""

CODED, RAW, SLOWER, TRY = "coded", "raw", "slower", "try"


@dataclass
class Pace:
    """What raw and coded calls of one kind and size take, in nanoseconds per element; decides between them.

    A call takes what it takes on the rank that comes to it last: on the others waiting counts in.
    """

    coded: float | None = None
    raw: float | None = None
    num_told: int = 0
    num_coded: int = 0
    raw_after: int = _FIRST_RAW
    num_refused: int = 0
    coded_after: int = _FIRST_CODED
    num_probes: int = 0
    raw_kept: list[float] = field(default_factory=list)

    def next(self) -> str:
        """How the next call should go for which coding is predicted to pay: CODED, or RAW to see what that takes, or
        raw since coding has been SLOWER, or coded as a TRY whether it still is."""
        if self.num_probes:
            self.num_probes -= 1
            return TRY
        if self.raw is not None and self.coded is not None and self.coded > (1 - MIN_GAIN) * self.raw:
            self.num_refused += 1
            if self.num_refused < self.coded_after:
                return SLOWER
            self.num_refused, self.coded_after = 0, min(2 * self.coded_after, _LAST_CODED)
            self.num_probes = _NUM_CODED - 1
            return TRY
        self.num_refused = 0
        self.num_coded += 1
        if self.num_coded <= self.raw_after:
            return CODED
        self.num_coded, self.raw_after, self.coded_after = 0, min(2 * self.raw_after, _LAST_RAW), _FIRST_CODED
        return RAW

    def update_coded(self, nanoseconds: float, tried: bool = False) -> None:
        """Take what a coded call took per element on the rank that was fastest; `tried` after a while without one. The
        very first does not count: buffers and connections are new."""
        self.num_told += 1
        if self.num_told > 1:
            known = nanoseconds if self.coded is None or tried else self.coded
            self.coded = known + _WEIGHT * (nanoseconds - known)

    def update_raw(self, nanoseconds: float) -> None:
        """The same of raw calls."""
        self.raw_kept = [*self.raw_kept[1 - _NUM_RAW :], nanoseconds]
        self.raw = min(self.raw_kept)
