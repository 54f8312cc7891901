"""Sums of picked rows: the declaration."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops.declarations.op import DTYPES, Arguments, declare, names, random_values


def check_sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> int:
    """Check the arguments of sum_rows but the values of index and offsets; return the number of sums.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    if rows.dtype not in DTYPES:
        raise FormatError(f"rows.dtype is {rows.dtype}, but it must be one of {names(DTYPES)}")
    if rows.dim() != 2:
        raise FormatError(f"rows have shape {tuple(rows.shape)}, but it must be [rows, width]")
    expected = [("index", index, torch.int64), ("offsets", offsets, torch.int64)]
    if weights is not None:
        expected.append(("weights", weights, torch.float32))
    for name, tensor, dtype in expected:
        if tensor.dtype != dtype:
            raise FormatError(f"{name}.dtype is {tensor.dtype}, but it must be {dtype}")
        if tensor.dim() != 1:
            raise FormatError(f"{name} have shape {tuple(tensor.shape)}, but it must be a vector")
        if tensor.device != rows.device:
            raise FormatError(f"rows are on {rows.device} and {name} on {tensor.device}, but all must be on one device")
    if not offsets.numel():
        raise FormatError("offsets are empty, but they begin with 0 and have one number more than there are sums")
    if weights is not None and weights.shape != index.shape:
        raise FormatError(f"there are {weights.numel()} weights, but {index.numel()} entries in index; give one each")
    return offsets.shape[0] - 1


def _example(dtype: torch.dtype, is_weighted: bool) -> Arguments:
    index = torch.tensor([0, 3, 3, 5, 1, 2], device="cpu")
    weights = random_values(6, seed=1) if is_weighted else None
    return random_values(6, 1024).to(dtype), index, torch.tensor([0, 2, 2, 6], device="cpu"), weights


_sum_rows = declare(
    "sum_rows(Tensor rows, Tensor index, Tensor offsets, Tensor? weights) -> Tensor",
    fake=lambda rows, *a: rows.new_empty(check_sum_rows(rows, *a), rows.shape[1]),
    example=_example,
    choices_of=lambda rows, index, offsets, weights: (rows.dtype, weights is not None),
    examples=[(torch.bfloat16, False), (torch.float32, True), (torch.float16, True)],
)


def sum_rows(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sums of rows picked from a matrix, each in one pass over memory, without storing weighted rows.

    Args:
        rows: [q, M], float32, bfloat16 or float16.
        index: int64 [e], entry i picks the row index[i].
        offsets: int64 [n + 1], ascending from 0 to e: entries offsets[i] to offsets[i + 1] make sum i.
        weights: fp32 [e], factors of the picked rows; None: 1.

    Returns:
        [n, M] in the rows' dtype: from 0, fp32(total + fp32(weight * row)) entry by entry, rounded once in the end. Any
        NaN becomes the quiet NaN without a payload. A sum without entries is 0.

    Raises:
        FormatError: an argument is outside of these values. On CUDA an entry of `index` that is no row makes its sum
            NaN instead, so that the host does not wait for the device.
    """
    return _sum_rows(rows, index, offsets, weights)
