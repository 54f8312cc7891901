"""One stage of a hierarchical all-to-all between real ranks: plan it from ids, then move rows down and sums up.

[Note: transposes]
Down, a row is copied to every place that needs it. Up, what comes back for it from those places is added, in fp32 (fp64
for fp64), by place, and rounded once to the rows' dtype. Each is the transpose of the other, so each is the other's
backward: gradients of copies are added exactly as partial outputs are. Weights travel beside the rows as they are; they
are permuted and never added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit, native, operations
from laconic.collectives.codec import Codec, Raw
from laconic.errors import CollectiveError
from laconic.moe.legs import Held, Leg, arrive, leave
from laconic.moe.levels import Stage
from laconic.moe.rows import accumulation_dtype, sum_picked

__all__ = ["Crossing", "carry_down", "carry_up", "cross", "down", "exchange_ids", "exchange_sizes", "up"]


@dataclass(frozen=True)
class Crossing:
    """A stage as this rank sees it: what leaves, what comes, and with whom."""

    group: dist.ProcessGroup
    leg: Leg
    row_splits: list[int]
    """Rows that come from each place."""
    entry_splits: list[int]
    """Assignments that come from each place."""


def cross(held: Held, stage: Stage, experts_per_rank: int, group: dist.ProcessGroup) -> tuple[Crossing, Held]:
    """Tell the peers of a stage which experts the rows are for, and hear it from them; the rows stay where they are.

    Arguments:
        group: the stage's peers, by place.

    Returns the stage, and what this rank is going to hold after it. All peers call it together.
    """
    leg = leave(held, stage, experts_per_rank)
    sent = torch.tensor([leg.row_splits, leg.entry_splits], device=leg.ids.device).T.contiguous()
    row_splits, entry_splits = exchange_sizes(sent, group).T.tolist()
    ids = exchange_ids(leg, entry_splits, group)
    return Crossing(group, leg, row_splits, entry_splits), arrive(ids, sum(row_splits))


def exchange_sizes(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row p of int64 [fanout, n] goes to place p; returns what came, row p from place p."""
    received = torch.empty_like(sent)
    _wait_for([native.all_to_all(received, sent, group)], group)
    return received


def exchange_ids(leg: Leg, entry_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    """The leg's ids to its places; returns those that came, entry_splits[p] from place p."""
    ids = leg.ids.new_empty(sum(entry_splits))
    _wait_for([_start(ids, leg.ids, entry_splits, leg.entry_splits, group)], group)
    return ids


def down(rows: Tensor, weights: Tensor, crossing: Crossing, codec: Codec | str) -> tuple[Tensor, Tensor]:
    """Send rows [n, M] to every place that needs them, with the weights [a] of their assignments there.

    Returns rows [m, M] and weights [b] as they come: by place, then in the sender's order. Differentiable, see
    [Note: transposes]; if one peer goes backward through it, all of them do. A codec that is not lossless makes values
    and gradients inexact.
    """
    result: tuple[Tensor, Tensor] = _Carried.apply(rows, weights, crossing, codec, True)
    return result


def up(rows: Tensor, crossing: Crossing, codec: Codec | str) -> Tensor:
    """Send rows [m, M], one for each that came, back to where they came from, and add there: [n, M].

    A row that went nowhere gets zeros. Differentiable as `down` is.
    """
    result: tuple[Tensor, Tensor | None] = _Carried.apply(rows, None, crossing, codec, False)
    return result[0]


def carry_down(
    rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str
) -> tuple[Tensor, Tensor | None]:
    """`down` without autograd; weights may stay at home."""
    leg, works, weights_in = crossing.leg, [], None
    if weights is not None:
        weights_in = weights.new_empty(sum(crossing.entry_splits))
        sent = weights.index_select(0, leg.entries)
        works.append(_start(weights_in, sent, crossing.entry_splits, leg.entry_splits, crossing.group))
    sent = rows.index_select(0, leg.rows)
    rows_in = _moved(sent, crossing.row_splits, leg.row_splits, crossing.group, codec)
    _wait_for(works, crossing.group)
    return rows_in, weights_in


def carry_up(
    rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str
) -> tuple[Tensor, Tensor | None]:
    """`up` without autograd, and weights [b] back to the assignments [a] that they belong to, if there are any."""
    leg, works, weights_out = crossing.leg, [], None
    if weights is not None:
        back = weights.new_empty(len(leg.entries))
        works.append(_start(back, weights, leg.entry_splits, crossing.entry_splits, crossing.group))
    rows_back = _moved(rows, leg.row_splits, crossing.row_splits, crossing.group, codec)
    _wait_for(works, crossing.group)
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
        ctx: Any, rows: Tensor, weights: Tensor | None, crossing: Crossing, codec: Codec | str, is_down: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.crossing, ctx.codec, ctx.is_down, ctx.weighted = crossing, codec, is_down, weights is not None
        return (carry_down if is_down else carry_up)(rows, weights, crossing, codec)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (ctx.crossing, ctx.codec, not ctx.is_down)
        return *_Carried.apply(grads[0], grads[1] if ctx.weighted else None, *back), None, None, None


# --- messages ---


def _moved(
    sent: Tensor, received_splits: list[int], sent_splits: list[int], group: dist.ProcessGroup, codec: Codec | str
) -> Tensor:
    """Rows [n, M] to and from all places; the codec's way, or at once where there is none."""
    sent = sent.contiguous()
    received = sent.new_empty(sum(received_splits), *sent.shape[1:])
    if isinstance(codec, Raw):
        # Sizes are known to both sides, so the messages need no introduction.
        _wait_for([_start(received, sent, received_splits, sent_splits, group)], group)
        away = sum(sent_splits) - sent_splits[group.rank()]
        nbytes = away * sent.shape[1] * sent.itemsize
        audit.record("all_to_all", sent.dtype, nbytes, nbytes, codec.name, "asked for", 0.0)
    else:
        operations.all_to_all(received, sent, received_splits, sent_splits, group, codec=codec)
    return received


def _start(
    received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int], group: dist.ProcessGroup
) -> native.Started:
    sent = sent.contiguous()
    parts = zip(received.split(received_splits), sent.split(sent_splits), strict=True)
    into, out = zip(*((_bytes(a), _bytes(b)) for a, b in parts), strict=True)
    return native.all_to_all_uneven(list(into), list(out), group)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


def _wait_for(works: Sequence[native.Started], group: dist.ProcessGroup) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise CollectiveError(
            f"one of ranks {ranks} ended or stopped while they exchanged rows of experts; see what it says, and start"
            " again from a checkpoint"
        ) from error
