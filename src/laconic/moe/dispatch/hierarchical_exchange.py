"""One stage of a hierarchical all-to-all between ranks: rows down to their experts, sums up.

[Note: transposes]
Down, a row is copied to every place that needs it. Up, the values that come back for it from those places are added, in
fp32 (fp64 for fp64), by place, and rounded once to the rows' dtype. Each is the transpose of the other, so each is the
other's backward: gradients of copies are added exactly as partial outputs are. Weights are sent beside the rows,
uncoded; they are permuted and never added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import api, audit
from laconic.collectives.codec import Codec, Raw, bytes_of
from laconic.collectives.runtime import torch_compat
from laconic.moe.dispatch.base import Buffers
from laconic.moe.dispatch.send_plan import SendPlan
from laconic.moe.parallel.autograd_collectives import losses_named
from laconic.moe.row_ops import accumulation_dtype, sum_picked


@dataclass(frozen=True)
class StageExchange:
    """One stage from this rank's view: rows sent, rows received, and the group of its peers."""

    group: dist.ProcessGroup
    plan: SendPlan
    row_splits: list[int]
    """Rows received from each place."""
    entry_splits: list[int]
    """Assignments received from each place."""
    table: list[list[int]]
    """Rows from each place to each, [from][to]; codecs then need no round to announce lengths."""


Arriving = Callable[[], Buffers]
"""Waits for the buffers: rows, and weights if there are any."""


@torch.no_grad()
def start_down(buffers: Buffers, exchange: StageExchange, codec: Codec | str) -> Arriving:
    """Start to send rows [n, M] to every place that needs them, with the weights [a] of their assignments if given.

    With a codec other than Raw, rows are sent only when the returned function is called. A lossy codec makes values
    inexact. The function waits and returns rows [m, M] and weights [b] by place, then in the sender's order.
    """
    rows, *weights = buffers
    plan, group, works = exchange.plan, exchange.group, list[torch_compat.Started]()
    for of_entries in weights:
        incoming = of_entries.new_empty(sum(exchange.entry_splits))
        sent = of_entries.index_select(0, plan.entries)
        works.append(_start(incoming, sent, exchange.entry_splits, plan.entry_splits, group))
        weights = [incoming]
    sent_rows = rows.index_select(0, plan.rows)
    splits = exchange.row_splits, plan.row_splits
    rows_in = rows.new_empty(sum(exchange.row_splits), *rows.shape[1:])
    is_raw = isinstance(codec, Raw)
    if is_raw:
        works.append(_start_rows(rows_in, sent_rows, *splits, group))

    def arrive() -> Buffers:
        if not is_raw:
            api.all_to_all(rows_in, sent_rows, *splits, group, codec=codec, table=exchange.table)
        _wait_for(works, group)
        return (rows_in, *weights)

    return arrive


@torch.no_grad()
def carry_up(buffers: Buffers, exchange: StageExchange, codec: Codec | str) -> Buffers:
    """Send rows [m, M], one for each that came down, back to their senders, and add there: [n, M].

    A row that went nowhere gets zeros. Weights [b], if given, go back to their assignments [a].
    """
    rows, *weights = buffers
    plan, group, works = exchange.plan, exchange.group, list[torch_compat.Started]()
    for of_entries in weights:
        back = of_entries.new_empty(len(plan.entries))
        works.append(_start(back, of_entries, plan.entry_splits, exchange.entry_splits, group))
        weights = [back]
    rows_back = rows.new_empty(sum(plan.row_splits), *rows.shape[1:])
    splits = plan.row_splits, exchange.row_splits
    if isinstance(codec, Raw):
        works.append(_start_rows(rows_back, rows, *splits, group))
    else:
        table = [list(sizes) for sizes in zip(*exchange.table, strict=True)]
        api.all_to_all(rows_back, rows.contiguous(), *splits, group, codec=codec, table=table)
    _wait_for(works, group)
    return (_added(rows_back, plan), *[torch.empty_like(back).scatter_(0, plan.entries, back) for back in weights])


def _added(rows: Tensor, plan: SendPlan) -> Tensor:
    """Add up rows [m, M], returned by the places that their copies were sent to: [n, M]."""
    if rows.device.type == "cpu":
        home, index = plan.rows.sort(stable=True)  # a row's copies stay in the order of places
        return sum_picked(rows, index, home, plan.num_rows)
    total = rows.new_zeros(plan.num_rows, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
    # Place by place: within one no row appears twice, so that the order of sums is fixed on every device.
    for part, index in zip(rows.split(plan.row_splits), plan.rows.split(plan.row_splits), strict=True):
        total.index_add_(0, index, part.to(total.dtype))
    return total.to(rows.dtype)


# --- messages ---


def _start_rows(
    received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int], group: dist.ProcessGroup
) -> torch_compat.Started:
    """Start to send rows uncoded; both sides know the sizes, so no lengths are announced."""
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
