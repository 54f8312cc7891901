"""Settings handshake of a collective: every two ranks compare what they are about to do; short messages ride along.

Collectives of different sizes hang, abort or mix up bytes. So before values are used each rank announces its settings
to the others, and all of them refuse together when two differ.

On the CPU an announcement has 256 bytes of settings, and behind them the first message if that is short. It is received
into a buffer of fixed size, whatever the sender means by it, so that announcements arrive even where two ranks mean
different calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime.torch_compat import all_gather
from laconic.errors import ConfigError

__all__ = [
    "MAX_INSIDE_NBYTES",
    "Handshake",
    "Peers",
    "Settings",
    "compare_once",
    "difference",
    "disagreement",
    "first_difference",
    "line_of",
]

MAX_INSIDE_NBYTES = 1 << 14
"""Of a message that travels inside of an announcement."""

_LINE_NBYTES = 256

_TAG = 1 << 25
"""And the two after it. torch_compat.py and programs stay below."""

Settings = dict[str, str | int]
"""What must be the same on all ranks, by name; the function's name first."""


@dataclass(frozen=True)
class Peers:
    """The ranks that this one shakes hands with."""

    ranks: tuple[int, ...]
    """Global ranks of the whole group, for errors."""
    group_ranks: tuple[int, ...]
    """Group ranks of the others that take part."""
    sends: bool | None = None
    """Whether this rank sends to or receives from its only peer; None in a collective of the whole group."""


def line_of(settings: Settings) -> bytes:
    """The settings as they travel."""
    line = json.dumps(settings, separators=(",", ":")).encode().ljust(_LINE_NBYTES)
    assert len(line) == _LINE_NBYTES, settings
    return line


class Handshake:
    """Announcements of one call, to and from each peer, through gloo.

    Args:
        group: the group of the call.
        peers: the ranks to compare with.
        line: the settings, as `line_of` formats them.
        note: follows the settings, as long on all ranks whose settings are the same, and need not be equal.
        send: starts sending a tensor to a group rank with a tag.
        attribute: names a group rank in errors raised inside of it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        line: bytes,
        note: bytes,
        send: Callable[[int, Tensor, int], dist.Work],
        attribute: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._front, self._send, self._attribute = line + note, send, attribute
        # A sender's announcements stay apart from a receiver's, because two ranks may send to each other at once.
        self._tag_out, tag_in = {None: (0, 0), True: (1, 2), False: (2, 1)}[peers.sends]
        self._unannounced = list(peers.group_ranks)
        self._sent: list[tuple[int, dist.Work]] = []
        self._received: dict[int, tuple[Tensor, dist.Work]] = {}
        for peer in peers.group_ranks:
            buffer = torch.empty(len(self._front) + MAX_INSIDE_NBYTES, dtype=torch.uint8)
            with attribute(peer):
                work = group.recv([buffer], peer, _TAG + tag_in)
            assert work is not None
            self._received[peer] = buffer, work

    def announce(self, peer: int, message: Tensor | None = None) -> None:
        """Send the settings to a peer, with a message inside."""
        self._unannounced.remove(peer)
        front = torch.frombuffer(bytearray(self._front), dtype=torch.uint8)
        buffer = front if message is None else torch.cat((front, message))
        self._sent.append((peer, self._send(peer, buffer, _TAG + self._tag_out)))

    def announce_to_all_but(self, group_ranks: set[int]) -> None:
        """Send the settings to all other peers that do not have them yet."""
        for peer in [peer for peer in self._unannounced if peer not in group_ranks]:
            self.announce(peer)

    def read(self) -> dict[int, bytes]:
        """Wait for the settings of the others, by group rank."""
        self.announce_to_all_but(set())
        for peer, work in [*((peer, work) for peer, (_, work) in self._received.items()), *self._sent]:
            with self._attribute(peer):
                work.wait()
        return {peer: buffer[:_LINE_NBYTES].numpy().tobytes() for peer, (buffer, _) in self._received.items()}

    def notes(self) -> dict[int, bytes]:
        """The others' notes, by group rank; call `read` before."""
        inside = slice(_LINE_NBYTES, len(self._front))
        return {peer: buffer[inside].numpy().tobytes() for peer, (buffer, _) in self._received.items()}

    def inside(self, peer: int, nbytes: int) -> Tensor:
        """The first `nbytes` of what came behind the settings of a peer; call `read` before."""
        return self._received[peer][0][len(self._front) : len(self._front) + nbytes]


_compared: WeakKeyDictionary[dist.ProcessGroup, set[bytes]] = WeakKeyDictionary()


def compare_once(line: bytes, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """The handshake on a GPU: the first call with these settings is compared, in one all-gather.

    Reading what others announce makes the host wait for the GPU, which must not happen at every call.
    """
    compared = _compared.setdefault(group, set())
    if line in compared:
        return
    gathered = torch.empty(len(ranks), len(line), dtype=torch.uint8, device=device)
    all_gather(gathered, torch.frombuffer(bytearray(line), dtype=torch.uint8).to(device), group).wait()
    lines = [row.numpy().tobytes() for row in gathered.cpu()]
    if any(other != line for other in lines):
        raise disagreement(dict(zip(ranks, map(json.loads, lines), strict=True)))
    compared.add(line)


def first_difference(settings: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """The first setting in which some rank differs from the first one, and that rank's index; None if all agree."""
    first = settings[0]
    for index, other in enumerate(settings):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                return name, index
    return None


def difference(settings: Mapping[int, Mapping[str, Any]]) -> str | None:
    """What differs first between the settings of ranks, in the group's order, and in whose; None if all agree."""
    found = first_difference(list(settings.values()))
    if found is None:
        return None
    (name, index), ranks = found, list(settings)
    first, other = settings[ranks[0]].get(name), settings[ranks[index]].get(name)
    return f"{name} is {first!r} on rank {ranks[0]} and {other!r} on rank {ranks[index]}"


def disagreement(settings: Mapping[int, Mapping[str, Any]]) -> ConfigError:
    """The error of a call for which the ranks have settings that are not all the same."""
    function = next(iter(settings.values()))["function"]
    return ConfigError(
        f"{difference(settings)} in {function}, but all ranks of a group must make the same calls in the same order"
        " with the same settings; no result was written"
    )
