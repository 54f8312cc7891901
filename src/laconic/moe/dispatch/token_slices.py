"""Partitions tokens into slices that pass the stages of a hierarchical all-to-all, in any number of chunks.

[Note: slices of tokens]
De-duplication works on tokens: assignments of one token must be sent together. So tokens are cut, not the rows of each
expert: slice s has this rank's tokens n * s // S up to n * (s + 1) // S, with all their assignments. A chunk is some
adjacent slices; a whole layer is one slice in one chunk. The rows of all chunks together are those of the whole layer,
stage by stage.

Ranks announce once what the whole layer sends, for each stage in one message: numbers of rows and assignments by
slice, and the experts. From these follow the exchanges of every chunk of every degree. On an intermediate rank, rows
are numbered by slice, within a slice as they came; the rows of one message are by place first, so a chunk of several
slices translates one into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import bytes_of
from laconic.collectives.runtime import torch_compat
from laconic.moe.dispatch.hierarchical_exchange import StageExchange
from laconic.moe.dispatch.send_plan import HeldRows, SendPlan, plan_recv, plan_send
from laconic.moe.parallel.autograd_collectives import losses_named
from laconic.moe.routing import Routing
from laconic.topology import ExchangeStage

Table = list[list[int]]
"""Numbers by slice and by place, [S][fanout]."""


@dataclass(frozen=True, eq=False)
class SlicedTokens:
    """Rows that a rank holds, slice after slice."""

    held: HeldRows
    num_rows: list[int]
    """Rows of each slice."""
    num_entries: list[int]
    """Assignments of each slice."""

    @staticmethod
    def of(routing: Routing, num_slices: int) -> SlicedTokens:
        """Cut this rank's tokens into slices of equal numbers as far as possible."""
        held = HeldRows(routing.num_tokens, routing.tokens, routing.experts)
        if num_slices == 1:
            return SlicedTokens(held, [routing.num_tokens], [len(routing)])
        ends = [routing.num_tokens * i // num_slices for i in range(num_slices + 1)]
        cuts = torch.searchsorted(routing.tokens, torch.tensor(ends, device=routing.tokens.device)).tolist()
        num_rows, num_entries = ([end - start for start, end in pairwise(one)] for one in (ends, cuts))
        return SlicedTokens(held, num_rows, num_entries)


@dataclass(frozen=True, eq=False)
class SlicedStage:
    """One stage of a whole layer, with its rows and assignments by slice."""

    group: dist.ProcessGroup
    before: SlicedTokens
    earlier: SlicedStage | None
    """The stage whose message the rows come from; None for the first."""
    plan: SendPlan
    sent_rows: Table
    sent_entries: Table
    received_rows: Table
    received_entries: Table
    table: list[list[list[int]]]
    """Rows by slice, from each place to each: [slice][from][to]."""

    @staticmethod
    def agree(
        before: SlicedTokens,
        earlier: SlicedStage | None,
        stage: ExchangeStage,
        experts_per_rank: int,
        group: dist.ProcessGroup,
    ) -> tuple[SlicedStage, SlicedTokens]:
        """Agree on a stage for the rows held `before`, behind an `earlier` one; all peers of the group call it.

        Slot s lives on rank s // experts_per_rank. Returns the stage, and what this rank holds after it.
        """
        plan, num_slices = plan_send(before.held, stage, experts_per_rank), len(before.num_rows)
        rows, entries = _by_slice(plan, before)
        # One message: assignments by slice and the rows for all places in front, then the ids.
        fronts = torch.cat((entries, rows.flatten().expand(stage.fanout, -1)), 1)
        parts = zip(fronts, plan.ids.split(plan.entry_splits), strict=True)
        with losses_named(group):
            messages = [torch.cat((bytes_of(front), bytes_of(ids))) for front, ids in parts]
            received = torch_compat.all_to_all_messages(messages, group)
        num_front = fronts.shape[1] * fronts.itemsize
        fronts_received = torch.stack([one[:num_front] for one in received]).view(torch.int64)
        table = fronts_received[:, num_slices:].unflatten(1, (stage.fanout, -1)).permute(2, 0, 1).tolist()
        found = SlicedStage(
            group,
            before,
            earlier,
            plan,
            sent_rows=rows.T.tolist(),
            sent_entries=entries.T.tolist(),
            received_rows=[[row[group.rank()] for row in of_slice] for of_slice in table],
            received_entries=fronts_received[:, :num_slices].T.tolist(),
            table=table,
        )
        ids = torch.cat([one[num_front:].view(plan.ids.dtype) for one in received])
        return found, found._after(ids)

    def _after(self, ids: Tensor) -> SlicedTokens:
        num_rows, num_entries = ([sum(row) for row in table] for table in (self.received_rows, self.received_entries))
        held = plan_recv(ids, sum(num_rows))
        if len(num_rows) > 1:
            rows = _by_place_to_by_slice(self.received_rows, ids.device)
            entries = _by_place_to_by_slice(self.received_entries, ids.device)
            number = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
            held = HeldRows(held.num_rows, number[held.rows[entries]], held.experts[entries])
        return SlicedTokens(held, num_rows, num_entries)

    def exchange(self, first: int, last: int) -> StageExchange:
        """Return the exchange of the slices first ... last - 1."""
        slices = slice(first, last)
        return StageExchange(
            self.group,
            self._plan_of(slices),
            row_splits=_sums(self.received_rows[slices]),
            entry_splits=_sums(self.received_entries[slices]),
            table=[_sums(of_sender) for of_sender in zip(*self.table[slices], strict=True)],
        )

    def _plan_of(self, slices: slice) -> SendPlan:
        if len(self.sent_rows) == 1:
            return self.plan
        rows = _part(self.plan.rows, self.sent_rows, slices) - sum(self.before.num_rows[: slices.start])
        entries = _part(self.plan.entries, self.sent_entries, slices) - sum(self.before.num_entries[: slices.start])
        if self.earlier is not None:
            rows = _by_place_to_by_slice(self.earlier.received_rows[slices], rows.device)[rows]
            entries = _by_place_to_by_slice(self.earlier.received_entries[slices], rows.device)[entries]
        return replace(
            self.plan,
            num_rows=sum(self.before.num_rows[slices]),
            rows=rows,
            row_splits=_sums(self.sent_rows[slices]),
            entries=entries,
            entry_splits=_sums(self.sent_entries[slices]),
            ids=_part(self.plan.ids, self.sent_entries, slices),
        )


# --- tables by slice and place ---


def _by_slice(plan: SendPlan, before: SlicedTokens) -> Tensor:
    """Count rows and assignments of a plan by place and slice: int64 [2, fanout, S]."""
    device, num_slices = plan.rows.device, len(before.num_rows)
    if num_slices == 1:
        return torch.tensor([plan.row_splits, plan.entry_splits], device=device)[..., None]
    found = []
    for index, splits, sizes in (
        (plan.rows, plan.row_splits, before.num_rows),
        (plan.entries, plan.entry_splits, before.num_entries),
    ):
        slice_of = torch.arange(num_slices, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        place = torch.arange(len(splits), device=device).repeat_interleave(torch.tensor(splits, device=device))
        key = place * num_slices + slice_of[index]
        found.append(torch.bincount(key, minlength=len(splits) * num_slices).view(len(splits), num_slices))
    return torch.stack(found)


def _by_place_to_by_slice(table: Table, device: torch.device) -> Tensor:
    """Return int64 [q]: number j by slice, then place, came as number index[j] by place, then slice."""
    index = torch.arange(sum(map(sum, table)), device=device)
    return torch.cat(slices_of(index, table)) if len(table) > 1 else index


def slices_of(x: Tensor, table: Table) -> list[Tensor]:
    """Split x [q, ...], ordered by place, then slice: the parts of each slice, by place."""
    if len(table) == 1:
        return [x]
    parts = x.split([size for of_place in zip(*table, strict=True) for size in of_place])
    return [torch.cat(parts[s :: len(table)]) for s in range(len(table))]


def joined_by_place(slices: Sequence[Tensor], table: Table) -> Tensor:
    """Join slices into one tensor ordered by place, then slice; the inverse of `slices_of`."""
    if len(table) == 1:
        return slices[0]
    parts = [x.split(sizes) for x, sizes in zip(slices, table, strict=True)]
    return torch.cat([of_slice[place] for place in range(len(table[0])) for of_slice in parts])


def _part(x: Tensor, table: Table, slices: slice) -> Tensor:
    """Select the rows of some slices of x [q, ...], ordered by place, then slice."""
    if (slices.start, slices.stop) == (0, len(table)):
        return x
    parts = x.split([size for of_place in zip(*table, strict=True) for size in of_place])
    return torch.cat(
        [parts[place * len(table) + s] for place in range(len(table[0])) for s in range(len(table))[slices]]
    )


def _sums(table: Sequence[Sequence[int]]) -> list[int]:
    """Sum a table over slices, by place."""
    return [sum(of_place) for of_place in zip(*table, strict=True)]
