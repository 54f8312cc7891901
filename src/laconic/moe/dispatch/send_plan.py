"""The send plan of one stage of a hierarchical all-to-all, without duplicates. Index lists only; nothing is sent.

A rank holds rows and, for each, the experts it is meant for. A row goes once to each group that has one of its experts
(the OR of the routing mask over the group's experts; HierMoE, arXiv 2508.09591, section 3), and the list of its experts
there goes with it, so that the next stage can split again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.topology import ExchangeStage


@dataclass(frozen=True)
class HeldRows:
    """`num_rows` rows held by a rank and the experts they are meant for."""

    num_rows: int
    rows: Tensor
    """int64 [a]: assignment i is that of row rows[i] ..."""
    experts: Tensor
    """int64 [a]: ... to the expert in slot experts[i]."""


@dataclass(frozen=True)
class SendPlan:
    """Rows that a rank sends in one stage; destinations are places among the stage's peers, its own place included."""

    num_rows: int
    """Rows held before the stage."""
    rows: Tensor
    """int64 [m]: the rows to send, by destination and then by row."""
    row_splits: list[int]
    """Rows to each destination."""
    entries: Tensor
    """int64 [a]: the held assignments, by destination, then row, then as they were."""
    entry_splits: list[int]
    """Assignments to each destination."""
    ids: Tensor
    """int32 [a], in the order of `entries`: twice the expert's slot, plus 1 where the next row begins."""


def plan_send(held: HeldRows, stage: ExchangeStage, experts_per_rank: int) -> SendPlan:
    """Plan what a rank sends in a stage, with slot s on rank s // experts_per_rank."""
    num_rows = max(1, held.num_rows)
    place = held.experts // experts_per_rank // stage.stride % stage.fanout
    key, entries = (place * num_rows + held.rows).sort(stable=True)
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    sent = key[first]
    # One transfer from the device for both.
    splits = torch.stack([torch.bincount(x, minlength=stage.fanout) for x in (sent // num_rows, place)]).tolist()
    ids = (2 * held.experts[entries] + first).int()
    return SendPlan(held.num_rows, sent % num_rows, splits[0], entries, splits[1], ids)


def plan_recv(ids: Tensor, num_rows: int) -> HeldRows:
    """Return what a rank holds after a stage, of `SendPlan.ids` of all its peers, by place.

    Ids of another number of rows than `num_rows` are a FormatError.
    """
    first = ids % 2
    found = int(first.sum())
    if found != num_rows:
        raise FormatError(f"{num_rows} rows came with the experts of {found}; the message was damaged or is another's")
    return HeldRows(num_rows, first.long().cumsum(0) - 1, (ids // 2).long())
