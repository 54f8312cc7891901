"""Which way a message takes: raw or coded, in how many chunks, on how many levels.

Ranks have to choose alike without asking each other. So a choice depends on nothing but what all ranks of the group
share: operation, number of elements, dtype, the rates of links and codecs (which the ranks agreed on when the group was
first used), and an estimate of how far the data shrinks, which every rank updates with the same numbers at the same
call. Calls of a group therefore have to come in one order on all ranks, as its collectives do anyway: an operation
calls `choose` and `observe` in the thread in which it runs.

Rates come from the file that `laconic profile` wrote. Without one they are measured at the first message that is large
enough to be coded, once per group and in well under a second.

Sends concern two ranks of a group, which cannot wait for each other without risking a deadlock. They are chosen for in
groups that all their ranks have `prepare`d, and raw in others.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from laconic.collectives.lane import original_of
from laconic.collectives.measure import Exchange, Ranks, brief_codec, brief_link, host_name, world_of
from laconic.cost.wire.rates import ITEM_NBYTES, SEND, CodecRates, WireRates, default_path
from laconic.cost.wire.seconds import (
    LOW_RATIO,
    MIN_CODED_NBYTES,
    NO_CODE,
    NOT_PREPARED,
    ONE_RANK,
    PROBE,
    RAW,
    TOO_SMALL,
    Choice,
    World,
    decide,
    left_raw,
)
from laconic.errors import ConfigError

__all__ = ["Chooser", "choose", "foresee", "observe", "prepare", "use_rates", "would_talk"]

_WEIGHT = 0.25
"""Of a new observation in the running estimate."""

_FIRST_PROBE, _LAST_PROBE = 64, 4096
"""Calls left raw because of the ratio, after which one is coded to see whether that still holds; doubled each time."""

_MAX_SILENCE = 32
"""Coded calls after which ranks tell each other what they observed, at the latest."""

_FINENESS = 64
"""Estimates are rounded to this fraction when a choice is made, so that choices can be kept."""


_UNTAUGHT = "untaught"
"""Tag of estimates that nobody updates."""

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
            "send" (for the receiver too; give each direction between two ranks a tag of its own).
        numel: elements of one rank's input; a number that all ranks share.
        dtype: of the tensor.
        group: the group, or the copy of it in which the operation runs. Its first call may communicate.
        tag: keeps apart the running estimates of data of different kinds, for instance weights and gradients.
        levels: numbers of levels that the caller can carry out.
        device: where the tensor is.

    Raises ConfigError, on every rank, if some rank's file of rates cannot be used.
    """
    reason = _obvious(numel, dtype, group)
    if reason is not None:
        return left_raw(reason)
    chooser = _chooser_of(operation, group, device)
    return left_raw(NOT_PREPARED) if chooser is None else chooser.choose(operation, numel, _name(dtype), tag, levels)


def foresee(
    operation: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, *, device: torch.device = _CPU
) -> Choice:
    """The choice by the rates of a prepared group alone: the same on all its ranks, in whatever order and thread they
    ask, because nothing is learnt from earlier messages. Never communicates; arguments as in `choose`."""
    reason = _obvious(numel, dtype, group)
    if reason is not None:
        return left_raw(reason)
    chooser = _chooser_of(SEND, group, device)
    return (
        left_raw(NOT_PREPARED) if chooser is None else chooser.choose(operation, numel, _name(dtype), _UNTAUGHT, (1,))
    )


def would_talk(
    operation: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    *,
    tag: str = "",
    device: torch.device = _CPU,
) -> bool:
    """Whether `choose` with these arguments would communicate now: at first use, and when observations are due."""
    if operation == SEND or _obvious(numel, dtype, group) is not None:
        return False
    chooser = _known.get(group, {}).get((device.type, False))
    return chooser is None or chooser.would_talk(operation, _name(dtype), tag)


