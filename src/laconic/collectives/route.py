"""Which codec a message takes, in how many chunks, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laconic.collectives import audit
from laconic.collectives.choose import choose, observe, would_talk
from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.wire import Wire
from laconic.cost.wire.seconds import RAW, Choice

__all__ = ["Route", "find_route", "finish", "slices"]

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

    def step(self, numel: int, dtype: torch.dtype) -> int:
        """Elements per chunk of an edge with `numel` elements, at least 1."""
        num_chunks = self.num_chunks or min(_MAX_CHUNKS, numel * dtype.itemsize // _CHUNK_NBYTES)
        step = -(-numel // max(1, num_chunks))
        return max(1, min(numel, -(-step // _CUT_NUMEL) * _CUT_NUMEL))


def slices(numel: int, step: int) -> Iterator[slice]:
    """0 ... numel in pieces of `step`; one empty piece if there is nothing."""
    return (slice(start, min(start + step, numel)) for start in range(0, max(1, numel), step))


def find_route(wire: Wire, operation: str, numel: int, codec: Codec | str, tag: str = "") -> Route:
    """The route of a call; the same on all its ranks.

    Arguments:
        operation: "all_gather", ...
        numel: elements of one rank's input, a number that all ranks share.
        codec: a codec, or "auto" for the one that is predicted to be fastest.
        tag: as in `choose`.
    """
    if not isinstance(codec, str):
        return Route(codec, None, "asked for")
    if would_talk(operation, numel, wire.dtype, wire.group, tag=tag, device=wire.device):
        wire.agree()
    choice = choose(operation, numel, wire.dtype, wire.group, tag=tag, device=wire.device)
    if choice.codec == RAW:
        return Route(Raw(), None, choice.reason, choice=choice)
    return Route(Lossless(choice.codec), choice.num_chunks, choice.reason, choice.saved_seconds, choice)


def finish(wire: Wire, operation: str, route: Route) -> None:
    """Write a call down in the audit, and what became of it for later choices."""
    # Of sends the two ranks would observe at different times, and could then choose differently.
    if route.choice is not None and wire.peers.sends is None:
        observe(
            operation,
            wire.dtype,
            wire.group,
            route.choice,
            wire.raw_nbytes,
            wire.message_nbytes,
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
