"""One stage of a hierarchical all-to-all between real ranks: plan it from ids, then move rows down and sums up.

[Note: transposes]
Down, a row is copied to every place that needs it. Up, what comes back for it from those places is added, in fp32 (fp64
for fp64), by place, and rounded once to the rows' dtype. Each is the transpose of the other, so each is the other's
backward: gradients of copies are added exactly as partial outputs are. Weights travel beside the rows as they are; they
are permuted and never added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import api, audit
from laconic.collectives.codec import Codec, Raw, bytes_of
from laconic.collectives.runtime import torch_compat
from laconic.moe.dispatch.send_plan import Held, Leg, arrive, leave
from laconic.moe.dispatch.topology import Stage
from laconic.moe.parallel.autograd_collectives import losses_named
from laconic.moe.row_ops import accumulation_dtype, sum_picked

__all__ = [
    "Arriving",
    "Crossing",
    "carry_down",
    "carry_up",
    "cross",
    "down",
    "send_down",
    "up",
]


@dataclass(frozen=True)
class Crossing:
    """A stage as this rank sees it: what leaves, what comes, and with whom."""

    group: dist.ProcessGroup
    leg: Leg
    row_splits: list[int]
    """Rows that come from each place."""
    entry_splits: list[int]
    """Assignments that come from each place."""
    table: list[list[int]] | None = None
    """Rows from each place to each, [from][to], where all places know them: codecs then need no round to tell."""


def cross(held: Held, stage: Stage, experts_per_rank: int, group: dist.ProcessGroup) -> tuple[Crossing, Held]:
    """Tell the peers of a stage which experts the rows are for, and hear it from them; the rows stay where they are.

    Arguments:
        group: the stage's peers, by place.

    Returns the stage, and what this rank is going to hold after it. All peers call it together.
    """
    leg = leave(held, stage, experts_per_rank)
    # Along with the ids goes how many rows this rank sends to each place, so that all know what all send.
    front = bytes_of(torch.tensor(leg.row_splits, device=leg.ids.device))
    parts = leg.ids.split(leg.entry_splits)
    with losses_named(group):
        told = torch_compat.all_to_all_told([torch.cat((front, bytes_of(part))) for part in parts], group)
    table = torch.stack([one[: len(front)] for one in told]).view(torch.int64).tolist()
    ids = [one[len(front) :].view(leg.ids.dtype) for one in told]
    crossing = Crossing(group, leg, [row[group.rank()] for row in table], [len(one) for one in ids], table)
    return crossing, arrive(torch.cat(ids), sum(crossing.row_splits))


def down(
    rows: Tensor, weights: Tensor, crossing: Crossing, codec: Codec | str, started: Arriving | None = None
) -> tuple[Tensor, Tensor]:
    """Send rows [n, M] to every place that needs them, with the weights [a] of their assignments there.

    Returns rows [m, M] and weights [b] as they come: by place, then in the sender's order. Differentiable, see
    [Note: transposes]; if one peer goes backward through it, all of them do. A codec that is not lossless makes values
    and gradients inexact. `started`: what `send_down` returned for the same arguments, if they are on their way.
    """
    result: tuple[Tensor, Tensor] = _Carried.apply(rows, weights, crossing, codec, True, started)
    return result


def up(rows: Tensor, crossing: Crossing, codec: Codec | str) -> Tensor:
    """Send rows [m, M], one for each that came, back to where they came from, and add there: [n, M].

    A row that went nowhere gets zeros. Differentiable as `down` is.
    """
    result: tuple[Tensor, Tensor | None] = _Carried.apply(rows, None, crossing, codec, False, None)
    return result[0]


Arriving = Callable[[], tuple[Tensor, Tensor | None]]
"""Waits for rows and weights."""


@torch.no_grad()
def send_down(rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str) -> Arriving:
    """Start `carry_down`; call what it returns to have the result. Rows that a codec shortens travel only then."""
    leg, group, works, weights_in = crossing.leg, crossing.group, [], None
    if weights is not None:
        weights_in = weights.new_empty(sum(crossing.entry_splits))
        sent = weights.index_select(0, leg.entries)
        works.append(_start(weights_in, sent, crossing.entry_splits, leg.entry_splits, group))
    sent_rows = rows.index_select(0, leg.rows)
    splits = crossing.row_splits, leg.row_splits
    rows_in = rows.new_empty(sum(crossing.row_splits), *rows.shape[1:])
    is_raw = isinstance(codec, Raw)
    if is_raw:
        works.append(_start_rows(rows_in, sent_rows, *splits, group))

    def arrive() -> tuple[Tensor, Tensor | None]:
        if not is_raw:
            api.all_to_all(rows_in, sent_rows, *splits, group, codec=codec, table=crossing.table)
        _wait_for(works, group)
        return rows_in, weights_in

    return arrive


def carry_down(
    rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str
) -> tuple[Tensor, Tensor | None]:
    """`down` without autograd; weights may stay at home."""
    return send_down(rows, weights, crossing, codec)()


@torch.no_grad()
def carry_up(
    rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str
) -> tuple[Tensor, Tensor | None]:
    """`up` without autograd, and weights [b] back to the assignments [a] that they belong to, if there are any."""
    leg, group, works, weights_out = crossing.leg, crossing.group, [], None
    if weights is not None:
        back = weights.new_empty(len(leg.entries))
        works.append(_start(back, weights, leg.entry_splits, crossing.entry_splits, group))
    rows_back = rows.new_empty(sum(leg.row_splits), *rows.shape[1:])
    splits = leg.row_splits, crossing.row_splits
    if isinstance(codec, Raw):
        works.append(_start_rows(rows_back, rows, *splits, group))
    else:
        table = None if crossing.table is None else [list(sizes) for sizes in zip(*crossing.table, strict=True)]
        api.all_to_all(rows_back, rows.contiguous(), *splits, group, codec=codec, table=table)
    _wait_for(works, group)
    if weights is not None:
        weights_out = torch.empty_like(back).scatter_(0, leg.entries, back)
    return _added(rows_back, leg), weights_out


def _added(rows: Tensor, leg: Leg) -> Tensor:
    """Rows [m, M], as they came from the places that they had been sent to, added up at home: [n, M]."""
    if rows.device.type == "cpu":
        home, index = leg.rows.sort(stable=True)  # a row's copies stay in the order of places
        return sum_picked(rows, index, home, leg.num_rows)
    total = rows.new_zeros(leg.num_rows, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    # Place by place: within one no row appears twice, so that the order of sums is fixed on every device.
    for part, index in zip(rows.split(leg.row_splits), leg.rows.split(leg.row_splits), strict=True):
        total.index_add_(0, index, part.to(total.dtype))
    return total.to(rows.dtype)


class _Carried(torch.autograd.Function):
    """One of the two; its backward is the other, see [Note: transposes]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        crossing: Crossing,
        codec: Codec | str,
        is_down: bool,
        started: Arriving | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.crossing, ctx.codec, ctx.is_down, ctx.weighted = crossing, codec, is_down, weights is not None
        if started is not None:
            return started()
        return (carry_down if is_down else carry_up)(rows, weights, crossing, codec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (ctx.crossing, ctx.codec, not ctx.is_down, None)
        return *_Carried.apply(grads[0], grads[1] if ctx.weighted else None, *back), None, None, None, None


# --- messages ---


def _start_rows(
    received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int], group: dist.ProcessGroup
) -> torch_compat.Started:
    """As they are: sizes are known to both sides, so the messages need no introduction."""
    away = sum(sent_splits) - sent_splits[group.rank()]
    nbytes = away * sent.shape[1] * sent.itemsize
    audit.record("all_to_all", sent.dtype, nbytes, nbytes, Raw().name, "asked for", 0.0)
    return _start(received, sent, received_splits, sent_splits, group)


def _start(
    received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int], group: dist.ProcessGroup
) -> torch_compat.Started:
    parts = zip(received.split(received_splits), sent.detach().contiguous().split(sent_splits), strict=True)
    into, out = zip(*((bytes_of(a), bytes_of(b)) for a, b in parts), strict=True)
    return torch_compat.all_to_all_uneven(list(into), list(out), group)


def _wait_for(works: Sequence[torch_compat.Started], group: dist.ProcessGroup) -> None:
    with losses_named(group):
        for work in works:
            work.wait()
