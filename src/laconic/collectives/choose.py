"""Which way a message takes: raw or coded, in how many chunks, on how many levels.

Ranks have to choose alike without asking each other. So a choice depends on nothing but what all ranks of the group
share: operation, number of elements, dtype, the rates of links and codecs (which the ranks agreed on when the group was
first used), and an estimate of how far the data shrinks, which every rank updates with the same numbers at the same
call. Calls of a group therefore have to come in one order on all ranks, as its collectives do anyway: an operation
calls `choose` and `observe` in the thread in which it runs.

Rates come from the file that `laconic profile` wrote. Without one they are measured at the first message that is large
enough to be coded, in less than half a second per group.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from laconic.collectives.measure import Exchange, Ranks, brief_codec, brief_link, host_name, world_of
from laconic.cost.wire import (
    LOW_RATIO,
    MIN_CODED_NBYTES,
    NO_CODE,
    ONE_RANK,
    PROBE,
    RAW,
    TOO_SMALL,
    Choice,
    World,
    decide,
    left_raw,
)
from laconic.cost.wire_rates import ITEM_NBYTES, CodecRates, WireRates, default_path
from laconic.errors import ConfigError

__all__ = ["Chooser", "choose", "observe", "use_rates"]

_WEIGHT = 0.25
"""Of a new observation in the running estimate."""

_FIRST_PROBE, _LAST_PROBE = 64, 4096
"""Calls left raw because of the ratio, after which one is coded to see whether that still holds; doubled each time."""

_MAX_SILENCE = 32
"""Coded calls after which ranks tell each other what they observed, at the latest."""

_FINENESS = 64
"""Estimates are rounded to this fraction when a choice is made, so that choices can be kept."""


_CPU = torch.device("cpu")

# --- public functions ---


def choose(
    operation: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    *,
    tag: str = "",
    levels: tuple[int, ...] = (1,),
    device: torch.device = _CPU,
) -> Choice:
    """Choose for one message; every rank of `group` must ask the same at the same place of its calls.

    Arguments:
        operation: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter" or
            "send" (for the receiver too).
        numel: elements of one rank's input; a number that all ranks share.
        dtype: of the tensor.
        group: the group, or the copy of it in which the operation runs. Its first call may communicate.
        tag: keeps apart the running estimates of data of different kinds, for instance weights and gradients.
        levels: numbers of levels that the caller can carry out.
        device: where the tensor is.

    Raises ConfigError, on every rank, if some rank's file of rates cannot be used.
    """
    name = str(dtype).removeprefix("torch.")
    if group.size() == 1:
        return left_raw(ONE_RANK)
    if name not in ITEM_NBYTES:
        return left_raw(NO_CODE)
    if numel * dtype.itemsize < MIN_CODED_NBYTES:
        return left_raw(TOO_SMALL)
    return _chooser_of(group, device).choose(operation, numel, name, tag, levels)


def observe(
    operation: str,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    choice: Choice,
    raw_nbytes: int,
    message_nbytes: int,
    *,
    shared: bool = False,
    tag: str = "",
    device: torch.device = _CPU,
) -> None:
    """Tell what became of a message that was coded: `raw_nbytes` of it took `message_nbytes`.

    shared: every rank passes the same two numbers, as after an all-gather of all sizes. Otherwise each rank passes what
    it knows, and ranks add these up now and then, inside of `choose`.
    """
    if choice.codec != RAW and group.size() > 1 and raw_nbytes:
        name = str(dtype).removeprefix("torch.")
        _chooser_of(group, device).observe(operation, name, choice.codec, raw_nbytes, message_nbytes, shared, tag)


def use_rates(rates: WireRates | str | Path | None) -> None:
    """Take these rates, or the file's, for groups that are used from now on, on whatever machines; None: as always.

    Where ranks have different ones, the first rank of the group decides.
    """
    global _explicit
    with _lock:
        _explicit = WireRates.load(rates) if isinstance(rates, str | Path) else rates
        _choosers.clear()


# --- one group ---


class Chooser:
    """What the ranks of one group know together.

    `exchange` is None where asking costs more than it tells: on CUDA it would wait for the GPU.
    `codecs_of` measures the codecs of a dtype that `rates` do not have.
    """

    def __init__(
        self,
        world: World,
        rates: WireRates,
        exchange: Exchange | None,
        codecs_of: Callable[[str], Mapping[str, CodecRates]] | None = None,
    ) -> None:
        self.world = world
        self.rates = rates
        self._exchange = exchange
        self._codecs_of = codecs_of
        self._estimates: dict[tuple[str, str, str], _Estimate] = {}
        self._kept: dict[tuple[str, int, str, tuple[int, ...], int], Choice] = {}

    def choose(self, operation: str, numel: int, dtype: str, tag: str, levels: tuple[int, ...]) -> Choice:
        """See `choose`; `dtype` by name."""
        if dtype not in self.rates.codecs and self._codecs_of is not None:
            self.rates = replace(self.rates, codecs={**self.rates.codecs, dtype: self._codecs_of(dtype)})
        estimate = self._estimates.setdefault((operation, dtype, tag), _Estimate())
        if self._exchange is not None and estimate.is_due:
            estimate.agree(self._exchange(estimate.pending))
        choice = self._decide(operation, numel, dtype, levels, estimate.steps)
        if choice.reason == LOW_RATIO and estimate.wants_probe():
            coded = self._decide(operation, numel, dtype, levels, None)
            choice = replace(coded, predicted_seconds=coded.raw_seconds, reason=PROBE)
        if choice.codec != RAW:
            estimate.num_coded += 1
        return choice

    def observe(
        self, operation: str, dtype: str, code: str, raw_nbytes: int, message_nbytes: int, shared: bool, tag: str
    ) -> None:
        """See `observe`; `dtype` and `code` by name."""
        estimate = self._estimates.setdefault((operation, dtype, tag), _Estimate())
        expected_nbytes = round(raw_nbytes / self.rates.codecs[dtype][code].ratio)
        if shared:
            estimate.update(message_nbytes, expected_nbytes)
            estimate.num_coded = 0
        else:
            estimate.pending = (estimate.pending[0] + message_nbytes, estimate.pending[1] + expected_nbytes)

    def _decide(self, operation: str, numel: int, dtype: str, levels: tuple[int, ...], steps: int | None) -> Choice:
        """`steps`: bytes observed over bytes expected, in 1 / _FINENESS; None if nothing was observed."""
        key = (operation, numel, dtype, levels, -1 if steps is None else steps)
        if key not in self._kept:
            if len(self._kept) >= 4096:
                self._kept.clear()
            codes = self.rates.codecs.get(dtype, {})
            ratio = None if steps is None else {code: c.ratio * _FINENESS / steps for code, c in codes.items()}
            self._kept[key] = decide(operation, numel, dtype, self.world, self.rates, ratio, levels)
        return self._kept[key]


@dataclass
class _Estimate:
    """How far one kind of data shrinks, as bytes observed over bytes expected of Gaussian data."""

    factor: float | None = None
    pending: tuple[int, int] = (0, 0)
    """What this rank alone has observed since ranks last told each other."""
    num_coded: int = 0
    """Coded calls since then; like all that follows the same on all ranks."""
    silence: int = 1
    """Coded calls until they do so again: soon at first, so that unsuitable data is noticed at once."""
    num_refused: int = 0
    probe_after: int = _FIRST_PROBE
    probing: bool = False

    @property
    def steps(self) -> int | None:
        return None if self.factor is None else max(1, round(self.factor * _FINENESS))

    @property
    def is_due(self) -> bool:
        return self.num_coded >= self.silence

    def agree(self, gathered: Sequence[Sequence[int]]) -> None:
        """Take what all ranks observed."""
        self.update(sum(row[0] for row in gathered), sum(row[1] for row in gathered))
        self.pending, self.num_coded, self.silence = (0, 0), 0, min(2 * self.silence, _MAX_SILENCE)

    def update(self, message_nbytes: int, expected_nbytes: int) -> None:
        """Take numbers that are the same on all ranks."""
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
        self.silence, self.probing = 1, True
        return True


# --- the chooser of a process group ---

_lock = threading.Lock()
_choosers: WeakKeyDictionary[dist.ProcessGroup, dict[str, Chooser]] = WeakKeyDictionary()
_explicit: WireRates | None = None


def _chooser_of(group: dist.ProcessGroup, device: torch.device) -> Chooser:
    with _lock:
        by_device = _choosers.setdefault(group, {})
    if device.type not in by_device:
        by_device[device.type] = _agreed(Ranks(group, device))
    return by_device[device.type]


def _agreed(ranks: Ranks) -> Chooser:
    """The chooser of a group, made by all ranks together: rank 0's rates where it has some, else measured ones."""
    found = [json.loads(text) for text in ranks.texts(json.dumps(_introduction(ranks)))]
    for rank, one in enumerate(found):
        if one["error"]:
            raise ConfigError(f"rank {rank} of the group cannot read its rates: {one['error']}")
    hosts = [one["host"] for one in found]
    first = found[0]["rates"]
    rates = None if first is None else WireRates.from_dict(first)
    if rates is not None and found[0]["checked"] and not set(hosts) <= set(rates.hosts):
        rates = None  # of another cluster
    world = world_of(hosts)
    if rates is None:
        rates = WireRates({world.kind: brief_link(ranks)}, {}, ranks.device.type, source="measured at first use")

    def codecs_of(dtype: str) -> Mapping[str, CodecRates]:
        return brief_codec(ranks, getattr(torch, dtype))

    return Chooser(world, rates, None if ranks.device.type == "cuda" else ranks.exchange, codecs_of)


def _introduction(ranks: Ranks) -> dict[str, object]:
    """What a rank tells the others when a group is first used."""
    about: dict[str, object] = {"host": host_name(), "rates": None, "checked": False, "error": ""}
    if ranks.group.rank() != 0:
        return about
    try:
        rates, checked = _own_rates()
    except ConfigError as error:
        return about | {"error": str(error)}
    if rates is not None and rates.device == ranks.device.type:
        about |= {"rates": rates.to_dict(), "checked": checked}
    return about


def _own_rates() -> tuple[WireRates | None, bool]:
    """This process's rates, and whether they count only on the machines they were measured on: those that were asked
    for count anywhere."""
    if _explicit is not None:
        return _explicit, False
    path = default_path()
    asked_for = bool(os.environ.get("LACONIC_WIRE_RATES"))
    if not asked_for and not path.exists():
        return None, False
    return WireRates.load(path), not asked_for
