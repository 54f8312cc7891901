"""Sums around a ring: each rank decodes what comes from the rank before, adds its own, encodes, and passes it on.

As many bytes leave each rank as in an exchange between every two, but in one stream to one neighbour, which fills a
link better than streams from all other ranks at once do. The part of rank r is summed in the order r + 1, r + 2, ...
r, and rounded to the tensor's type at every hop. All ranks get the same bits. Codecs have to be lossless.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.collectives.engine.transport import Flight, Incoming, Outgoing, Wire

__all__ = ["ring_all_reduce_piece", "ring_reduce_scatter_piece"]


def ring_reduce_scatter_piece(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], out: Tensor, factor: float
) -> Iterator[None]:
    """Row r of every rank is summed on rank r, into `out`, times `factor`."""
    flights: list[Flight] = []
    out.copy_((yield from _reduce(wire, codec, rows, factor, flights)))
    for flight in flights:
        flight.wait_sent()


def ring_all_reduce_piece(wire: Wire, codec: Codec, x: Tensor, factor: float) -> Iterator[None]:
    """Flat `x` [m] is replaced by its sum over ranks, times `factor`."""
    me, world = wire.group.rank(), wire.group.size()
    step = -(-x.numel() // world)
    parts = [x[min(start, x.numel()) : start + step] for start in range(0, step * world, max(1, step))]
    flights: list[Flight] = []
    total = yield from _reduce(wire, codec, parts, factor, flights)
    parts[me].copy_(total)
    # What a rank has summed is encoded once, and passed on as it came.
    values = parts[me]
    message = wire.encode(codec, values) if values.numel() else None
    for hop in range(world - 1):
        coming = (me - hop - 1) % world
        flight = _pass_on(wire, codec, values, message, parts[coming].numel(), flights)
        yield
        values, message = parts[coming], None
        if values.numel():
            used, received = flight.take((me - 1) % world)
            wire.decode_into((me - 1) % world, used, received, values)
            # The fallback's is made again from the values, as the rank before made it.
            message = received if used == codec else None
    for flight in flights:
        flight.wait_sent()


def _reduce(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], factor: float, flights: list[Flight]
) -> Generator[None, None, Tensor]:
    """fp32 sum over ranks of the row that is this rank's, times `factor`."""
    me, world = wire.group.rank(), wire.group.size()
    before = (me - 1) % world
    partial = rows[before]
    for hop in range(world - 1):
        mine = rows[(me - hop - 2) % world]
        flight = _pass_on(wire, codec, partial, None, mine.numel(), flights)
        yield
        wire.agree()
        total = torch.empty(mine.numel(), dtype=torch.float32, device=mine.device).copy_(mine)
        if mine.numel():
            wire.decode_add(before, *flight.take(before), total)
        partial = total if hop == world - 2 else total.to(mine.dtype)
    return partial.mul_(factor) if factor != 1 else partial


def _pass_on(
    wire: Wire, codec: Codec, values: Tensor, message: Tensor | None, numel: int, flights: list[Flight]
) -> Flight:
    """Values to the next rank, and `numel` from the one before."""
    me, world = wire.group.rank(), wire.group.size()
    flight = wire.fly(codec, [Outgoing(((me + 1) % world,), values, message)], [Incoming((me - 1) % world, numel)])
    flights.append(flight)
    return flight