def prepare(group: dist.ProcessGroup, device: torch.device = _CPU, *, like: dist.ProcessGroup | None = None) -> None:
    """Agree on rates with all ranks of `group` now, instead of at its first large message, and for sends too.

    Every rank of the group must call it, before the group's first message. What a prepared group `like`, of which all
    of them are members, knows of codecs is not measured again.

    Raises ConfigError, on every rank, if some rank's file of rates cannot be used.
    """
    if group.size() == 1:
        return
    ranks = Ranks(group, device)
    world, rates = _agreed_rates(ranks)
    known = None if like is None else _prepared.get(like, {}).get(device.type)
    if known is not None:
        rates = replace(rates, codecs={**known[1].codecs, **rates.codecs})
    measured = {_name(dtype): brief_codec(ranks, dtype) for dtype in _SENT if _name(dtype) not in rates.codecs}
    _prepared.setdefault(group, {})[device.type] = world, replace(rates, codecs={**rates.codecs, **measured})


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
    if choice.codec != RAW and raw_nbytes:
        chooser = _chooser_of(operation, group, device)
        assert chooser is not None, "it made the choice"
        chooser.observe(operation, _name(dtype), choice.codec, raw_nbytes, message_nbytes, shared, tag)


def use_rates(rates: WireRates | str | Path | None) -> None:
    """Take these rates, or the file's, for groups that are used from now on, on whatever machines; None: as always.

    Where ranks have different ones, the first rank of the group decides.
    """
    global _explicit
    with _lock:
        _explicit = WireRates.load(rates) if isinstance(rates, str | Path) else rates
        _known.clear()


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

    def would_talk(self, operation: str, dtype: str, tag: str) -> bool:
        """See `would_talk`; `dtype` by name."""
        if dtype not in self.rates.codecs and self._codecs_of is not None:
            return True
        estimate = self._estimates.get((operation, dtype, tag))
        return self._exchange is not None and estimate is not None and estimate.is_due

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


# --- the choosers of a process group ---

_SENT = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are worth preparing for: activations and their gradients."""

_lock = threading.Lock()
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], Chooser]] = WeakKeyDictionary()
"""By type of device, and whether it is for sends."""
_prepared: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[World, WireRates]]] = WeakKeyDictionary()
_explicit: WireRates | None = None


def _chooser_of(operation: str, group: dist.ProcessGroup, device: torch.device) -> Chooser | None:
    """The group's chooser for an operation, made at first use; None for sends in a group that was not prepared."""
    sends = operation == SEND
    with _lock:
        choosers = _known.setdefault(group, {})
    key = device.type, sends
    if key not in choosers:
        prepared = _prepared.get(original_of(group), {}).get(device.type)
        if prepared is None and sends:
            return None
        ranks = Ranks(group, device)
        world, rates = _agreed_rates(ranks) if prepared is None else prepared
        # Two ranks that send to each other share no order of calls with the rest of the group.
        exchange = None if sends or device.type == "cuda" else ranks.exchange
        choosers[key] = Chooser(world, rates, exchange, None if sends else partial(_measured_codecs, ranks))
    return choosers[key]


def _measured_codecs(ranks: Ranks, dtype: str) -> Mapping[str, CodecRates]:
    return brief_codec(ranks, getattr(torch, dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _obvious(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> str | None:
    """Why a message is left raw without asking anybody, None if that is not clear."""
    if group.size() == 1:
        return ONE_RANK
    if _name(dtype) not in ITEM_NBYTES:
        return NO_CODE
    return TOO_SMALL if numel * dtype.itemsize < MIN_CODED_NBYTES else None


def _agreed_rates(ranks: Ranks) -> tuple[World, WireRates]:
    """The group's machines and rates, found by all ranks together: rank 0's file where it has one, else measured."""
    found = [json.loads(text) for text in ranks.texts(json.dumps(_introduction(ranks)))]
    for rank, one in enumerate(found):
        if one["error"]:
            raise ConfigError(f"rank {rank} of the group cannot read its rates: {one['error']}")
    hosts = [one["host"] for one in found]
    world = world_of(hosts)
    first = found[0]["rates"]
    rates = None if first is None else WireRates.from_dict(first)
    if rates is None or (found[0]["checked"] and not set(hosts) <= set(rates.hosts)):  # none, or of another cluster
        rates = WireRates({world.kind: brief_link(ranks)}, {}, ranks.device.type, source="measured at first use")
    return world, rates


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
