"""Which codec a message takes, in how many chunks, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laconic.collectives import audit
from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.engine.transport import Wire
from laconic.collectives.policy.selector import choose, learn, observe, would_talk
from laconic.cost.comm.seconds import RAW, Choice

__all__ = ["Route", "agree", "find_route", "finish", "route_of", "slices"]

_CHUNK_NBYTES = 1 << 20
_MAX_CHUNKS = 32
_CUT_NUMEL = 4096
"""Chunks are whole blocks of the lossless format, so that cutting costs no more than headers."""


@dataclass(frozen=True)
class Route:
    """How the values of one call travel."""

    codec: Codec
    num_chunks: int | None
    """None: by size."""
    reason: str
    saved_seconds: float = 0.0
    """What the cost model expects to be saved against raw."""
    choice: Choice | None = None
    """What the cost model said, if it was asked."""
    numel: int = 0
    """Of what it was asked."""
    ring: bool = False
    """Whether messages go around, from rank to rank."""

    def step(self, numel: int, dtype: torch.dtype) -> int:
        """Elements per chunk of an edge with `numel` elements, at least 1."""
        num_chunks = self.num_chunks or min(_MAX_CHUNKS, numel * dtype.itemsize // _CHUNK_NBYTES)
        step = -(-numel // max(1, num_chunks))
        return max(1, min(numel, -(-step // _CUT_NUMEL) * _CUT_NUMEL))


def slices(numel: int, step: int) -> Iterator[slice]:
    """0 ... numel in pieces of `step`; one empty piece if there is nothing."""
    return (slice(start, min(start + step, numel)) for start in range(0, max(1, numel), step))


def find_route(wire: Wire, operation: str, numel: int, codec: Codec | str) -> Route:
    """The route of a call; the same on all its ranks.

    Arguments:
        operation: "all_gather", ...
        numel: elements of one rank's input, a number that all ranks share.
        codec: a codec, or "auto" for the one that is predicted to be fastest.
    """
    if not isinstance(codec, str):
        return Route(codec, None, "asked for")
    if would_talk(operation, numel, wire.dtype, wire.group, device=wire.device):
        agree(wire)
    return route_of(choose(operation, numel, wire.dtype, wire.group, device=wire.device), numel)


def agree(wire: Wire) -> None:
    """Wait until all ranks are known to do the same, and learn what they have observed."""
    wire.agree()
    notes = wire.take_notes()
    if notes:
        learn(wire.group, notes, wire.device)


def route_of(choice: Choice, numel: int) -> Route:
    """The route that was chosen for `numel` elements."""
    if choice.codec == RAW:
        return Route(Raw(), None, choice.reason, 0.0, choice, numel)
    return Route(
        Lossless(choice.codec), choice.num_chunks, choice.reason, choice.saved_seconds, choice, numel, choice.ring
    )


def finish(wire: Wire, operation: str, route: Route) -> None:
    """Write a call down in the audit, and what became of it for later choices."""
    # Of sends the two ranks would observe at different times, and could then choose differently.
    if route.choice is not None and wire.peers.sends is None:
        agree(wire)
        observe(
            operation,
            route.numel,
            wire.dtype,
            wire.group,
            route.choice,
            wire.raw_nbytes,
            wire.message_nbytes,
            time.perf_counter() - wire.started,
            device=wire.device,
        )
    audit.record(
        operation,
        wire.dtype,
        wire.raw_nbytes,
        wire.sent_nbytes,
        route.codec.name,
        route.reason,
        wire.coding_seconds,
        saved_seconds=route.saved_seconds,
    )
