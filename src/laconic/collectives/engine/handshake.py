"""What ranks tell each other before a call: 256 bytes of settings, and with them the first message if it is short.

A notice is received into a buffer of fixed size, whatever the sender means by it, so that notices arrive even where two
ranks mean different calls: those are compared and refused. A short message inside makes one exchange of two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.engine.agreement import Settings

__all__ = ["MAX_INSIDE_NBYTES", "Notices", "Peers", "line_of"]

MAX_INSIDE_NBYTES = 1 << 14
"""Of a message that travels inside of a notice."""

_LINE_NBYTES = 256

_TAG = 1 << 25
"""And the two after it. native.py and programs stay below."""


@dataclass(frozen=True)
class Peers:
    """With whom this rank exchanges notices."""

    ranks: tuple[int, ...]
    """Global ranks of the group's places, for errors."""
    places: tuple[int, ...]
    """Places of the other ranks that take part."""
    sends: bool | None = None
    """Whether this rank sends to or receives from its only peer; None in a collective of the whole group."""


def line_of(settings: Settings) -> bytes:
    """The settings as they travel."""
    line = json.dumps(settings, separators=(",", ":")).encode().ljust(_LINE_NBYTES)
    assert len(line) == _LINE_NBYTES, settings
    return line


class Notices:
    """Those of one call, from and to each peer, through gloo.

    `note` follows the settings, as long on all ranks whose settings are the same, and need not be equal. `send` starts
    sending a tensor to a place with a tag; `blame` is put around what may fail because of a place.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        line: bytes,
        note: bytes,
        send: Callable[[int, Tensor, int], dist.Work],
        blame: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._front, self._send, self._blame = line + note, send, blame
        # A sender's notices stay apart from a receiver's, because two ranks may send to each other at the same time.
        self._tag_out, tag_in = {None: (0, 0), True: (1, 2), False: (2, 1)}[peers.sends]
        self._untold = list(peers.places)
        self._sent: list[tuple[int, dist.Work]] = []
        self._received: dict[int, tuple[Tensor, dist.Work]] = {}
        for place in peers.places:
            buffer = torch.empty(len(self._front) + MAX_INSIDE_NBYTES, dtype=torch.uint8)
            with blame(place):
                work = group.recv([buffer], place, _TAG + tag_in)
            assert work is not None
            self._received[place] = buffer, work

    def tell(self, place: int, message: Tensor | None = None) -> None:
        """Send the notice to the rank at `place`, with a message inside."""
        self._untold.remove(place)
        front = torch.frombuffer(bytearray(self._front), dtype=torch.uint8)
        notice = front if message is None else torch.cat((front, message))
        self._sent.append((place, self._send(place, notice, _TAG + self._tag_out)))

    def tell_all_but(self, places: set[int]) -> None:
        """Send the notice to all other ranks that have none yet."""
        for place in [place for place in self._untold if place not in places]:
            self.tell(place)

    def read(self) -> dict[int, bytes]:
        """Wait for what the others say, by place."""
        self.tell_all_but(set())
        for place, (_, work) in self._received.items():
            with self._blame(place):
                work.wait()
        for place, work in self._sent:
            with self._blame(place):
                work.wait()
        return {place: buffer[:_LINE_NBYTES].numpy().tobytes() for place, (buffer, _) in self._received.items()}

    def notes(self) -> dict[int, bytes]:
        """The others' notes, by place; call `read` before."""
        return {
            place: buffer[_LINE_NBYTES : len(self._front)].numpy().tobytes()
            for place, (buffer, _) in self._received.items()
        }

    def inside(self, place: int, nbytes: int) -> Tensor:
        """The first `nbytes` of what came inside of the notice from `place`; call `read` before."""
        return self._received[place][0][len(self._front) : len(self._front) + nbytes]
