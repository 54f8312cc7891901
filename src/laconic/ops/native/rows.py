"""Sums of picked rows on the CPU: `reference/rows.py` in C++, the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.declarations.rows import check_sum_rows
from laconic.ops.native.library import FLOAT_TYPES, ISA_NUMBERS, kernels
from laconic.ops.reference.rows import BAD_ENTRIES

__all__ = ["sum_rows"]


def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None, *, isa: str | None = None) -> Tensor:
    """`reference.sum_rows` in C++, the same bits; `isa` overrides the instruction set."""
    num_sums = check_sum_rows(rows, index, offsets, weights)
    rows, index, offsets = rows.contiguous(), index.contiguous(), offsets.contiguous()
    weights = None if weights is None else weights.contiguous()
    sums = rows.new_empty(num_sums, rows.shape[1])
    sound = kernels.sum_rows(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        rows.data_ptr(), FLOAT_TYPES[rows.dtype], *rows.shape, index.data_ptr(), len(index),
        offsets.data_ptr(), num_sums, 0 if weights is None else weights.data_ptr(), sums.data_ptr(),
    )  # fmt: skip
    if not sound:
        raise FormatError(BAD_ENTRIES.format(num_rows=len(rows), num_entries=len(index)))
    return sums
