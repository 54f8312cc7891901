"""Which way a message takes: raw or coded, in how many chunks, around a ring or not.

Ranks have to choose alike without asking each other. So a choice depends on nothing but what all ranks of the group
share: operation, number of elements, dtype, the rates of links and codecs (which the ranks agreed on when the group was
first used), and estimates of how far the data shrinks and what raw and coded calls really take, which every rank
updates with the same numbers at the same call (chooser.py). Calls of a group therefore have to come in one order on all
ranks, as its collectives do anyway: an operation calls `choose` and `observe` in the thread in which it runs.

Rates come from the file that `laconic profile` wrote. Without one they are measured at the first message that is large
enough to be coded, in less than a tenth of a second, and once per process for groups of a kind on the same machines.

Sends concern two ranks of a group, which cannot wait for each other without risking a deadlock. They are chosen for in
groups that all their ranks have `prepare`d, and raw in others.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from laconic.collectives import audit
from laconic.collectives.policy.chooser import NOTE_NBYTES, CallKind, Chooser
from laconic.collectives.policy.microbench import Ranks, brief_codecs, brief_link, group_shape_of, host_name
from laconic.collectives.policy.raw_calls import forget_routes, raw_calls_of
from laconic.collectives.runtime.group_facts import original_of
from laconic.cost.comm.rates import ITEM_NBYTES, SEND, WireRates, default_path
from laconic.cost.comm.seconds import (
    MIN_CODED_NBYTES,
    NO_CODE,
    NOT_PREPARED,
    ONE_RANK,
    RAW,
    TOO_SMALL,
    AlgorithmChoice,
    GroupShape,
    left_raw,
    sent_nbytes,
)
from laconic.errors import ConfigError

_UNTAUGHT = "untaught"
"""Tag of estimates that are never updated."""

_CPU = torch.device("cpu")

# --- public functions ---


def choose(
    operation: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    *,
    tag: str = "",
    device: torch.device = _CPU,
) -> AlgorithmChoice:
    """Choose for one message; every rank of `group` must ask the same at the same place of its calls.

    The first of a group may communicate, and raise a ConfigError on every rank if some rank's file of rates is
    unusable. `numel` is that of one rank's input, which all ranks share. A "send" is for the receiver too; give each
    direction between two ranks a tag of its own: it keeps apart the estimates of data of different kinds, as of weights
    and gradients.
    """
    reason = _obvious(numel, dtype, group)
    if reason is not None:
        return left_raw(reason)
    chooser = _chooser_of(operation, group, device)
    call = CallKind(operation, numel, _name(dtype), tag)
    return left_raw(NOT_PREPARED) if chooser is None else chooser.choose(call)


def predict(
    operation: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, *, device: torch.device = _CPU
) -> AlgorithmChoice:
    """Choose by the rates of a prepared group alone; never communicates.

    The choice is the same on all its ranks, in whatever order and thread they ask, because nothing is learnt from
    earlier messages. Arguments as in `choose`.
    """
    reason = _obvious(numel, dtype, group)
    if reason is not None:
        return left_raw(reason)
    chooser = _chooser_of(SEND, group, device)
    call = CallKind(operation, numel, _name(dtype), _UNTAUGHT)
    return left_raw(NOT_PREPARED) if chooser is None else chooser.choose(call)


def needs_sync(
    operation: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, *, device: torch.device = _CPU
) -> bool:
    """Whether `choose` with these arguments would communicate now, as at first use."""
    if operation == SEND or _obvious(numel, dtype, group) is not None:
        return False
    chooser = _made(group, device)
    return chooser is None or chooser.must_measure(_name(dtype))


def leaves_raw(
    given: Any,
    call: tuple[str, *tuple[Hashable, ...]],
    numel: int,
    x: torch.Tensor,
    beside: torch.Tensor | None,
    groups: Sequence[dist.ProcessGroup],
    async_op: bool,
    root: int = 0,
    is_end: bool = False,
) -> bool:
    """Whether a message is left raw, as far as that is known without communication.

    If so, the call is counted in the audit, and `known_route` knows others like it. The answer is the same on all
    ranks, in whatever thread they ask: it depends on earlier messages only where the call runs in the caller's thread,
    in the order of the group's calls.

    Args:
        given, call, x, beside: as of `known_route`; the call's name has the operation first, x is contiguous.
        numel: as in `choose`; follows from x's number of elements and dtype.
        groups: carry the call; False for the two of a TwoLevel, which decides for each.
        async_op: whether it would run in the background if it was coded.
        root: group rank of the root or peer; `is_end` whether this rank gathers or scatters, or receives a send.
    """
    (group, *others), operation = groups, call[0]
    if others or numel == 0 or group.size() == 1:
        return False
    reason, refusal = _obvious(numel, x.dtype, group) or _known_reason(operation, numel, x, group), None
    if reason is None and operation != SEND and not async_op:
        chooser = _made(group, x.device)
        refusal = None if chooser is None else chooser.refusal(CallKind(operation, numel, _name(x.dtype)))
    sent = sent_by_one(operation, numel * x.dtype.itemsize, group.size(), is_end)
    asked: Any = dist.group.WORLD if given is None else given
    # What a group with CUDA tensors has put off is started before it is used otherwise.
    if (reason or refusal) and reason != NOT_PREPARED and (asked is group or not asked._has_cuda):
        why = reason if refusal is None else refusal.reason
        raw_calls_of(asked, group).add(
            call, x, operation, sent, str(why), root, None if beside is None else beside.numel(), refusal
        )
    if reason is None:
        return False  # what a refusal says counts from the next call on
    audit.record(operation, x.dtype, sent, sent, RAW, reason, 0.0)
    return True


def sent_by_one(operation: str, nbytes: int, world: int, is_end: bool) -> int:
    """Bytes that a rank sends, as `sent_nbytes` counts them; with gather and scatter it matters which end it is."""
    if operation == "gather":
        return 0 if is_end else nbytes
    if (operation == "scatter" and not is_end) or (operation == SEND and is_end):
        return 0
    return round(sent_nbytes(operation, nbytes, world))


def _known_reason(operation: str, numel: int, x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    device = x.device.type
    if operation == SEND and _chooser_of(SEND, group, x.device) is None:
        return NOT_PREPARED
    if (device, False) not in _known.get(group, {}) and device not in _prepared.get(original_of(group), {}):
        return None
    chooser = _chooser_of(operation, group, x.device)
    return None if chooser is None else chooser.why_always_raw(operation, numel, _name(x.dtype))


def prepare(group: dist.ProcessGroup, device: torch.device = _CPU) -> None:
    """Agree on rates with all ranks of `group`, which all call it before its first message; for sends too.

    Rates of another group of the same kind on the same machines are not measured again. ConfigError on every rank if
    some rank's file of rates cannot be used.
    """
    if group.size() == 1:
        return
    ranks = Ranks(group, device)
    group_shape, rates = _agreed_rates(ranks)
    _prepared.setdefault(group, {})[device.type] = group_shape, _with_codecs(ranks, rates, _SENT)
    forget_routes()


def prepared_rates(group: dist.ProcessGroup) -> tuple[GroupShape, WireRates] | None:
    """Ranks, nodes and rates of the CPU that `prepare` agreed on, the same on all ranks; None if it was not called."""
    return _prepared.get(original_of(group), {}).get(_CPU.type)


def observe(
    operation: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    choice: AlgorithmChoice,
    raw_nbytes: int,
    message_nbytes: int,
    seconds: float,
    *,
    tag: str = "",
    device: torch.device = _CPU,
) -> None:
    """Record the outcome of the message that was chosen for last.

    On this rank `raw_nbytes` of it took `message_nbytes` and the call `seconds`. The first arguments are those of
    `choose`. The other ranks learn of it by `note`. Ranks that sent nothing record that: what all have sent is learnt
    for the call that each remembers.
    """
    chooser = _made(group, device)
    if chooser is not None:
        call = CallKind(operation, numel, _name(dtype), tag)
        chooser.observe(call, choice, raw_nbytes, message_nbytes, round(seconds * 1e9))


def note(group: dist.ProcessGroup, device: torch.device = _CPU) -> bytes:
    """What this rank adds to the announcement of its next call, `NOTE_NBYTES` long."""
    chooser = _made(group, device)
    return bytes(NOTE_NBYTES) if chooser is None else chooser.note()


def merge_notes(group: dist.ProcessGroup, notes: Sequence[bytes], device: torch.device = _CPU) -> None:
    """Take the notes of all ranks, in their order; every rank must do so at the same call."""
    chooser = _made(group, device)
    if chooser is not None and any(map(any, notes)):
        chooser.merge_notes(notes)


def use_rates(rates: WireRates | str | Path | None) -> None:
    """Take these rates, or the file's, for groups that are used from now on, on whatever machines; None: as always.

    Where ranks have different ones, the first rank of the group decides.
    """
    global _explicit
    with _lock:
        _explicit = WireRates.load(rates) if isinstance(rates, str | Path) else rates
        _known.clear()
        forget_routes()


# --- the choosers of a process group ---

_SENT = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are worth preparing for: activations and their gradients."""

