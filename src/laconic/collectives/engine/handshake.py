"""Settings handshake of a collective: every two ranks compare what they are about to do; short messages ride along.

Collectives of different sizes hang, abort or mix up bytes. So in every call each rank announces its settings to the
others before values are used, and all of them refuse together when two differ. Nothing is remembered from earlier
calls, so a rank that changes its settings in mid-run is found in that call.

An announcement is 256 bytes of settings, then the split sizes of an uneven all-to-all, which are never equal and are
compared pair by pair, then observations, which are not compared. Here are announcements through gloo, which carry the
first message if that is short; device_handshake.py has those of a backend without tags.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError

MAX_INSIDE_NBYTES = 1 << 14
"""Of a message that travels inside of an announcement."""

_LINE_NBYTES = 256

_MAX_NOTE_NBYTES = 64

_TAG = 1 << 25
"""And the two after it. torch_compat.py and programs stay below."""

NOTHING_WRITTEN = "no result was written"
GROUP_ENDED = "the group was ended, and results of this call must not be used"
"""What becomes of a call in which ranks differ: before values are under way, and after."""

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


@dataclass(frozen=True)
class Splits:
    """Elements that a rank of an uneven all-to-all sends to each rank, and that it expects from each, by group rank."""

    sent: tuple[int, ...]
    expected: tuple[int, ...]

    @staticmethod
    def nbytes(world: int) -> int:
        """Bytes of `pack` on each of `world` ranks."""
        return 16 * world

    def pack(self) -> bytes:
        """int64, little-endian: `sent`, then `expected`."""
        return struct.pack(f"<{2 * len(self.sent)}q", *self.sent, *self.expected)

    @classmethod
    def unpack(cls, packed: bytes) -> Splits:
        """The inverse of `pack`."""
        numbers = struct.unpack(f"<{len(packed) // 8}q", packed)
        return cls(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])


@lru_cache(1024)
def _line_of(settings: tuple[tuple[str, str | int], ...], types: tuple[type, ...]) -> bytes:
    """`types` keep True and 1 apart, which are written differently: all ranks write what they were given."""
    line = json.dumps(dict(settings), separators=(",", ":")).encode().ljust(_LINE_NBYTES)
    assert len(line) == _LINE_NBYTES, settings
    return line


@dataclass(frozen=True)
class Announcement:
    """What a rank says of a call: settings that all must have in common, splits of an uneven all-to-all, a note.

    The note is of observations, as long on all ranks whose settings are the same.
    """

    settings: Settings
    splits: Splits | None = None
    note: bytes = b""

    @cached_property
    def line(self) -> bytes:
        """The settings as they travel, uint8 [256]."""
        return _line_of(tuple(self.settings.items()), tuple(map(type, self.settings.values())))

    def pack(self) -> bytes:
        """All of it as it travels."""
        return self.line + (b"" if self.splits is None else self.splits.pack()) + self.note

    def notes_of(self, fronts: Mapping[int, bytes]) -> list[bytes]:
        """The notes of all ranks, in the group's order, from what the others announced."""
        return [front[len(front) - len(self.note) :] for _, front in sorted(fronts.items())]

    def peers_that_agree(self, fronts: Mapping[int, bytes], me: int) -> tuple[set[int], set[int]]:
        """Group ranks to which messages of the call are sent, and those from which they come, as both ends mean them.

        `fronts` is what each rank announced, by group rank, `me` this rank.
        """
        same = {rank for rank, front in fronts.items() if front.startswith(self.line)}
        if self.splits is None or len(same) < len(fronts):
            return same, same
        everyones = self.splits_of(fronts)
        sent_to = {rank for rank in same if everyones[rank].expected[me] == self.splits.sent[rank]}
        received_from = {rank for rank in same if everyones[rank].sent[me] == self.splits.expected[rank]}
        return sent_to, received_from

    def splits_of(self, fronts: Mapping[int, bytes]) -> list[Splits]:
        """The splits of all ranks, by group rank, from the announcements of all."""
        end = _LINE_NBYTES + Splits.nbytes(len(fronts))
        return [Splits.unpack(front[_LINE_NBYTES:end]) for _, front in sorted(fronts.items())]

    def check(self, fronts: Mapping[int, bytes], ranks: Sequence[int], outcome: str = NOTHING_WRITTEN) -> None:
        """Compare what all ranks announced, by group rank, whose global ranks are `ranks`; ConfigError if two differ.

        It names the ranks, the setting and both values, and the `outcome` of such a call.
        """
        if not all(front.startswith(self.line) for front in fronts.values()):
            raise disagreement(
                {ranks[rank]: _settings_of(front[:_LINE_NBYTES]) for rank, front in sorted(fronts.items())}, outcome
            )
        if self.splits is None:
            return
        everyones = self.splits_of(fronts)
        for source, wanted in enumerate(zip(*(splits.expected for splits in everyones), strict=True)):
            sent = everyones[source].sent
            if sent == wanted:
                continue
            target = next(target for target in range(len(ranks)) if sent[target] != wanted[target])
            raise ConfigError(
                f"rank {ranks[source]} sends {sent[target]} elements to rank {ranks[target]} in"
                f" {self.settings['function']}, which expects {wanted[target]}; input_split_sizes of the one must be"
                f" output_split_sizes of the other; {outcome}"
            )


