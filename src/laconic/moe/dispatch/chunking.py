"""Which rows of a layer travel together when it is run in pieces. Index lists only; nothing is sent.

[Note: slices and chunks]
The rows of every expert are cut into `num_slices` nearly equal *slices* (the axis that FSMoE calls capacity), by the
rank that has them; ranks know each other's numbers of rows, so they know each other's slices. Experts see one slice at
a time: its rows sorted by expert, within an expert by the rank they come from. A *chunk* is what one message carries:
num_slices / degree slices next to each other. Forward and backward may send chunks of different sizes, because both
are made of the same slices.

Where an expert has fewer rows than there are slices, which slices get one depends on the expert's number, so that many
experts with few rows do not all fill the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Chunk", "Cut", "Sharing", "rows_of_chunks", "slice_sizes"]


def slice_sizes(counts: Tensor, experts: Tensor, num_slices: int) -> Tensor:
    """Rows in each slice, int64 [..., E, num_slices], of counts int64 [..., E] of the experts numbered int64 [E]."""
    steps = torch.arange(num_slices + 1, device=counts.device)
    ends = (counts[..., None] * steps + (experts % num_slices)[:, None]) // num_slices
    return ends.diff(dim=-1)


def rows_of_chunks(sizes: Tensor, degree: int) -> list[Tensor]:
    """For each of `degree` chunks, int64 [a], which rows sorted by expert are in it; sizes int64 [E, num_slices]."""
    num_experts, num_slices = sizes.shape
    by_chunk = sizes.view(num_experts, degree, -1).sum((0, 2)).tolist()
    chunk_of_row = torch.arange(degree, device=sizes.device).repeat_interleave(num_slices // degree).repeat(num_experts)
    chunk_of_row = chunk_of_row.repeat_interleave(sizes.flatten(), output_size=sum(by_chunk))
    return list(torch.argsort(chunk_of_row, stable=True).split(by_chunk))


@dataclass(frozen=True, eq=False)
class Chunk:
    """What one message carries to the experts, and the message back."""

    home: Tensor
    """int64 [a]: which of this rank's rows sorted by expert go, ascending."""
    sent: list[int]
    """How many of them go to each place where experts are."""
    received: list[int]
    """Rows that come from each rank."""
    index: Tensor
    """int64 [q]: row j in the order of (slice, expert, source) arrives as row index[j]."""
    inverse: Tensor
    """int64 [q]: the inverse of `index`."""
    sizes: list[int]
    """Rows of each slice."""
    table: list[list[int]] | None
    """Rows from each rank to each place, if that is known."""


@dataclass(frozen=True, eq=False)
class Cut:
    """All rows of a layer, as every rank of the exchange knows them.

    home: int64 [E, num_slices], this rank's rows. arriving: int64 [W, E_local, num_slices], those that come here.
    table: int64 [W, places, num_slices], those of every rank to every place; None if nobody has said so.
    """

    home: Tensor
    arriving: Tensor
    table: Tensor | None = None

    @staticmethod
    def of(counts: Tensor, arriving: Tensor, place: int, num_slices: int) -> Cut:
        """counts int64 [E]: this rank's rows by expert. arriving int64 [W, E_local]: those for `place`, by source."""
        num_local = arriving.shape[1]
        experts = torch.arange(len(counts), device=counts.device)
        here = experts[place * num_local : (place + 1) * num_local]
        return Cut(slice_sizes(counts, experts, num_slices), slice_sizes(arriving, here, num_slices))

    @property
    def num_slices(self) -> int:
        """In all."""
        return self.home.shape[1]

    def counts(self) -> Tensor:
        """int64 [num_slices, E_local]: arriving rows."""
        return self.arriving.sum(0).T.contiguous()

    def chunks(self, degree: int) -> list[Chunk]:
        """The chunks of `degree`, a divisor of num_slices."""
        home, arriving = self.home, self.arriving
        num_local, device = arriving.shape[1], home.device
        per_chunk = self.num_slices // degree
        # Some looks at the device for everything that the host has to know.
        home_table = home.view(-1, num_local, degree, per_chunk).sum((1, 3)).T.tolist()
        parts = arriving.view(len(arriving), num_local, degree, per_chunk)
        received_table, sizes_table = parts.sum((1, 3)).T.tolist(), parts.sum((0, 1)).tolist()
        homes = rows_of_chunks(home, degree)
        tables: list[list[list[int]] | None] = [None] * degree
        if self.table is not None:
            tables = self.table.unflatten(2, (degree, per_chunk)).sum(3).permute(2, 0, 1).tolist()
        found = []
        for i in range(degree):
            mine = arriving[:, :, i * per_chunk : (i + 1) * per_chunk]
            ids = torch.arange(per_chunk, device=device) * num_local + torch.arange(num_local, device=device)[:, None]
            ids = ids.expand(mine.shape).flatten()
            ids = ids.repeat_interleave(mine.flatten(), output_size=sum(received_table[i]))
            index = torch.argsort(ids, stable=True)
            inverse = torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=device))
            found.append(Chunk(homes[i], home_table[i], received_table[i], index, inverse, sizes_table[i], tables[i]))
        return found


@dataclass(frozen=True, eq=False)
class Sharing:
    """What the ranks that share experts bring together for one chunk, each padded to the most that one has."""

    most: int
    index: Tensor
    """int64 [q]: row j in the order of (slice, expert, sharer) is row index[j] of the padded ones."""
    sizes: list[int]
    """As in `Chunk`, of all sharers together."""

    @staticmethod
    def of(table: Tensor, degree: int) -> list[Sharing]:
        """For each of `degree` chunks; table int64 [N_ESP, num_slices, E_local], rows of every sharer."""
        num_sharers, num_slices, _ = table.shape
        per_chunk = num_slices // degree
        rows_table = table.view(num_sharers, degree, -1).sum(2).T.tolist()
        sizes_table = table.sum((0, 2)).view(degree, per_chunk).tolist()
        found = []
        for i, rows in enumerate(rows_table):
            mine = table[:, i * per_chunk : (i + 1) * per_chunk].reshape(num_sharers, -1)
            ids = torch.arange(mine.shape[1], device=table.device).repeat(num_sharers)
            ids = ids.repeat_interleave(mine.flatten(), output_size=sum(rows))
            most = max(1, *rows)
            places = [torch.arange(size, device=table.device) + number * most for number, size in enumerate(rows)]
            index = torch.cat(places)[torch.argsort(ids, stable=True)]
            found.append(Sharing(most, index, sizes_table[i]))
        return found
