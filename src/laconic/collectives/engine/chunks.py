"""One chunk of a collective, from values to values, and many of them at once.

A chunk is a generator that yields where it waits for the network. `overlap` runs chunks one wait apart: while one is on
the wire the next is encoded and the one before is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor

from laconic.collectives.codec import Codec, Lossless
from laconic.collectives.engine.transport import Incoming, InFlightMessages, Outgoing, Wire


def overlap(chunks: Iterable[Iterator[None]]) -> None:
    """Run chunks so that each is one wait behind the one before it: the same order of messages on every rank."""
    waiting: list[Iterator[None]] = []
    for chunk in chain(chunks, repeat(None)):
        if chunk is not None:
            waiting.append(chunk)
        elif not waiting:
            return
        # The youngest first, so that its message is on the way before an older one is computed with.
        for one in waiting[::-1]:
            if next(one, waiting) is waiting:
                waiting.remove(one)


# --- movements ---


def move_chunk(
    wire: Wire, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[tuple[int, Tensor]]
) -> Iterator[None]:
    """Values to and from other ranks: `incoming` names group ranks and where their values go."""
    if wire.reads_late(codec):
        yield from _move_unread(wire, codec, outgoing, incoming)
        return
    messages = wire.start(codec, outgoing, [Incoming(peer, out.numel(), out) for peer, out in incoming])
    yield
    wire.agree()
    for peer, out in incoming:
        if out.numel():
            wire.decode_into(peer, *messages.take(peer), out)
    messages.wait_sent()


def _move_unread(
    wire: Wire, codec: Lossless, outgoing: Sequence[Outgoing], incoming: Sequence[tuple[int, Tensor]]
) -> Iterator[None]:
    """`move_chunk` without reading what has arrived: what did not fit is decoded at the end of the call."""
    outs = {peer: out for peer, out in incoming if out.numel()}
    messages = wire.start_unread(codec, outgoing, [Incoming(peer, out.numel(), out) for peer, out in incoming])
    yield

    def decode_again(taken: Mapping[int, tuple[Codec, Tensor]]) -> None:
        for peer, (used, message) in taken.items():
            wire.decode_into(peer, used, message, outs[peer])

    statuses = {peer: wire.decode_unread(codec, messages.take(peer)[1], out) for peer, out in outs.items()}
    messages.check(statuses, decode_again)
    messages.wait_sent()


def all_to_all_chunk(
    wire: Wire, codec: Codec, received: Sequence[Tensor] | Tensor, sent: Sequence[Tensor] | Tensor
) -> Iterator[None]:
    """sent[r] goes to rank r, received[r] comes from it; one's own is copied."""
    me, others = _others(wire)
    outgoing = [Outgoing((peer,), sent[peer]) for peer in others[::-1]]
    yield from move_chunk(wire, codec, outgoing, [(peer, received[peer]) for peer in others])
    received[me].copy_(sent[me])


def all_gather_chunk(wire: Wire, codec: Codec, mine: Tensor, outs: Sequence[Tensor] | Tensor) -> Iterator[None]:
    """`mine` to all ranks, and what they have into `outs`, by group rank; a lossy codec changes one's own too."""
    me, others = _others(wire)
    message = wire.encode(codec, mine) if mine.numel() else None
    outgoing = [Outgoing(others[::-1], mine, message)]
    yield from move_chunk(wire, codec, outgoing, [(peer, outs[peer]) for peer in others])
    if codec.lossless or message is None:
        if outs[me].data_ptr() != mine.data_ptr():
            outs[me].copy_(mine)
    else:
        wire.decode_into(me, codec, message, outs[me])


