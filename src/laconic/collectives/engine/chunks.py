"""One chunk of a collective, from values to values: generators that yield where they wait for the network.

`laconic.collectives.engine.overlap` runs many of them at once: while one chunk is on the wire the next is encoded and
the one before is decoded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.collectives.engine.transport import Incoming, Outgoing, Wire

__all__ = ["all_reduce_piece", "broadcast_piece", "gather_everywhere", "move_piece", "reduce_scatter_piece"]


def move_piece(
    wire: Wire, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[tuple[int, Tensor]]
) -> Iterator[None]:
    """Values to and from other ranks: `incoming` names places and where their values go."""
    flight = wire.fly(codec, outgoing, [Incoming(place, out.numel(), out) for place, out in incoming])
    yield
    wire.agree()
    for place, out in incoming:
        if out.numel():
            wire.decode_into(place, *flight.take(place), out)
    flight.wait_sent()


def gather_everywhere(wire: Wire, codec: Codec, mine: Tensor, outs: Sequence[Tensor]) -> Iterator[None]:
    """`mine` to all ranks, and what they have into `outs`, by place; a lossy codec changes one's own too."""
    me, others = _others(wire)
    if mine.numel() == 0:
        message = None
    else:
        message = wire.encode(codec, mine)
    outgoing = [Outgoing(others[::-1], mine, message)]
    yield from move_piece(wire, codec, outgoing, [(place, outs[place]) for place in others])
    if codec.lossless or message is None:
        if outs[me].data_ptr() != mine.data_ptr():
            outs[me].copy_(mine)
    else:
        wire.decode_into(me, codec, message, outs[me])


def reduce_scatter_piece(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], out: Tensor, factor: float
) -> Iterator[None]:
    """Row r of every rank is summed on rank r, into `out`."""
    out.copy_((yield from _sum_of_rows(wire, codec, rows, factor)))


def all_reduce_piece(wire: Wire, codec: Codec, x: Tensor, factor: float, one_round: bool) -> Iterator[None]:
    """Flat `x` [m] is replaced by its sum over ranks.

    In one round every rank sends all it has and sums all by itself; in two each sums a part, and the parts are
    gathered. The bits are the same.
    """
    world = wire.group.size()
    if one_round:
        x.copy_((yield from _sum_of_rows(wire, codec, [x] * world, factor, together=True)))
        return
    step = -(-x.numel() // world)
    parts = [x[min(start, x.numel()) : start + step] for start in range(0, step * world, max(1, step))]
    total = yield from _sum_of_rows(wire, codec, parts, factor)
    mine = total.to(x.dtype)
    yield from gather_everywhere(wire, codec, mine, parts)


def broadcast_piece(wire: Wire, codec: Codec, x: Tensor, src: int, spread: bool) -> Iterator[None]:
    """Flat `x` [m] of the rank at `src` replaces that of the others.

    Spread, it leaves `src` once: each other rank gets a part and passes its message on.
    """
    me, others = _others(wire)
    receivers = [place for place in range(wire.group.size()) if place != src]
    if not spread:
        parts = [x]
        sends = [receivers]
    else:
        step = max(1, -(-x.numel() // len(receivers)))
        parts = [x[min(i * step, x.numel()) : (i + 1) * step] for i in range(len(receivers))]
        sends = [[place] for place in receivers]
    if me == src:
        outgoing = [
            Outgoing(places, part, wire.encode(codec, part))
            for places, part in zip(sends, parts, strict=True)
            if part.numel()
        ]
        yield from move_piece(wire, codec, outgoing, [])
        if spread:
            yield from move_piece(wire, codec, [], [])  # as many flights as on the other ranks
        if not codec.lossless:
            for entry in outgoing:
                assert entry.message is not None
                wire.decode_into(me, codec, entry.message, entry.values)
        return
    part = parts[receivers.index(me)] if spread else x
    flight = wire.fly(codec, [], [Incoming(src, part.numel(), part)])
    yield
    wire.agree()
    message = None
    if part.numel():
        used, message = flight.take(src)
        wire.decode_into(src, used, message, part)
        # The fallback's is made again from the values, as `src` made it.
        message = message if used == codec else None
    if spread:
        rest = [place for place in others if place != src]
        incoming = [(place, parts[receivers.index(place)]) for place in rest]
        yield from move_piece(wire, codec, [Outgoing(rest[::-1], part, message)], incoming)


def _sum_of_rows(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], factor: float, together: bool = False
) -> Generator[None, None, Tensor]:
    """fp32 sum over ranks, in their order, of the row that is this rank's, times `factor`.

    Each rank's own row counts as it is, the others' as they were decoded. `together`: all rows are the same tensor.
    """
    me, others = _others(wire)
    mine = rows[me]
    outgoing = [Outgoing(others[::-1], mine)] if together else [Outgoing((p,), rows[p]) for p in others[::-1]]
    flight = wire.fly(codec, outgoing, [Incoming(place, mine.numel()) for place in others])
    yield
    wire.agree()
    total = torch.full((mine.numel(),), -0.0, device=mine.device)  # x + -0.0 is x, for 0.0 and -0.0 too
    for place in range(wire.group.size() if mine.numel() else 0):
        if place == me:
            total.add_(mine)
        else:
            wire.decode_add(place, *flight.take(place), total)
    flight.wait_sent()
    return total.mul_(factor) if factor != 1 else total


def _others(wire: Wire) -> tuple[int, list[int]]:
    """This rank's place, and the others', the next one first: no rank is sent to by all others at once."""
    me, world = wire.group.rank(), wire.group.size()
    return me, [(me - distance) % world for distance in range(1, world)]
