"""Many pieces of a collective at once.

A piece is a generator that yields where it waits for the network. `overlap` runs pieces one wait apart, so that one of
them travels while others are computed with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["overlap"]


def overlap(pieces: Iterable[Iterator[None]]) -> None:
    """Run pieces so that each is one wait behind the one before it: the same order of collectives on every rank."""
    waiting: deque[Iterator[None]] = deque()

    def step() -> None:
        # The youngest first, so that its message is on the way before an older one is computed with.
        for piece in [*waiting][::-1]:
            if next(piece, waiting) is waiting:
                waiting.remove(piece)

    for piece in pieces:
        waiting.append(piece)
        step()
    while waiting:
        step()
