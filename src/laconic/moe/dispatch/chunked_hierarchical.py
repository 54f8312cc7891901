"""A hierarchical all-to-all in pieces, each row still crossing each level once per group that needs it.

[Note: slices of tokens]
De-duplication is about tokens: assignments of one token must travel together. So tokens are cut, not the rows of each
expert: slice s has this rank's tokens n * s // S up to n * (s + 1) // S, with all their assignments. A chunk is some
slices next to each other. The rows of all chunks together are those of the whole layer, stage by stage.

Ranks tell each other once what the whole layer sends, for each stage in one message: numbers of rows and assignments by
slice, and the experts. From these follow the crossings of every chunk of every degree. On a rank
that is on the way, rows are numbered by slice, within a slice as they came; what comes in one message is by place
first, so a chunk of several slices translates one into the other.

The first stage goes over the wire between nodes, the later ones stay inside: they take the places of an exchange and a
gather in the plan, so that both wires and the experts work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec, bytes_of
from laconic.collectives.runtime import torch_compat
from laconic.moe.dispatch.chunked import Parcel, Wires
from laconic.moe.dispatch.flat import num_local_experts
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.hierarchical_exchange import Crossing, carry_down, carry_up
from laconic.moe.dispatch.send_plan import Held, Leg, arrive, leave
from laconic.moe.dispatch.topology import Stage
from laconic.moe.dispatch.traffic import traffic_of
from laconic.moe.parallel.autograd_collectives import losses_named
from laconic.moe.permute import Order
from laconic.moe.routing import Routing

__all__ = ["LevelExchanged", "LevelWires"]

Table = list[list[int]]
"""Numbers by slice and by place, [S][fanout]."""

_Coded = tuple[Crossing, Codec | str]


@dataclass(frozen=True, eq=False)
class _Sliced:
    """What a rank holds, in slices one after the other."""

    held: Held
    num_rows: list[int]
    """Of each slice."""
    num_entries: list[int]
    """Assignments of each slice."""


@dataclass(frozen=True, eq=False)
class _StageCut:
    """One stage of a whole layer, and how much of it belongs to which slice."""

    group: dist.ProcessGroup
    before: _Sliced
    leg: Leg
    sent_rows: Table
    sent_entries: Table
    received_rows: Table
    received_entries: Table
    table: list[list[list[int]]]
    """Rows by slice, from each place to each: [slice][from][to]."""

    @staticmethod
    def agree(
        before: _Sliced, stage: Stage, experts_per_rank: int, group: dist.ProcessGroup
    ) -> tuple[_StageCut, Tensor]:
        """All peers of the stage call it together. Returns the experts' ids as they came, too."""
        leg, num_slices = leave(before.held, stage, experts_per_rank), len(before.num_rows)
        rows, entries = _by_slice(leg, before)
        # In one message: the ids, and in front how many assignments they are by slice, and rows for everybody.
        fronts = torch.cat((entries, rows.flatten().expand(stage.fanout, -1)), 1)
        parts = zip(fronts, leg.ids.split(leg.entry_splits), strict=True)
        with losses_named(group):
            messages = [torch.cat((bytes_of(front), bytes_of(ids))) for front, ids in parts]
            told = torch_compat.all_to_all_told(messages, group)
        num_front = fronts.shape[1] * fronts.itemsize
        heard = torch.stack([one[:num_front] for one in told]).view(torch.int64)
        ids = torch.cat([one[num_front:].view(leg.ids.dtype) for one in told])
        table = heard[:, num_slices:].unflatten(1, (stage.fanout, -1)).permute(2, 0, 1)
        cut = _StageCut(
            group,
            before,
            leg,
            sent_rows=rows.T.tolist(),
            sent_entries=entries.T.tolist(),
            received_rows=table[:, :, group.rank()].tolist(),
            received_entries=heard[:, :num_slices].T.tolist(),
            table=table.tolist(),
        )
        return cut, ids

    def after(self, ids: Tensor) -> _Sliced:
        """What this rank holds next, of the experts' `ids` as they came."""
        num_rows, num_entries = ([sum(row) for row in table] for table in (self.received_rows, self.received_entries))
        held = arrive(ids, sum(num_rows))
        if len(num_rows) > 1:
            rows = _by_place_to_by_slice(self.received_rows, ids.device)
            entries = _by_place_to_by_slice(self.received_entries, ids.device)
            number = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
            held = Held(held.num_rows, number[held.rows[entries]], held.experts[entries])
        return _Sliced(held, num_rows, num_entries)

    def crossing(self, first: int, last: int, before: _StageCut | None) -> Crossing:
        """Of the slices first ... last - 1; `before`: the stage before, whose message the rows come from."""
        slices = slice(first, last)
        rows = _part(self.leg.rows, self.sent_rows, slices) - sum(self.before.num_rows[:first])
        entries = _part(self.leg.entries, self.sent_entries, slices) - sum(self.before.num_entries[:first])
        if before is not None and last - first > 1:
            rows = _by_place_to_by_slice(before.received_rows[slices], rows.device)[rows]
            entries = _by_place_to_by_slice(before.received_entries[slices], rows.device)[entries]
        leg = replace(
            self.leg,
            num_rows=sum(self.before.num_rows[slices]),
            rows=rows,
            row_splits=_sums(self.sent_rows[slices]),
            entries=entries,
            entry_splits=_sums(self.sent_entries[slices]),
            ids=_part(self.leg.ids, self.sent_entries, slices),
        )
        received = _sums(self.received_rows[slices]), _sums(self.received_entries[slices])
        table = [_sums(of_sender) for of_sender in zip(*self.table[slices], strict=True)]
        return Crossing(self.group, leg, *received, table)


