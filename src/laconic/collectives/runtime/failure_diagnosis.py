"""Failure diagnosis: attributes a broken collective to the rank that ended, stopped or hung.

Such a rank holds up all others, and each of them sees only the peer that it waited for itself: often one that waits,
too. So a rank whose peer did not answer writes into the group's store which peer that was. A rank that has written is
alive; following the entries from rank to rank ends at the one that has written nothing.

A rank that broke off also wakes the others of its group, which would else notice only when it ends, and with it perhaps
the store.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import CollectiveError, ConfigError
from laconic.shared_secret import seal, unseal

_GRACE_SECONDS = 2.0
"""Time to wait for entries of other ranks. Ranks that waited for each other give up at about the same time."""

_POLL_SECONDS = 0.05

_TAG = (1 << 25) - 1  # nobody sends with it

_OF_OTHERS = re.compile(r"peer|connect|timed? ?out|closed|socket|pipe|abort|nccl|gloo/", re.IGNORECASE)
"""What errors say that come from the network: gloo's, NCCL's, and those of the store."""


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
    """The error of a rank that waited for group rank `peer` in vain; names the global rank at which the waiting ends.

    Raises `error` itself, if it is this rank's own. `wake` lets calls of the other ranks on this group break off, too;
    `or_else` is another possible cause, for the message.
    """
    if is_own(error):
        raise error
    waits = [f"rank {ranks[other]}" for other in _follow(group, peer, wake)]
    return CollectiveError(
        f"{what} broke off on rank {ranks[group.rank()]}, which waited for {', which waited for '.join(waits)}:"
        f" {reason_of(error)}; {waits[-1]} ended, stopped, raised an error{or_else} or took longer than the group's"
        f" timeout, see its own output{_of_the_living(error)}"
    )


def _follow(group: dist.ProcessGroup, peer: int, wake: bool) -> list[int]:
    """Write down that this rank waited for `peer` in vain; return the group ranks of which each waited for the next.

    The first is `peer`. The last has written nothing, or is this rank or one of those before it: then all of them are
    alive. Takes `_GRACE_SECONDS` if a rank is silent. Best effort: the store may have gone with the rank that was lost,
    and then `peer` alone is returned.
    """
    chain = [peer]
    if group.size() == 2:
        return chain
    if wake:
        _wake(group)
    # The store's answers come from another process, which may be the one that has stopped: do not wait for them.
    thread = threading.Thread(target=_follow_notes, args=(group, chain), name="laconic-diagnosis", daemon=True)
    thread.start()
    thread.join(_GRACE_SECONDS + 1.0)
    return list(chain)


@contextmanager
def losses_named(
    ranks: Callable[[], Sequence[int]], during: str, remedy: str = "see what it says, and start again from a checkpoint"
) -> Iterator[None]:
    """Turn torch's error about a lost rank into a CollectiveError that names the loss; `ranks` is asked only then.

    For calls that do not tell which peer was waited for; `broke_off` names the rank where they do. The message says
    what was going on ("during all_gather", "while experts moved") and what to do.
    """
    try:
        yield
    except RuntimeError as error:
        if is_own(error):
            raise
        raise CollectiveError(
            f"one of ranks {list(ranks())} ended or stopped {during} ({reason_of(error)}); {remedy}"
        ) from error


def _of_the_living(error: Exception) -> str:
    """What a rank may have done that did not answer and yet has not ended, which would have closed its connections."""
    if re.search("timed out", str(error), re.IGNORECASE) is None:
        return ""
    return (
        "; or it made another call, or this one with another op, dtype or size, some of which are coded and others left"
        " raw"
    )


def is_own(error: Exception) -> bool:
    """Whether an error that came up in a collective is this rank's own, which says nothing about its peers.

    Those that torch has for arguments (an operation that a dtype does not have, a tensor of inference mode) are: the
    group is alive, and looking for a lost rank would close its connections.
    """
    if isinstance(error, dist.DistError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or _OF_OTHERS.search(str(error).partition("\n")[0]) is None


def reason_of(error: Exception) -> str:
    """gloo's error in one line, without the source position in front and gloo's advice behind."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).partition("\n")[0]).partition(". This is typically")[0]


def absent(group: dist.ProcessGroup) -> list[int]:
    """Write down that a collective broke off here; return group ranks that did not soon, as far as they are known."""
    if group.size() == 2:
        return [1 - group.rank()]
    _wake(group)
    found: list[int] = []
    thread = threading.Thread(target=_call_the_roll, args=(group, found), name="laconic-diagnosis", daemon=True)
    thread.start()
    thread.join(_GRACE_SECONDS + 1.0)
    return list(found)


def _call_the_roll(group: dist.ProcessGroup, found: list[int]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    try:
        store = group.get_group_store()
        _write(store, group.rank(), str(group.rank()))
        silent = [peer for peer in range(group.size()) if peer != group.rank()]
        while silent and time.monotonic() < deadline:
            silent = [peer for peer in silent if not store.check([_key(peer)])]
            time.sleep(_POLL_SECONDS)
        found += silent
    except RuntimeError:
        return  # the store's process has ended


def broken_off(name: str, group: dist.ProcessGroup, error: RuntimeError, peer: int | None = None) -> CollectiveError:
    """The error of a rank whose backend gave up, on `peer` or on whom it finds; raises `error` if it is its own."""
    if is_own(error):
        raise error
    ranks = ranks_of(group)
    missing = [f"rank {ranks[other]}" for other in (absent(group) if peer is None else [peer])]
    reason = reason_of(error)
    return CollectiveError(
        f"{name} broke off on rank {ranks[group.rank()]}: {reason};"
        f" {', '.join(missing) or f'one of ranks {[*ranks]}'} ended, stopped, raised an error or took longer than the"
        f" group's timeout, see its own output{_of_the_living(error)}"
    )


def _wake(group: dist.ProcessGroup) -> None:
    """Make gloo close the group's connections by a receive that times out; ranks that wait on them fail at once."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # the time-out, and afterwards that the connection is closed
                work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _TAG)
                work.wait(timedelta(milliseconds=1))


def _follow_notes(group: dist.ProcessGroup, chain: list[int]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    try:
        store = group.get_group_store()
        _write(store, group.rank(), str(chain[0]))
        while chain[-1] != group.rank() and chain[-1] not in chain[:-1]:
            while not store.check([_key(chain[-1])]):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)
            chain.append(int(unseal(_key(chain[-1]), store.get(_key(chain[-1])))))
    except (RuntimeError, ConfigError):
        return  # the store's process has ended, or the note is none of this run's


def _write(store: Any, rank: int, note: str) -> None:
    store.set(_key(rank), seal(_key(rank), note))


def _key(peer: int) -> str:
    return f"laconic/waited/{peer}"
