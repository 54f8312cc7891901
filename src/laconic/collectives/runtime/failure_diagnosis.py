"""What ranks tell each other when a collective has broken off, so that the one to blame is found.

A rank that ends, stops or hangs holds up all others, and each of them sees only the peer that it waited for itself:
often one that waits, too. So a rank whose peer did not answer writes into the group's store whom it waited for. Whoever
has written is alive; following these notes from rank to rank ends at the one that has written nothing.

A rank that broke off also wakes the others of its group, which would else find out when it ends, and with it perhaps
the store.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["GRACE_SECONDS", "absent", "follow", "reason_of"]

GRACE_SECONDS = 2.0
"""How long the notes of others are waited for. Ranks that waited for each other give up at about the same time."""

_POLL_SECONDS = 0.05

_TAG = (1 << 25) - 1  # nobody sends with it


def follow(group: dist.ProcessGroup, place: int, wake: bool = False) -> list[int]:
    """Write down that this rank waited for `place` in vain; return the places of which each waited for the next.

    The first is `place`. The last has written nothing, or is this rank or one of those before it: then all of them are
    alive. Takes `GRACE_SECONDS` if somebody is silent. Best effort: the store may have gone with the rank that is to
    blame, and then `place` alone is returned. With `wake`, calls of the other ranks on this group break off, too.
    """
    chain = [place]
    if group.size() == 2:
        return chain
    if wake:
        _wake(group)
    # The store's answers come from another process, which may be the one that has stopped: nobody waits for them.
    thread = threading.Thread(target=_follow, args=(group, chain), name="laconic-witness", daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)
    return list(chain)


def reason_of(error: Exception) -> str:
    """What gloo says in one line, without the place in its own source in front and advice of its own behind."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0]).partition(". This is typically")[0]


def absent(group: dist.ProcessGroup) -> list[int]:
    """Write down that a collective broke off here, and return the places that have written nothing of the kind within
    `GRACE_SECONDS`: those that keep the others waiting. Best effort, as `follow`; [] where nobody can tell."""
    if group.size() == 2:
        return [1 - group.rank()]
    _wake(group)
    found: list[int] = []
    thread = threading.Thread(target=_call_the_roll, args=(group, found), name="laconic-witness", daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)
    return list(found)


def _call_the_roll(group: dist.ProcessGroup, found: list[int]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store = group.get_group_store()
        store.set(_key(group.rank()), str(group.rank()))
        silent = [place for place in range(group.size()) if place != group.rank()]
        while silent and time.monotonic() < deadline:
            silent = [place for place in silent if not store.check([_key(place)])]
            time.sleep(_POLL_SECONDS)
        found += silent
    except RuntimeError:
        return  # the store's process has ended


def _wake(group: dist.ProcessGroup) -> None:
    """gloo closes a group's connections when a receive has timed out, and those who wait on them are told at once."""
    for place in range(group.size()):
        if place != group.rank():
            with suppress(RuntimeError):  # the time-out, and afterwards that the connection is closed
                work = group.recv([torch.empty(1, dtype=torch.uint8)], place, _TAG)
                work.wait(timedelta(milliseconds=1))


def _follow(group: dist.ProcessGroup, chain: list[int]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store = group.get_group_store()
        store.set(_key(group.rank()), str(chain[0]))
        while chain[-1] != group.rank() and chain[-1] not in chain[:-1]:
            while not store.check([_key(chain[-1])]):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)
            chain.append(int(store.get(_key(chain[-1]))))
    except RuntimeError:
        return  # the store's process has ended


def _key(place: int) -> str:
    return f"laconic/waited/{place}"
