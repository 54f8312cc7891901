"""Failure diagnosis: which rank is the reason that a collective broke off.

A rank that ends, stops or hangs holds up all others, and each of them sees only the peer that it waited for itself:
often one that waits, too. So a rank whose peer did not answer writes into the group's store whom it waited for. Whoever
has written is alive; following what they wrote from rank to rank ends at the one that has written nothing.

A rank that broke off also wakes the others of its group, which would else find out when it ends, and with it perhaps
the store.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.errors import CollectiveError

__all__ = ["GRACE_SECONDS", "absent", "broke_off", "reason_of"]

GRACE_SECONDS = 2.0
"""How long others are waited for to write. Ranks that waited for each other give up at about the same time."""

_POLL_SECONDS = 0.05

_TAG = (1 << 25) - 1  # nobody sends with it


def broke_off(
    what: str,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    peer: int,
    error: Exception,
    *,
    wake: bool,
    or_else: str = "",
) -> CollectiveError:
    """The error of a rank that waited for group rank `peer` in vain; it names the rank at which the waiting ends.

    Arguments:
        what: was going on.
        ranks: the global ranks of the group.
        error: the backend's.
        wake: let calls of the other ranks on this group break off, too.
        or_else: what else the rank may have done.
    """
    waits = [f"rank {ranks[other]}" for other in _follow(group, peer, wake)]
    return CollectiveError(
        f"{what} broke off on rank {ranks[group.rank()]}, which waited for {', which waited for '.join(waits)}:"
        f" {reason_of(error)}; {waits[-1]} ended, stopped, raised an error{or_else} or took longer than the group's"
        " timeout, see its own output"
    )


def _follow(group: dist.ProcessGroup, peer: int, wake: bool) -> list[int]:
    """Write down that this rank waited for `peer` in vain; return the group ranks of which each waited for the next.

    The first is `peer`. The last has written nothing, or is this rank or one of those before it: then all of them are
    alive. Takes `GRACE_SECONDS` if somebody is silent. Best effort: the store may have gone with the rank that was
    lost, and then `peer` alone is returned.
    """
    chain = [peer]
    if group.size() == 2:
        return chain
    if wake:
        _wake(group)
    # The store's answers come from another process, which may be the one that has stopped: nobody waits for them.
    thread = threading.Thread(target=_follow_notes, args=(group, chain), name="laconic-diagnosis", daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)
    return list(chain)


def reason_of(error: Exception) -> str:
    """What gloo says in one line, without the line of its own source in front and advice of its own behind."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0]).partition(". This is typically")[0]


def absent(group: dist.ProcessGroup) -> list[int]:
    """Write down that a collective broke off here; return the group ranks that have written nothing of the kind within
    `GRACE_SECONDS`: those that keep the others waiting. Best effort; [] where nobody can tell."""
    if group.size() == 2:
        return [1 - group.rank()]
    _wake(group)
    found: list[int] = []
    thread = threading.Thread(target=_call_the_roll, args=(group, found), name="laconic-diagnosis", daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS + 1.0)
    return list(found)


def _call_the_roll(group: dist.ProcessGroup, found: list[int]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store = group.get_group_store()
        store.set(_key(group.rank()), str(group.rank()))
        silent = [peer for peer in range(group.size()) if peer != group.rank()]
        while silent and time.monotonic() < deadline:
            silent = [peer for peer in silent if not store.check([_key(peer)])]
            time.sleep(_POLL_SECONDS)
        found += silent
    except RuntimeError:
        return  # the store's process has ended


def _wake(group: dist.ProcessGroup) -> None:
    """gloo closes a group's connections when a receive has timed out, and those who wait on them hear of it at once."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # the time-out, and afterwards that the connection is closed
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAG)
                work.wait(timedelta(milliseconds=1))


def _follow_notes(group: dist.ProcessGroup, chain: list[int]) -> None:
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


def _key(peer: int) -> str:
    return f"laconic/waited/{peer}"
