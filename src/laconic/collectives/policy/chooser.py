"""Choices of one group's ranks from shared estimates: how far data shrinks, and the time of raw and coded calls.

A rank's observations of a call are sent with the handshake of the group's next coded call, and all ranks learn them
there. So no extra communication is needed, and all ranks have the same estimates at the same call.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from laconic.cost.comm.rates import WireRates
from laconic.cost.comm.seconds import (
    LOW_RATIO,
    MEASURED_SLOWER,
    PROBE,
    PROBE_CODED,
    PROBE_RAW,
    RAW,
    AlgorithmChoice,
    GroupShape,
    decide,
)
from laconic.errors import FormatError

_NOTE = struct.Struct("<QQQQI")
"""Bytes of messages, those expected of Gaussian data, nanoseconds of a coded call, of a raw one, checksum."""

NOTE_NBYTES = _NOTE.size

_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class CallKind:
    """What distinguishes calls that are chosen for."""

    operation: str
    numel: int
    dtype: str
    tag: str = ""

    @property
    def kind(self) -> tuple[str, str, str]:
        """Data of one kind shrinks alike."""
        return self.operation, self.dtype, self.tag

    @property
    def size(self) -> tuple[str, str, str, int]:
        """Calls of one kind take about as long per element within a factor of two of size."""
        return *self.kind, self.numel.bit_length()


class Chooser:
    """Chooses for the calls of a group, in their order, from rates on which all ranks agreed.

    `codecs_of` adds the codecs of a dtype to them. If it `learns`, ranks exchange their observations; if it `repeats`,
    sums over more than two ranks do not depend on measured times, because raw and coded ones add in different orders.
    """

    def __init__(
        self,
        group_shape: GroupShape,
        rates: WireRates,
        codecs_of: Callable[[WireRates, str], WireRates] | None = None,
        *,
        learns: bool = True,
        repeats: bool = False,
    ) -> None:
        self.group_shape = group_shape
        self.rates = rates
        self._codecs_of = codecs_of
        self._learns = learns
        self._is_brief = not repeats
        self._times_sums = not repeats or group_shape.num_ranks == 2
        self._shrinkages: dict[tuple[str, str, str], Shrinkage] = {}
        self._times: dict[tuple[str, str, str, int], CallTimes] = {}
        self._kept: dict[tuple[str, int, str, int], AlgorithmChoice] = {}
        # Observed and not announced yet, and announced and not learnt yet.
        self._coded: tuple[CallKind, int, int, int] | None = None
        self._raw: tuple[CallKind, int, int] | None = None
        self._announced: tuple[CallKind | None, CallKind | None] = (None, None)

    def choose(self, call: CallKind) -> AlgorithmChoice:
        """The choice for the next call of the group."""
        if self.must_measure(call.dtype) and self._codecs_of is not None:
            self.rates = self._codecs_of(self.rates, call.dtype)
        shrinkage = self._shrinkages.setdefault(call.kind, Shrinkage())
        choice = self._decide(call, shrinkage.steps)
        if choice.reason == LOW_RATIO and shrinkage.wants_probe():
            coded = self._decide(call, None)
            return replace(coded, predicted_seconds=coded.raw_seconds, reason=PROBE)
        if choice.codec == RAW or not self._is_timed(call):
            return choice
        next_call = self._times.setdefault(call.size, CallTimes()).next()
        if next_call == CODED:
            return choice
        if next_call == TRY:
            return replace(choice, reason=PROBE_CODED)
        reason = MEASURED_SLOWER if next_call == SLOWER else PROBE_RAW
        return AlgorithmChoice(RAW, 1, choice.levels, choice.raw_seconds, choice.raw_seconds, reason)

    def why_always_raw(self, operation: str, numel: int, dtype: str) -> str | None:
        """Why a message is left raw whatever was learnt; None if it need not be, or the dtype was not measured."""
        if dtype not in self.rates.codecs:
            return None
        choice = self._decide(CallKind(operation, numel, dtype), None)
        return choice.reason if choice.codec == RAW else None

    def refusal(self, call: CallKind) -> Refusal | None:
        """What tells call by call, instead of `choose`, that those like `call` are left raw still; None if unknown."""
        shrinkage, times = self._shrinkages.get(call.kind), self._times.get(call.size)
        if shrinkage is None or self.must_measure(call.dtype):
            return None
        choice = self._decide(call, shrinkage.steps)
        if choice.reason == LOW_RATIO:
            return Refusal(LOW_RATIO, shrinkage.factor, shrinkage)
        if choice.codec == RAW or times is None or not times.is_slower or not self._is_timed(call):
            return None
        slower = replace(choice, codec=RAW, reason=MEASURED_SLOWER)
        return Refusal(MEASURED_SLOWER, shrinkage.factor, shrinkage, times, partial(self.observe, call, slower, 0, 0))

    def must_measure(self, dtype: str) -> bool:
        """Whether to choose for this dtype the ranks have to measure something together."""
        return dtype not in self.rates.codecs and self._codecs_of is not None

    def observe(
        self, call: CallKind, choice: AlgorithmChoice, raw_nbytes: int, message_nbytes: int, nanoseconds: int
    ) -> None:
        """Record the newest call on this rank: `raw_nbytes` became `message_nbytes`, the call took `nanoseconds`."""
        if choice.codec != RAW:
            expected_nbytes = round(raw_nbytes / self.rates.codecs[call.dtype][choice.codec].ratio)
            self._coded = call, message_nbytes, expected_nbytes, nanoseconds
        elif choice.reason in (MEASURED_SLOWER, PROBE_RAW):
            total, num_calls = self._raw[1:] if self._raw is not None and self._raw[0].size == call.size else (0, 0)
            self._raw = call, total + nanoseconds, num_calls + 1

    def note(self) -> bytes:
        """What this rank adds to its next announcement."""
        coded, raw, self._coded, self._raw = self._coded, self._raw, None, None
        self._announced = coded and coded[0], raw and raw[0]
        values = (*(coded[1:] if coded else (0, 0, 0)), raw[1] // raw[2] if raw else 0)
        return _NOTE.pack(*values, _checksum(values))

    def merge_notes(self, notes: Sequence[bytes]) -> None:
        """Take the notes of all ranks, this one's included, in the order of ranks; FormatError for a damaged one."""
        if not self._learns:
            return
        rows = []
        for note in notes:
            *values, checksum = _NOTE.unpack(note)
            if checksum != _checksum(values):
                raise FormatError("what a rank has observed arrived damaged; start again from a checkpoint")
            rows.append(values)
        messages, expected, coded_ns, raw_ns = zip(*rows, strict=True)
        (coded, raw), self._announced = self._announced, (None, None)
        if coded is not None:
            self._shrinkages.setdefault(coded.kind, Shrinkage()).update(sum(messages), sum(expected))
            self._times.setdefault(coded.size, CallTimes()).update_coded(_per_element(coded_ns, coded))
        if raw is not None:
            self._times.setdefault(raw.size, CallTimes()).update_raw(_per_element(raw_ns, raw))

    def _is_timed(self, call: CallKind) -> bool:
        return self._learns and (self._times_sums or call.operation not in _SUMS)

    def _decide(self, call: CallKind, steps: int | None) -> AlgorithmChoice:
        """`steps`: bytes observed over bytes expected, in 1 / FINENESS; None if nothing was observed."""
        key = (call.operation, call.numel, call.dtype, -1 if steps is None else steps)
        if key not in self._kept:
            if len(self._kept) >= 4096:
                self._kept.clear()
            codes = self.rates.codecs.get(call.dtype, {})
            ratio = None if steps is None else {code: c.ratio * FINENESS / steps for code, c in codes.items()}
            # A brief measurement errs towards raw: where time decides, that would stand for ever.
            tries = self._is_brief and self._is_timed(call)
            choice = decide(call.operation, call.numel, call.dtype, self.group_shape, self.rates, ratio, tries=tries)
            # Nor does it know what a chunk costs.
            self._kept[key] = replace(choice, num_chunks=0) if tries and choice.codec != RAW else choice
        return self._kept[key]