def broadcast_chunk(wire: Wire, codec: Codec, x: Tensor, src: int, spread: bool) -> Iterator[None]:
    """Flat `x` [m] of group rank `src` replaces that of the others.

    Spread, it leaves `src` once: each other rank gets a part and passes its message on.
    """
    me, others = _others(wire)
    receivers = [peer for peer in range(wire.group.size()) if peer != src]
    if not spread:
        parts = [x]
        sends = [receivers]
    else:
        parts = _parts(x, len(receivers))
        sends = [[peer] for peer in receivers]
    if me == src:
        outgoing = [
            Outgoing(peers, part, wire.encode(codec, part))
            for peers, part in zip(sends, parts, strict=True)
            if part.numel()
        ]
        yield from move_chunk(wire, codec, outgoing, [])
        if spread:
            yield from move_chunk(wire, codec, [], [])  # as many rounds as on the other ranks
        if not codec.lossless:
            for entry in outgoing:
                assert entry.message is not None
                wire.decode_into(me, codec, entry.message, entry.values)
        return
    part = parts[receivers.index(me)] if spread else x
    messages = wire.start(codec, [], [Incoming(src, part.numel(), part)])
    yield
    wire.agree()
    message = _decode_and_keep(wire, codec, messages, src, part)
    if spread:
        rest = [peer for peer in others if peer != src]
        incoming = [(peer, parts[receivers.index(peer)]) for peer in rest]
        yield from move_chunk(wire, codec, [Outgoing(rest[::-1], part, message)], incoming)


# --- sums: every rank exchanges with every other ---


def reduce_scatter_chunk(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], out: Tensor, factor: float
) -> Iterator[None]:
    """Row r of every rank is summed on rank r, into `out`."""
    if wire.reads_late(codec):
        yield from _reduce_scatter_unread(wire, codec, rows, out, factor)
        return
    out.copy_((yield from _sum_of_rows(wire, codec, rows, factor)))


def all_reduce_chunk(wire: Wire, codec: Codec, x: Tensor, factor: float, one_round: bool) -> Iterator[None]:
    """Flat `x` [m] is replaced by its sum over ranks.

    In one round every rank sends all it has and sums all by itself; in two each sums a part, and the parts are
    gathered. The bits are the same.
    """
    world = wire.group.size()
    if one_round:
        x.copy_((yield from _sum_of_rows(wire, codec, [x] * world, factor, together=True)))
        return
    parts = _parts(x, world)
    total = yield from _sum_of_rows(wire, codec, parts, factor)
    yield from all_gather_chunk(wire, codec, total.to(x.dtype), parts)


def _sum_of_rows(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], factor: float, together: bool = False
) -> Generator[None, None, Tensor]:
    """fp32 sum over ranks, in their order, of the row that is this rank's, times `factor`.

    Each rank's own row counts as it is, the others' as they were decoded. `together`: all rows are the same tensor.
    """
    me, others = _others(wire)
    mine = rows[me]
    outgoing = [Outgoing(others[::-1], mine)] if together else [Outgoing((p,), rows[p]) for p in others[::-1]]
    messages = wire.start(codec, outgoing, [Incoming(peer, mine.numel()) for peer in others])
    yield
    wire.agree()
    total = _sum_in_order(wire, mine, factor, lambda peer, total: wire.decode_add(peer, *messages.take(peer), total))
    messages.wait_sent()
    return total


def _sum_in_order(wire: Wire, mine: Tensor, factor: float, add_of: Callable[[int, Tensor], object]) -> Tensor:
    """fp32 sum over ranks, in their order, of `mine` and of what `add_of` adds for each other rank, times `factor`."""
    me = wire.group.rank()
    # x + -0.0 is x, for 0.0 and -0.0 too
    total = torch.full((mine.numel(),), -0.0, device=mine.device, dtype=torch.float32)
    for rank in range(wire.group.size() if mine.numel() else 0):
        if rank == me:
            total.add_(mine)
        else:
            add_of(rank, total)
    return total.mul_(factor) if factor != 1 else total


def _reduce_scatter_unread(
    wire: Wire, codec: Lossless, rows: Sequence[Tensor], out: Tensor, factor: float
) -> Iterator[None]:
    """`reduce_scatter_chunk` without reading what has arrived: if something did not fit, all is summed once more."""
    me, others = _others(wire)
    # Summed again it is from the values, over which `out` may have been written.
    mine = rows[me].clone() if rows[me].data_ptr() == out.data_ptr() else rows[me]
    outgoing = [Outgoing((peer,), rows[peer]) for peer in others[::-1]]
    messages = wire.start_unread(codec, outgoing, [Incoming(peer, mine.numel()) for peer in others])
    yield
    taken: dict[int, tuple[Codec, Tensor]] = {}
    statuses: dict[int, Tensor] = {}

    def add_unread(peer: int, total: Tensor) -> None:
        taken[peer] = messages.take(peer)
        statuses[peer] = wire.add_unread(codec, taken[peer][1], total)

    def add_again(peer: int, total: Tensor) -> None:
        wire.decode_add(peer, *taken[peer], total)

    def sum_again(instead: Mapping[int, tuple[Codec, Tensor]]) -> None:
        taken.update(instead)
        if instead:
            out.copy_(_sum_in_order(wire, mine, factor, add_again))

    out.copy_(_sum_in_order(wire, mine, factor, add_unread))
    messages.check(statuses, sum_again)
    messages.wait_sent()