_lock = threading.Lock()
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], Chooser]] = WeakKeyDictionary()
"""By type of device, and whether it is for sends."""
_prepared: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[GroupShape, WireRates]]] = WeakKeyDictionary()
_explicit: WireRates | None = None
_SOURCE = "measured at first use"
_measured: dict[str, dict[str, WireRates]] = {}
"""By type of device and kind of group: what this process has measured, with the machines it was measured on."""


def _made(group: dist.ProcessGroup, device: torch.device) -> Chooser | None:
    return _known.get(group, {}).get((device.type, False))


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
        group_shape, rates = _agreed_rates(ranks) if prepared is None else prepared
        # Two ranks that send to each other share no order of calls with the rest of the group, and on CUDA the host
        # would wait for what others announce.
        choosers[key] = Chooser(
            group_shape,
            rates,
            None if sends else lambda known, dtype: _with_codecs(ranks, known, [getattr(torch, dtype)]),
            learns=not sends and device.type != "cuda",
            repeats=rates.source != _SOURCE,
        )
    return choosers[key]


def _with_codecs(ranks: Ranks, rates: WireRates, dtypes: Sequence[torch.dtype]) -> WireRates:
    """Rates with the codecs of these dtypes, measured where they are missing."""
    missing = [dtype for dtype in dtypes if _name(dtype) not in rates.codecs]
    if not missing:
        return rates
    measured = {_name(dtype): codes for dtype, codes in brief_codecs(ranks, missing).items()}
    found = replace(rates, codecs={**rates.codecs, **measured})
    if rates.source == _SOURCE:
        _remember(found)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _obvious(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> str | None:
    """Why a message is left raw without asking anybody, None if that is not clear."""
    if group.size() == 1:
        return ONE_RANK
    if _name(dtype) not in ITEM_NBYTES:
        return NO_CODE
    return TOO_SMALL if numel * dtype.itemsize < MIN_CODED_NBYTES else None


def _agreed_rates(ranks: Ranks) -> tuple[GroupShape, WireRates]:
    """Find the group's machines and rates, by all ranks together.

    Rank 0's file where it has one, else rates measured for another group of this kind on these machines, or else rates
    that all ranks measure now.
    """
    found = [json.loads(text) for text in ranks.texts(json.dumps(_introduction(ranks)))]
    for rank, one in enumerate(found):
        if one["error"]:
            raise ConfigError(f"rank {rank} of the group cannot read its rates: {one['error']}")
    hosts = [one["host"] for one in found]
    group_shape = group_shape_of(hosts)
    first = found[0]["rates"]
    if first is not None:
        rates = WireRates.from_dict(first)
        if not found[0]["checked"] or set(hosts) <= set(rates.hosts):  # else they are another cluster's
            return group_shape, rates
    if group_shape.kind in found[0]["measured"]:
        rates = WireRates.from_dict(found[0]["measured"][group_shape.kind])
        if set(hosts) <= set(rates.hosts):
            return group_shape, rates
    codecs = {
        dtype: codes
        for one in found[0]["measured"].values()
        for dtype, codes in WireRates.from_dict(one).codecs.items()
    }
    rates = WireRates(
        {group_shape.kind: brief_link(ranks)},
        codecs,
        ranks.device.type,
        hosts=tuple(dict.fromkeys(hosts)),
        source=_SOURCE,
    )
    _remember(rates)
    return group_shape, rates


def _remember(rates: WireRates) -> None:
    with _lock:
        _measured.setdefault(rates.device, {})[next(iter(rates.links))] = rates


def _introduction(ranks: Ranks) -> dict[str, object]:
    """Facts that a rank sends to the others when a group is first used."""
    about: dict[str, object] = {"host": host_name(), "rates": None, "checked": False, "measured": {}, "error": ""}
    if ranks.group.rank() != 0:
        return about
    try:
        rates, checked = _own_rates()
    except ConfigError as error:
        return about | {"error": str(error)}
    if rates is not None and rates.device == ranks.device.type:
        about |= {"rates": rates.to_dict(), "checked": checked}
    with _lock:
        measured = dict(_measured.get(ranks.device.type, {}))
    return about | {"measured": {kind: one.to_dict() for kind, one in measured.items()}}


def _own_rates() -> tuple[WireRates | None, bool]:
    """This process's rates, and whether they count only on the machines they were measured on.

    Rates set by `use_rates` count anywhere.
    """
    if _explicit is not None:
        return _explicit, False
    path = default_path()
    asked_for = bool(os.environ.get("LACONIC_WIRE_RATES"))
    if not asked_for and not path.exists():
        return None, False
    return WireRates.load(path), not asked_for
