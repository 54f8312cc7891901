"""Ranks that are about to reduce find out whether they mean the same thing.

Collectives of different sizes hang, abort or mix up bytes. So before the first byte of a reduction each rank tells the
others in a few bytes what it is about to do, and all of them refuse together, at once, when two differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from laconic.collectives.runtime.torch_compat import all_gather
from laconic.errors import ConfigError

__all__ = ["Settings", "disagreement", "first_difference", "start_agreement"]

_NUM_BYTES = 192

Settings = dict[str, str | int]
"""What must be the same on all ranks, by name; the function's name first."""

_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def first_difference(settings: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """The first setting in which some rank differs from the first one, and that rank's place; None if all agree."""
    first = settings[0]
    for place, other in enumerate(settings):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                return name, place
    return None


def start_agreement(settings: Settings, group: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """Tell the ranks of `group` what this one is about to do; the returned function waits for what they say.

    On the CPU every call is compared: one all-gather of 192 bytes, under way while the caller quantizes. On CUDA, where
    reading the answer would stop the program until the GPU is idle, the first call with these settings is.

    The returned function raises ConfigError, on every rank alike, naming the first setting that differs.
    """
    text = json.dumps(settings)
    seen = _agreed.setdefault(group, set())
    if device.type == "cuda" and text in seen:
        return lambda: None
    line = json.dumps([dist.get_rank(), settings]).encode().ljust(_NUM_BYTES)
    assert len(line) == _NUM_BYTES
    mine = torch.frombuffer(bytearray(line), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size(), _NUM_BYTES, dtype=torch.uint8, device=device)
    work = all_gather(gathered, mine, group)

    def compare() -> None:
        work.wait()
        lines = [json.loads(row.numpy().tobytes()) for row in gathered.cpu()]
        if first_difference([settings for _, settings in lines]) is not None:
            raise disagreement(dict(lines))
        seen.add(text)

    return compare


def disagreement(settings: Mapping[int, Mapping[str, Any]]) -> ConfigError:
    """The error of a call for which the ranks, in the group's order, have settings that are not all the same."""
    ranks = list(settings)
    found = first_difference(list(settings.values()))
    assert found is not None
    name, place = found
    first, other = settings[ranks[0]], settings[ranks[place]]
    return ConfigError(
        f"{name} is {first.get(name)!r} on rank {ranks[0]} and {other.get(name)!r} on rank {ranks[place]} in"
        f" {first['function']}, but all ranks of a group must make the same calls in the same order with"
        " the same settings; no result was written"
    )