# --- sums around a ring ---
#
# Each rank decodes what comes from the rank before, adds its own, encodes, and passes it on. As many bytes leave each
# rank as in an exchange between every two, but in one stream to one neighbour, which fills a link better than streams
# from all other ranks at once do. The part of rank r is summed in the order r + 1, r + 2, ... r, and rounded to the
# tensor's type at every hop. All ranks get the same bits. Codecs have to be lossless.


def ring_reduce_scatter_chunk(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], out: Tensor, factor: float
) -> Iterator[None]:
    """Row r of every rank is summed on rank r, into `out`, times `factor`."""
    started: list[InFlightMessages] = []
    out.copy_((yield from _sum_around(wire, codec, rows, factor, started)))
    for messages in started:
        messages.wait_sent()


def ring_all_reduce_chunk(wire: Wire, codec: Codec, x: Tensor, factor: float) -> Iterator[None]:
    """Flat `x` [m] is replaced by its sum over ranks, times `factor`."""
    me, world = wire.group.rank(), wire.group.size()
    before = (me - 1) % world
    parts = _parts(x, world)
    started: list[InFlightMessages] = []
    parts[me].copy_((yield from _sum_around(wire, codec, parts, factor, started)))
    # What a rank has summed is encoded once, and passed on as it came.
    values = parts[me]
    message = wire.encode(codec, values) if values.numel() else None
    for hop in range(world - 1):
        coming = parts[(me - hop - 1) % world]
        messages = _pass_on(wire, codec, values, message, coming.numel(), started)
        yield
        values, message = coming, _decode_and_keep(wire, codec, messages, before, coming)
    for messages in started:
        messages.wait_sent()


def _sum_around(
    wire: Wire, codec: Codec, rows: Sequence[Tensor], factor: float, started: list[InFlightMessages]
) -> Generator[None, None, Tensor]:
    """fp32 sum over ranks of the row that is this rank's, times `factor`."""
    me, world = wire.group.rank(), wire.group.size()
    before = (me - 1) % world
    partial = rows[before]
    for hop in range(world - 1):
        mine = rows[(me - hop - 2) % world]
        messages = _pass_on(wire, codec, partial, None, mine.numel(), started)
        yield
        wire.agree()
        total = torch.empty(mine.numel(), dtype=torch.float32, device=mine.device).copy_(mine)
        if mine.numel():
            wire.decode_add(before, *messages.take(before), total)
        partial = total if hop == world - 2 else total.to(mine.dtype)
    return partial.mul_(factor) if factor != 1 else partial


def _pass_on(
    wire: Wire, codec: Codec, values: Tensor, message: Tensor | None, numel: int, started: list[InFlightMessages]
) -> InFlightMessages:
    """Values to the next rank, and `numel` from the one before."""
    me, world = wire.group.rank(), wire.group.size()
    outgoing, incoming = [Outgoing(((me + 1) % world,), values, message)], [Incoming((me - 1) % world, numel)]
    started.append(wire.start(codec, outgoing, incoming))
    return started[-1]


def _decode_and_keep(wire: Wire, codec: Codec, messages: InFlightMessages, peer: int, out: Tensor) -> Tensor | None:
    """Decode a message and return it, to be passed on.

    None if it is to be made again from the values: where there are none, and where the sender fell back to another
    codec.
    """
    if not out.numel():
        return None
    used, message = messages.take(peer)
    wire.decode_into(peer, used, message, out)
    return message if used == codec else None


def _parts(x: Tensor, num: int) -> list[Tensor]:
    """Flat `x` as `num` consecutive parts, equal but for the last ones, which may be empty."""
    step = -(-x.numel() // num)
    return [x[min(i * step, x.numel()) : (i + 1) * step] for i in range(num)]


def _others(wire: Wire) -> tuple[int, list[int]]:
    """This rank's group rank, and the others', the next one first: no rank is sent to by all others at once."""
    me, world = wire.group.rank(), wire.group.size()
    return me, [(me - distance) % world for distance in range(1, world)]
