"""Partitions each expert's rows into slices, and slices into chunks. Index lists only; nothing is sent.

[Note: slices and chunks]
The rank that has the rows of an expert cuts them into `num_slices` nearly equal *slices* (the axis that FSMoE calls
capacity); ranks know each other's numbers of rows, so they know each other's slices. Experts see one slice at a time:
its rows sorted by expert, within an expert by the rank they come from. A *chunk* is the content of one message:
num_slices / degree adjacent slices. Forward and backward may send chunks of different sizes, because both are made of
the same slices. A layer that is not cut is one slice and one chunk.

Where an expert has fewer rows than there are slices, the expert's number decides which slices get one, so that many
experts with few rows do not all fill the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def slice_sizes(counts: Tensor, experts: Tensor, num_slices: int) -> Tensor:
    """Count the rows in each slice, int64 [..., E, num_slices], of counts [..., E] by expert number, int64 [E]."""
    if num_slices == 1:
        return counts[..., None]
    steps = torch.arange(num_slices + 1, device=counts.device)
    ends = (counts[..., None] * steps + (experts % num_slices)[:, None]) // num_slices
    return ends.diff(dim=-1)


def rows_of_chunks(sizes: Tensor, degree: int) -> list[Tensor]:
    """List the rows of each of `degree` chunks, int64 [a] each: indices of rows sorted by expert.

    `sizes`, int64 [E, num_slices], are the rows of each slice; `degree` divides num_slices.
    """
    num_experts, num_slices = sizes.shape
    by_chunk = sizes.view(num_experts, degree, -1).sum((0, 2)).tolist()
    chunk_of_row = torch.arange(degree, device=sizes.device).repeat_interleave(num_slices // degree).repeat(num_experts)
    chunk_of_row = chunk_of_row.repeat_interleave(sizes.flatten(), output_size=sum(by_chunk))
    return list(torch.argsort(chunk_of_row, stable=True).split(by_chunk))


@dataclass(frozen=True, eq=False)
class Chunk:
    """Content of one message to the experts and of the message back."""

    home: Tensor | None
    """int64 [a]: indices of this rank's rows sorted by expert that are sent, ascending; None: all, in one chunk."""
    sent: list[int]
    """Rows sent to each place that holds experts."""
    splits: list[int]
    """Rows sent to each rank: a copy to every one of a place."""
    received: list[int]
    """Rows received from each rank."""
    index: Tensor
    """int64 [q]: row j in the order of (slice, expert, source) arrives as row index[j]."""
    inverse: Tensor
    """int64 [q]: the inverse of `index`."""
    sizes: list[int]
    """Rows of each slice."""
    table: list[list[int]]
    """Rows from each rank to each."""


@dataclass(frozen=True, eq=False)
class SlicedRows:
    """All rows of a layer, as one rank of the exchange knows them."""

    home: Tensor
    """int64 [E, num_slices]: this rank's rows."""
    arriving: Tensor
    """int64 [W, E_local, num_slices]: rows that come to this rank."""
    table: Tensor
    """int64 [W, places, num_slices]: rows of every rank to every place."""
    rank: int
    """This rank's number in the exchange, below W."""
    _chunks: dict[int, list[Chunk]] = field(default_factory=dict, init=False)

    @property
    def num_slices(self) -> int:
        """Slices of each expert's rows."""
        return self.home.shape[1]

    def counts(self) -> Tensor:
        """Sum the arriving rows over source ranks: int64 [num_slices, E_local]."""
        return self.arriving.sum(0).T.contiguous()

    def chunks(self, degree: int) -> list[Chunk]:
        """Return `degree` chunks, a divisor of num_slices; cached by degree."""
        if degree not in self._chunks:
            self._chunks[degree] = self._cut(degree)
        return self._chunks[degree]

    def _cut(self, degree: int) -> list[Chunk]:
        (num_ranks, num_local, _), (_, num_places, _) = self.arriving.shape, self.table.shape
        device, per_chunk = self.home.device, self.num_slices // degree
        copies = num_ranks // num_places  # ranks next to each other share a place
        by_chunk = self.table.view(num_ranks, num_places, degree, per_chunk).sum(3).permute(2, 0, 1)
        by_slice = self.arriving.sum((0, 1))
        # One transfer from the device for everything that the host has to know.
        numbers = torch.cat((by_chunk.flatten(), by_slice)).tolist()
        size, sizes = num_ranks * num_places, numbers[degree * num_ranks * num_places :]
        homes = [None] if degree == 1 else rows_of_chunks(self.home, degree)
        found = []
        for i in range(degree):
            flat = numbers[i * size : (i + 1) * size]
            sent = flat[self.rank * num_places : (self.rank + 1) * num_places]
            each = [number for number in flat for _ in range(copies)]
            table = [each[row : row + num_ranks] for row in range(0, len(each), num_ranks)]
            of_slices = sizes[i * per_chunk : (i + 1) * per_chunk]
            mine = self.arriving[:, :, i * per_chunk : (i + 1) * per_chunk]
            ids = torch.arange(per_chunk, device=device) * num_local + torch.arange(num_local, device=device)[:, None]
            ids = ids.expand(mine.shape).flatten().repeat_interleave(mine.flatten(), output_size=sum(of_slices))
            index = torch.argsort(ids, stable=True)
            inverse = torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=device))
            received = [row[self.rank] for row in table]
            found.append(Chunk(homes[i], sent, table[self.rank], received, index, inverse, of_slices, table))
        return found


@dataclass(frozen=True, eq=False)
class ShardGather:
    """Gather of one chunk among the ranks that share experts; each part is padded to the longest."""

    most: int
    """Rows of the longest part, at least 1."""
    index: Tensor
    """int64 [q]: row j in the order of (slice, expert, sharer) is row index[j] of the padded parts."""
    sizes: list[int]
    """Rows of each slice, of all sharers together."""

    @staticmethod
    def of(table: Tensor, degree: int) -> list[ShardGather]:
        """Plan the gathers of `degree` chunks of a table of every sharer's rows, int64 [N_ESP, num_slices, E_local]."""
        num_sharers, num_slices, _ = table.shape
        per_chunk = num_slices // degree
        rows_table = table.sum(2).view(num_sharers, degree, per_chunk).sum(2).T.tolist()
        sizes_table = table.sum((0, 2)).view(degree, per_chunk).tolist()
        found = []
        for i, rows in enumerate(rows_table):
            mine = table[:, i * per_chunk : (i + 1) * per_chunk].reshape(num_sharers, -1)
            ids = torch.arange(mine.shape[1], device=table.device).repeat(num_sharers)
            ids = ids.repeat_interleave(mine.flatten(), output_size=sum(rows))
            most = max(1, *rows)
            places = [torch.arange(size, device=table.device) + number * most for number, size in enumerate(rows)]
            index = torch.cat(places)[torch.argsort(ids, stable=True)]
            found.append(ShardGather(most, index, sizes_table[i]))
        return found
