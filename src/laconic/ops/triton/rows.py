"""Sums of picked rows in Triton.

One program makes a part of one sum and walks its entries, so that nothing but the sums is written. The arithmetic is
that of blockwise.py: no fused multiply-add.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.declarations.rows import check_sum_rows
from laconic.ops.triton.blockwise import _bits, _name, _narrow, _on_device, _widen

_COLUMNS = 1024
"""Of a row, per program: with 4 warps, each thread moves 16 bytes of bf16."""


@triton.jit
def _sum_rows_kernel(
    rows_ptr, num_rows, width, index_ptr, num_entries, offsets_ptr, weights_ptr, sums_ptr,
    WEIGHTED: tl.constexpr, TYPE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # 1. Which sum, which columns, which entries.
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < width
    first = tl.load(offsets_ptr + number)
    last = tl.load(offsets_ptr + number + 1)
    sound = (first >= 0) & (first <= last) & (last <= num_entries)
    first = tl.where(sound, first, 0)
    last = tl.where(sound, last, 0)

    # 2. The sum, entry by entry. A row that does not exist is a NaN: nobody waits for the device to say so.
    total = tl.zeros([COLUMNS], tl.float32) + tl.where(sound, 0.0, float("nan"))
    for entry in range(first, last):
        row = tl.load(index_ptr + entry + tl.zeros([1], tl.int64))
        is_row = (row >= 0) & (row < num_rows)
        value = _widen(tl.load(rows_ptr + tl.where(is_row, row, 0) * width + column, mask=exists & is_row, other=0))
        if WEIGHTED:
            value = value * tl.load(weights_ptr + entry)
        total += tl.where(is_row, value, float("nan"))
    tl.store(sums_ptr + number * width + column, _narrow(total, TYPE), mask=exists)


def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """`reference.sum_rows` in Triton, the same bits; a sum with an entry that leads outside is NaN."""
    num_sums = check_sum_rows(rows, index, offsets, weights)
    rows, index, offsets = rows.detach().contiguous(), index.contiguous(), offsets.contiguous()
    sums = rows.new_empty(num_sums, rows.shape[1])
    if sums.numel() == 0:
        return sums

    with _on_device(rows):
        _sum_rows_kernel[(num_sums, -(-rows.shape[1] // _COLUMNS))](
            _bits(rows) if rows.dtype == torch.bfloat16 else rows, *rows.shape, index, len(index), offsets,
            None if weights is None else weights.contiguous(), _bits(sums),
            WEIGHTED=weights is not None, TYPE=_name(rows.dtype), COLUMNS=_COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip
    return sums
