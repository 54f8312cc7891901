"""Sums of picked rows: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.declarations.rows import check_sum_rows

__all__ = ["BAD_ENTRIES", "sum_rows"]

BAD_ENTRIES = (
    "index and offsets do not fit: every entry of index must be one of the {num_rows} rows, and offsets must ascend"
    " from 0 to the {num_entries} entries"
)


@torch.no_grad()
def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of weighted rows; see `laconic.ops.sum_rows`.

    rows [q, M], index int64 [e], offsets int64 [n + 1], weights fp32 [e] -> [n, M].
    """
    num_sums = check_sum_rows(rows, index, offsets, weights)
    counts = offsets.diff()
    in_range = bool(((index >= 0) & (index < len(rows))).all())
    if not in_range or bool((counts < 0).any()) or int(offsets[0]) != 0 or int(offsets[-1]) != len(index):
        raise FormatError(BAD_ENTRIES.format(num_rows=len(rows), num_entries=len(index)))
    total = rows.new_zeros(num_sums, rows.shape[1], dtype=torch.float32)
    for number in range(int(counts.max()) if num_sums else 0):
        sums = (counts > number).nonzero().squeeze(1)
        entries = offsets[sums] + number
        values = rows[index[entries]].float()
        total[sums] += values if weights is None else values * weights[entries, None]
    result = total.to(rows.dtype)
    return result.masked_fill_(result.isnan(), float("nan"))