def _settings_of(line: bytes) -> dict[str, Any]:
    """The settings that a rank announced; those of a line that holds none say so."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    return found if isinstance(found, dict) and "function" in found else {"function": "a message of another call"}


StartTransfer = Callable[[int, Tensor, int], dist.Work]
"""Starts sending a tensor to a group rank, or receiving from one, with a tag."""


class Handshake:
    """Announcements of one call, to and from each peer, through gloo.

    `receive` starts receiving into a tensor from a group rank with a tag; errors name the rank. Methods are given the
    functions that they call, and none is kept: they are the call's own, and what refers to each other lives, with the
    group and its threads, until Python looks for cycles.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        announcement: Announcement,
        receive: StartTransfer,
    ) -> None:
        self._me, self._front = group.rank(), announcement.pack()
        longest = _LINE_NBYTES + Splits.nbytes(group.size()) + _MAX_NOTE_NBYTES + MAX_INSIDE_NBYTES
        assert len(announcement.note) <= _MAX_NOTE_NBYTES
        # A sender's announcements stay apart from a receiver's, because two ranks may send to each other at once.
        self._tag_out, tag_in = {None: (0, 0), True: (1, 2), False: (2, 1)}[peers.sends]
        self._unannounced = list(peers.group_ranks)
        self._sent: list[tuple[int, dist.Work]] = []
        self._received: dict[int, tuple[Tensor, dist.Work]] = {}
        for peer in peers.group_ranks:
            # As long whatever the sender means by its announcement: gloo delivers only into what is long enough.
            buffer = torch.empty(longest, dtype=torch.uint8, device="cpu")
            self._received[peer] = buffer, receive(peer, buffer, _TAG + tag_in)

    def announce(self, send: StartTransfer, peer: int, message: Tensor | None = None) -> None:
        """Start sending the settings to a peer, with a message inside."""
        self._unannounced.remove(peer)
        front = torch.frombuffer(bytearray(self._front), dtype=torch.uint8)
        buffer = front if message is None else torch.cat((front, message))
        self._sent.append((peer, send(peer, buffer, _TAG + self._tag_out)))

    def unannounced(self, but: Collection[int] = ()) -> list[int]:
        """Group ranks of the peers that do not have the settings yet, but for those."""
        return [peer for peer in self._unannounced if peer not in but]

    def read(self, send: StartTransfer, wait: Callable[[Iterable[tuple[int, dist.Work]]], None]) -> dict[int, bytes]:
        """Wait for what all ranks announce, this one included, by group rank, as long as this rank's announcement."""
        for peer in self.unannounced():
            self.announce(send, peer)
        wait([*((peer, work) for peer, (_, work) in self._received.items()), *self._sent])
        size = len(self._front)
        fronts = {peer: buffer[:size].numpy().tobytes() for peer, (buffer, _) in self._received.items()}
        return fronts | {self._me: self._front}

    def inside(self, peer: int, nbytes: int) -> Tensor:
        """The first `nbytes` of what came behind the settings of a peer; call `read` before."""
        return self._received[peer][0][len(self._front) : len(self._front) + nbytes]


def difference(settings: Mapping[int, Mapping[str, Any]]) -> str | None:
    """What differs first between the settings of ranks, in the group's order, and in whose; None if all agree."""
    (here, first), *others = settings.items()
    for there, other in others:
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                a, b = (repr(one[name]) if name in one else "missing" for one in (first, other))
                return f"{name} is {a} on rank {here} and {b} on rank {there}"
    return None


def difference_in_group(settings: Mapping[str, object], group: dist.ProcessGroup) -> str | None:
    """What differs first between the settings of a group's ranks, the same on all of them; None if all agree.

    Costs one small all-gather; the settings themselves are exchanged only when they differ.
    """
    text = json.dumps(settings, default=str)
    digests: list[str] = [""] * group.size()
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return None
    texts = [""] * group.size()
    dist.all_gather_object(texts, text, group=group)
    everyones = dict(zip(ranks_of(group), map(json.loads, texts), strict=True))
    found = difference(everyones)
    if found is None:  # numbers of another kind are equal, as 1, 1.0 and True
        written = {rank: {name: json.dumps(one) for name, one in theirs.items()} for rank, theirs in everyones.items()}
        found = difference(written) or "the order of the settings is not the same"
    return found


def disagreement(settings: Mapping[int, Mapping[str, Any]], outcome: str) -> ConfigError:
    """The error of a call for which the ranks have settings that are not all the same; `outcome`: what became of it."""
    function = next(iter(settings.values()))["function"]
    return ConfigError(
        f"{difference(settings)} in {function}, but all ranks of a group must make the same calls in the same order"
        f" with the same settings; {outcome}"
    )
