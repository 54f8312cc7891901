"""Audit of sent bytes: raw and sent bytes per kind of call, and why calls were left raw.

Every collective of this package writes one line here. Counting is a dictionary update under a lock, a few microseconds;
calls that are left raw by the thousand count in a `tally`, which takes no lock and a fraction of that time. Reading
copies. Counts are of this process; a run adds those of its ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count as counter
from typing import Any

from laconic.cost.sizes import format_nbytes
from laconic.text_columns import columns

RAW = "raw"
"""Codec name of messages that are sent uncoded."""

_MAX_REASONS = 32
"""Reasons counted separately per entry; it bounds the memory of a caller that writes numbers into reasons."""


@dataclass
class Entry:
    """Sums over all calls of one kind: operation, dtype and codec."""

    operation: str
    dtype: str
    codec: str
    num_calls: int = 0
    raw_nbytes: int = 0
    """Bytes this process would have sent without a codec."""
    sent_nbytes: int = 0
    """Bytes it sent, headers and exchanged sizes included."""
    coding_seconds: float = 0.0
    """Time of encoding and decoding; part of it may have been overlapped with the transfer."""
    saved_seconds: float = 0.0
    """Estimate: the cost model's prediction for raw minus its prediction for the codec taken. Not measured."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Reasons for this codec, and the number of calls for each."""

    @property
    def ratio(self) -> float:
        """Bytes raw over bytes sent; 1 if no byte was sent."""
        return self.raw_nbytes / self.sent_nbytes if self.sent_nbytes else 1.0

    def add(
        self, num_calls: int, raw_nbytes: int, sent_nbytes: int, coding: float, saved: float, reasons: Mapping[str, int]
    ) -> None:
        """Add calls of this kind, or take them away."""
        self.num_calls += num_calls
        self.raw_nbytes += raw_nbytes
        self.sent_nbytes += sent_nbytes
        self.coding_seconds += coding
        self.saved_seconds += saved
        for reason, count in reasons.items():
            name = reason if reason in self.reasons or len(self.reasons) < _MAX_REASONS else "other reasons"
            self.reasons[name] = self.reasons.get(name, 0) + count