class LevelExchanged:
    """Tokens by slice through all stages of a `HierarchicalDispatcher`."""

    def __init__(
        self, dispatcher: HierarchicalDispatcher, x: Tensor, routing: Routing, order: Order, num_slices: int
    ) -> None:
        """See `FlatExchanged`. Sets the dispatcher's `traffic`."""
        self._experts_per_rank = num_local_experts(routing.num_experts, dispatcher.levels.num_ranks)
        self._codecs, self._order = dispatcher.codecs, order
        self._inputs = (x, routing.weights)
        ends = [routing.num_tokens * i // num_slices for i in range(num_slices + 1)]
        cuts = torch.searchsorted(routing.tokens, torch.tensor(ends, device=routing.tokens.device)).tolist()
        held = Held(routing.num_tokens, routing.tokens, routing.experts)
        sliced = _Sliced(held, _differences(ends), _differences(cuts))
        self._stages: list[_StageCut] = []
        for stage, group in dispatcher.stages():
            cut, ids = _StageCut.agree(sliced, stage, self._experts_per_rank, group)
            sliced = cut.after(ids)
            self._stages.append(cut)
        whole = self._crossings(0, num_slices)
        dispatcher.traffic = tuple(traffic_of(crossing, x, routing.weights) for crossing in whole)
        self._num_slices = num_slices
        self._local = self._local_routings(sliced, self._experts_per_rank * dispatcher.group.rank())

    @property
    def inputs(self) -> Parcel:
        return self._inputs

    def wires(self, degree: int, *, backward: bool) -> Wires:
        per_chunk = self._num_slices // degree
        chunks = [self._crossings(i * per_chunk, (i + 1) * per_chunk) for i in range(degree)]
        last = self._stages[-1]
        arriving = [
            (last.received_rows[i : i + per_chunk], last.received_entries[i : i + per_chunk])
            for i in range(0, self._num_slices, per_chunk)
        ]
        first = self._stages[0].before
        sizes = [
            (sum(first.num_rows[i : i + per_chunk]), sum(first.num_entries[i : i + per_chunk]))
            for i in range(0, self._num_slices, per_chunk)
        ]
        return LevelWires(chunks, arriving, sizes, self._codecs)

    def enter(self, number: int, parcel: Parcel) -> tuple[Tensor, Tensor]:
        return self._order.permute(parcel[0], self._local[number])

    def leave(self, number: int, rows: Tensor, parcel: Parcel) -> Tensor:
        result: Tensor = self._order.combine(rows, replace(self._local[number], weights=parcel[1]))
        return result

    def finish(self, out: Tensor) -> Tensor:
        return out

    def _crossings(self, first: int, last: int) -> list[Crossing]:
        before = [None, *self._stages]
        return [stage.crossing(first, last, earlier) for stage, earlier in zip(self._stages, before, strict=False)]

    def _local_routings(self, sliced: _Sliced, first_expert: int) -> list[Routing]:
        rows, experts = sliced.held.rows.split(sliced.num_entries), sliced.held.experts.split(sliced.num_entries)
        starts = [0, *accumulate(sliced.num_rows)]
        no_weights = self._inputs[1].new_empty(len(sliced.held.rows)).split(sliced.num_entries)
        return [
            Routing(rows[s] - starts[s], experts[s] - first_expert, no_weights[s], number, self._experts_per_rank)
            for s, number in enumerate(sliced.num_rows)
        ]


class LevelWires:
    """Rows with their weights (forward) or gradients of sums (backward) out, sums or gradients of both home."""

    shares = False

    def __init__(
        self,
        chunks: Sequence[list[Crossing]],
        arriving: Sequence[tuple[Table, Table]],
        sizes: Sequence[tuple[int, int]],
        codecs: Sequence[Codec | str],
    ) -> None:
        """Of each chunk: crossings by stage; rows and assignments that come in the last one; both numbers at home."""
        self._arriving, self._sizes = arriving, sizes
        self._chunks = [list(zip(crossings, codecs, strict=True)) for crossings in chunks]
        self._landed: list[Parcel] = [()] * len(chunks)

    @property
    def has_shards(self) -> bool:
        return len(self._chunks[0]) > 1

    def send(self, i: int, home: Parcel) -> Parcel:
        starts = [sum(size) for size in zip(*self._sizes[:i], strict=True)] or [0, 0]
        parts = zip(home, starts, self._sizes[i], strict=False)
        return self._down(tuple(x.narrow(0, start, size) for x, start, size in parts), self._chunks[i][:1])

    def gather(self, i: int, parcel: Parcel) -> Parcel:
        return self._down(parcel, self._chunks[i][1:])

    def arrange(self, i: int, parcel: Parcel) -> list[Parcel]:
        found = [_slices(x, table) for x, table in zip(parcel, self._arriving[i], strict=False)]
        return list(zip(*found, strict=True))

    def collect(self, i: int, slices: list[Parcel]) -> Parcel:
        parts = zip(zip(*slices, strict=True), self._arriving[i], strict=False)
        return tuple(_joined(of_slices, table) for of_slices, table in parts)

    def scatter(self, i: int, parcel: Parcel) -> Parcel:
        return self._up(parcel, self._chunks[i][1:])

    def send_back(self, i: int, parcel: Parcel) -> Parcel:
        return self._up(parcel, self._chunks[i][:1])

    def share(self, i: int, parcel: Parcel) -> Parcel:
        return parcel

    def land(self, i: int, parcel: Parcel) -> None:
        self._landed[i] = parcel

    @property
    def home(self) -> Parcel:
        return self._landed[0] if len(self._landed) == 1 else tuple(map(torch.cat, zip(*self._landed, strict=True)))

    def _down(self, parcel: Parcel, crossings: Sequence[_Coded]) -> Parcel:
        for crossing, codec in crossings:
            rows, weights = carry_down(parcel[0], parcel[1] if len(parcel) > 1 else None, crossing, codec)
            parcel = (rows,) if weights is None else (rows, weights)
        return parcel

    def _up(self, parcel: Parcel, crossings: Sequence[_Coded]) -> Parcel:
        for crossing, codec in reversed(crossings):
            rows, weights = carry_up(parcel[0], parcel[1] if len(parcel) > 1 else None, crossing, codec)
            parcel = (rows,) if weights is None else (rows, weights)
        return parcel


# --- tables by slice and place ---


def _by_slice(leg: Leg, before: _Sliced) -> Tensor:
    """int64 [2, fanout, S]: rows and assignments of a leg by place and slice."""
    device, num_slices = leg.rows.device, len(before.num_rows)
    found = []
    for index, splits, sizes in (
        (leg.rows, leg.row_splits, before.num_rows),
        (leg.entries, leg.entry_splits, before.num_entries),
    ):
        slice_of = torch.arange(num_slices, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        place = torch.arange(len(splits), device=device).repeat_interleave(torch.tensor(splits, device=device))
        key = place * num_slices + slice_of[index]
        found.append(torch.bincount(key, minlength=len(splits) * num_slices).view(len(splits), num_slices))
    return torch.stack(found)


def _by_place_to_by_slice(table: Table, device: torch.device) -> Tensor:
    """int64 [q]: what is number j by slice, then place, came as number index[j] by place, then slice."""
    index = torch.arange(sum(map(sum, table)), device=device)
    return torch.cat(_slices(index, table)) if len(table) > 1 else index


def _slices(x: Tensor, table: Table) -> list[Tensor]:
    """x [q, ...] by place, then slice: the parts of each slice, by place."""
    if len(table) == 1:
        return [x]
    parts = x.split([size for of_place in zip(*table, strict=True) for size in of_place])
    return [torch.cat(parts[s :: len(table)]) for s in range(len(table))]


def _joined(slices: Sequence[Tensor], table: Table) -> Tensor:
    """The inverse of `_slices`."""
    if len(table) == 1:
        return slices[0]
    parts = [x.split(sizes) for x, sizes in zip(slices, table, strict=True)]
    return torch.cat([of_slice[place] for place in range(len(table[0])) for of_slice in parts])


def _part(x: Tensor, table: Table, slices: slice) -> Tensor:
    """Of x [q, ...] by place, then slice, what belongs to some slices."""
    if (slices.start, slices.stop) == (0, len(table)):
        return x
    parts = x.split([size for of_place in zip(*table, strict=True) for size in of_place])
    return torch.cat(
        [parts[place * len(table) + s] for place in range(len(table[0])) for s in range(len(table))[slices]]
    )


def _sums(table: Sequence[Sequence[int]]) -> list[int]:
    """By place."""
    return [sum(of_place) for of_place in zip(*table, strict=True)]


def _differences(ends: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(ends)]