def _checksum(values: Sequence[int]) -> int:
    return zlib.crc32(struct.pack("<QQQQ", *values))


def _per_element(nanoseconds: Sequence[int], call: CallKind) -> tuple[float, float]:
    return min(nanoseconds) / call.numel, max(nanoseconds) / call.numel


# --- estimates ---
#
# Everything is updated with numbers that are the same on all ranks, at the same call of each.

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
        """Update with the messages of all ranks."""
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

_NUM_KEPT = 3
"""Newest observations of coded and of raw calls, of which the fastest count: one that was held up would stand for long.
"""

_FIRST_CODED, _LAST_CODED = 8, 512
"""Calls left raw because coding was slower, after which two are coded to see whether it still is; doubled each time."""

_NUM_CODED = 2
"""Coded calls of a probe: the seconds of one are reported with the next."""

_MIN_GAIN = 0.03
"""Least measured gain, as a share of the raw time, at which calls are coded: coding works the processor."""

CODED, SLOWER, TRY = "coded", "slower", "try"


@dataclass
class CallTimes:
    """What raw and coded calls of one kind and size take, in nanoseconds per element; decides between them.

    Each is what the call took on the fastest rank and on the slowest. Where ranks come to a call at different times,
    waiting counts in on all but the last, so the fastest tells what it takes. Where they leave it at different times,
    as gloo's all-to-all lets them, the slowest does. So coded calls are slower only if they are by both.
    """

    coded: list[tuple[float, float]] = field(default_factory=list)
    raw: list[tuple[float, float]] = field(default_factory=list)
    is_slower: bool = False
    """Whether coded calls take longer than raw ones, as far as is known; calls that are left raw ask each time."""
    num_reports: int = 0
    num_coded: int = 0
    raw_after: int = _FIRST_RAW
    num_refused: int = 0
    coded_after: int = _FIRST_CODED
    num_probes: int = 0

    def next(self) -> str:
        """Decide the next call for which coding is predicted to pay: CODED, or RAW to see what that takes.

        Or SLOWER (raw, since coding has been slower), or TRY (coded, to see whether it still is).
        """
        if self.num_probes:
            self.num_probes -= 1
            return TRY
        if self.is_slower:
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

    def update_coded(self, nanoseconds: tuple[float, float]) -> None:
        """Take the times per element of a coded call, but the very first: buffers and connections are new there."""
        self.num_reports += 1
        if self.num_reports > 1:
            self.coded = [*self.coded[1 - _NUM_KEPT :], nanoseconds]
            self._compare()

    def update_raw(self, nanoseconds: tuple[float, float]) -> None:
        """The same of raw calls."""
        self.raw = [*self.raw[1 - _NUM_KEPT :], nanoseconds]
        self._compare()

    def _compare(self) -> None:
        pairs = zip(zip(*self.coded, strict=True), zip(*self.raw, strict=True), strict=False)
        slower = [min(coded) > (1 - _MIN_GAIN) * min(raw) for coded, raw in pairs]
        self.is_slower = bool(slower) and all(slower)


@dataclass(slots=True)
class Refusal:
    """Tells of calls of one kind, in their order, that they are left raw still, as `Chooser.choose` would.

    `factor` is that of `shrinkage` when `reason` was found, LOW_RATIO or MEASURED_SLOWER, which comes with `times`;
    `observe` takes the nanoseconds of a call where the estimates need them.
    """

    reason: str
    factor: float | None
    shrinkage: Shrinkage
    times: CallTimes | None = None
    observe: Callable[[int], None] | None = None

    def holds(self) -> bool:
        """Whether the next call is left raw; counts it then. If not, `choose` has to be asked."""
        shrinkage, times = self.shrinkage, self.times
        if shrinkage.factor != self.factor:
            return False
        if times is None:
            if shrinkage.num_refused + 1 >= shrinkage.probe_after:
                return False
            shrinkage.num_refused += 1
        else:
            if times.num_probes or not times.is_slower or times.num_refused + 1 >= times.coded_after:
                return False
            times.num_refused += 1
        return True
