"""Waiting until all ranks of a group have come to the same place, over the connections that the group has.

Connections are made through the store, where nobody hears that a rank has ended: those who came wait for the group's
timeout, half an hour by default, and are told of a time-out. A connection that is there breaks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from laconic.collectives.runtime.failure_diagnosis import follow, reason_of
from laconic.errors import CollectiveError

__all__ = ["meet"]

_FIRST_TAG, _NUM_TAGS = (1 << 24) + (1 << 20), 1 << 20


def meet(group: dist.ProcessGroup, ranks: Sequence[int], what: str, number: int) -> None:
    """Return once every rank has come here. Raises CollectiveError naming the rank that does not.

    Arguments:
        ranks: the global ranks of the group's members.
        what: all of them are about to do, for the error.
        number: tells meetings from each other that ranks may come to in different orders.
    """
    others = [place for place in range(group.size()) if place != group.rank()]
    tag, mark = _FIRST_TAG + number % _NUM_TAGS, torch.zeros(1, dtype=torch.uint8)
    sent: list[tuple[int, dist.Work]] = []
    for place in others:
        with _blame(group, ranks, what, place):
            sent.append((place, group.send([mark], place, tag)))
    for place in others:
        with _blame(group, ranks, what, place):
            group.recv([torch.empty_like(mark)], place, tag).wait()
    for place, work in sent:
        with _blame(group, ranks, what, place):
            work.wait()


@contextmanager
def _blame(group: dist.ProcessGroup, ranks: Sequence[int], what: str, place: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = reason_of(error)
        waits = [f"rank {ranks[other]}" for other in follow(group, place, wake=True)]
        raise CollectiveError(
            f"{what} broke off on rank {ranks[group.rank()]}, which waited for {', which waited for '.join(waits)}:"
            f" {reason}; {waits[-1]} ended, stopped, raised an error, made no such call or took longer than the group's"
            " timeout, see its own output"
        ) from error