@dataclass(frozen=True)
class Snapshot:
    """Counts up to one moment, or between two (`later - earlier`)."""

    entries: tuple[Entry, ...]

    @property
    def raw_nbytes(self) -> int:
        """Sum over all entries."""
        return sum(entry.raw_nbytes for entry in self.entries)

    @property
    def sent_nbytes(self) -> int:
        """Sum over all entries."""
        return sum(entry.sent_nbytes for entry in self.entries)

    @property
    def ratio(self) -> float:
        """Bytes raw over bytes sent of all entries together; 1 if no byte was sent."""
        return self.raw_nbytes / self.sent_nbytes if self.sent_nbytes else 1.0

    @property
    def coding_seconds(self) -> float:
        """Sum over all entries."""
        return sum(entry.coding_seconds for entry in self.entries)

    @property
    def saved_seconds(self) -> float:
        """Sum over all entries; an estimate of the cost model, see `Entry.saved_seconds`."""
        return sum(entry.saved_seconds for entry in self.entries)

    def left_raw(self) -> dict[str, int]:
        """Number of calls left raw by reason, most frequent first."""
        found: dict[str, int] = {}
        for entry in self.entries:
            if entry.codec == RAW:
                for reason, count in entry.reasons.items():
                    found[reason] = found.get(reason, 0) + count
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def __sub__(self, earlier: Snapshot) -> Snapshot:
        before = {_key(entry): entry for entry in earlier.entries}
        left = (_plus(entry, before[_key(entry)], -1) if _key(entry) in before else entry for entry in self.entries)
        return Snapshot(tuple(entry for entry in left if entry.num_calls))

    def __add__(self, other: Snapshot) -> Snapshot:
        """Add both, for instance those of two ranks."""
        sums = {_key(entry): entry for entry in self.entries}
        for entry in other.entries:
            sums[_key(entry)] = _plus(sums[_key(entry)], entry) if _key(entry) in sums else entry
        return Snapshot(_sorted(sums.values()))

    def table(self) -> str:
        """Format a table for a terminal: a line per entry, the sum, and the reasons for calls left raw."""
        if not self.entries:
            return "no collective of laconic was called"
        header = ["operation", "dtype", "codec", "calls", "raw", "sent", "ratio", "coding s", "saved s (estimated)"]
        rows = [
            [
                *(entry.operation, entry.dtype, entry.codec, str(entry.num_calls)),
                *_amounts(entry.raw_nbytes, entry.sent_nbytes, entry.ratio, entry.coding_seconds, entry.saved_seconds),
            ]
            for entry in self.entries
        ]
        calls = sum(entry.num_calls for entry in self.entries)
        total = _amounts(self.raw_nbytes, self.sent_nbytes, self.ratio, self.coding_seconds, self.saved_seconds)
        rows.append(["all", "", "", str(calls), *total])
        lines = [columns(header, rows, left=range(3))]
        lines += [f"left raw: {count} calls, {reason}" for reason, count in self.left_raw().items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; `from_dict` reads them."""
        return {"entries": [{**vars(entry), "reasons": dict(entry.reasons)} for entry in self.entries]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Read the result of `to_dict`."""
        return cls(tuple(Entry(**entry) for entry in data["entries"]))

    def to_json(self) -> str:
        """Format `to_dict` as JSON text."""
        return json.dumps(self.to_dict())


_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Tally:
    """Counter of calls that are equal in everything that is counted."""

    key: _Key
    reason: str
    nbytes: int
    calls: counter[int] = field(default_factory=counter)
    num_reads: int = 0
    num_taken: int = 0

    def take(self) -> int:
        """Calls since the last time; reading a counter's value counts as well and is subtracted."""
        found = next(self.calls) - self.num_reads
        self.num_reads += 1
        new, self.num_taken = found - self.num_taken, found
        return new


_MAX_TALLIES = 4096
"""Bound on memory for programs whose sizes never repeat."""

_lock = threading.Lock()
_sums: dict[_Key, Entry] = {}
_tallies: dict[tuple[_Key, str, int], _Tally] = {}


def record(
    operation: str,
    dtype: object,
    raw_nbytes: int,
    sent_nbytes: int,
    codec: str,
    reason: str,
    seconds: float,
    *,
    saved_seconds: float = 0.0,
) -> None:
    """Count one call; thread-safe.

    `dtype` is the tensor's, or its name; `codec` "raw", "window", "tiered", or a codec's name. raw_nbytes are those
    that this process would have sent without it, by the bandwidth-optimal algorithm. Calls are counted by `reason`,
    which has no numbers. `seconds` are of encoding and decoding, saved_seconds what the cost model predicted to save.
    """
    key = (operation, str(dtype).removeprefix("torch."), codec)
    with _lock:
        _entry(key).add(1, raw_nbytes, sent_nbytes, seconds, saved_seconds, {reason: 1})


def tally(operation: str, dtype: object, nbytes: int, reason: str) -> Iterator[int] | None:
    """A counter of calls that are left raw: each `next` of it, in any thread, counts one that sends `nbytes`.

    The same arguments give the same counter, or None where there are too many of them: `record` such calls.
    """
    key = (operation, str(dtype).removeprefix("torch."), RAW)
    with _lock:
        found = _tallies.get((key, reason, nbytes))
        if found is None:
            if len(_tallies) >= _MAX_TALLIES:
                return None
            found = _tallies[key, reason, nbytes] = _Tally(key, reason, nbytes)
        return found.calls


def snapshot() -> Snapshot:
    """Copy all counts since the program began or `reset` was called."""
    with _lock:
        _take_tallies()
        return Snapshot(_sorted(_copy(entry) for entry in _sums.values()))


def reset() -> None:
    """Set all counts to zero."""
    with _lock:
        _take_tallies()
        _sums.clear()


def _take_tallies() -> None:
    for one in _tallies.values():
        if num_calls := one.take():
            nbytes = num_calls * one.nbytes
            _entry(one.key).add(num_calls, nbytes, nbytes, 0.0, 0.0, {one.reason: num_calls})


def _entry(key: _Key) -> Entry:
    return _sums.setdefault(key, Entry(*key))


def _copy(entry: Entry) -> Entry:
    return replace(entry, reasons=dict(entry.reasons))


def _key(entry: Entry) -> _Key:
    return entry.operation, entry.dtype, entry.codec


def _sorted(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=_key))


def _plus(a: Entry, b: Entry, sign: int = 1) -> Entry:
    both, counts = _copy(a), {reason: sign * count for reason, count in b.reasons.items()}
    seconds = (sign * b.coding_seconds, sign * b.saved_seconds)
    both.add(sign * b.num_calls, sign * b.raw_nbytes, sign * b.sent_nbytes, *seconds, counts)
    both.reasons = {reason: count for reason, count in both.reasons.items() if count}
    return both


def _amounts(raw_nbytes: int, sent_nbytes: int, ratio: float, coding: float, saved: float) -> list[str]:
    return [format_nbytes(raw_nbytes), format_nbytes(sent_nbytes), f"{ratio:.3f}", f"{coding:.3f}", f"{saved:.3f}"]
