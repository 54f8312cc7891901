"""What attention and expert workers send each other: rows on the way out (a2e), sums on the way back (e2a).

A message is a header, int64 [HEADER_LENGTH], and a body of bytes whose length the header gives. Both ends are processes
of one engine on one kind of machine; the body is memory as it lies there. The header is checked all the same, because a
message read at the wrong place would be silent garbage.

    header: magic, kind, layer, micro-batch, slice, rows m, choices k, width M, dtype
    body of ROWS: int32 [m, k] experts, float32 [m, k] weights, dtype [m, M] hidden states
    body of SUMS: dtype [m, M]
    body of STOP: none
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FormatError

__all__ = ["HEADER_LENGTH", "ROWS", "STOP", "SUMS", "Header", "Rows", "pack_rows", "pack_sums", "unpack_rows"]

HEADER_LENGTH = 9
ROWS, SUMS, STOP = 1, 2, 3
"""Kinds of messages."""

_MAGIC = 0x4C41_4346
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Header:
    """What a message holds and where it belongs.

    Attributes:
        kind: ROWS, SUMS or STOP.
        layer: number of the layer of experts, from 0.
        micro_batch: number of the micro-batch in its attention worker, from 0.
        slice: number of the slice of the micro-batch, from 0.
        num_rows: m.
        top_k: k, choices per row; 0 in SUMS.
        width: M.
        dtype: of the rows.
    """

    kind: int
    layer: int = 0
    micro_batch: int = 0
    slice: int = 0
    num_rows: int = 0
    top_k: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return self.num_rows * (8 * self.top_k + self.width * self.dtype.itemsize)

    def to_tensor(self) -> Tensor:
        """Return int64 [HEADER_LENGTH]."""
        fields = (self.layer, self.micro_batch, self.slice, self.num_rows, self.top_k, self.width)
        return torch.tensor([_MAGIC, self.kind, *fields, _DTYPES.index(self.dtype)], dtype=torch.int64)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Header:
        """Read what `to_tensor` wrote.

        Raises:
            FormatError: it is no header.
        """
        magic, kind, *numbers, dtype = tensor.tolist()
        if magic != _MAGIC or kind not in (ROWS, SUMS, STOP) or min(numbers) < 0 or not 0 <= dtype < len(_DTYPES):
            raise FormatError(
                f"a message between workers begins with {tensor.tolist()}, which is no header of this version of"
                " laconic; run the same version on all workers"
            )
        layer, micro_batch, piece, num_rows, top_k, width = numbers
        return cls(kind, layer, micro_batch, piece, num_rows, top_k, width, _DTYPES[dtype])


@dataclass(frozen=True)
class Rows:
    """Rows of one slice of a micro-batch for one expert worker.

    Attributes:
        layer, micro_batch, slice: see Header.
        hidden: [m, M].
        experts: int32 [m, k], numbers among the worker's experts of this layer; -1 where a choice is not for it.
        weights: float32 [m, k].
    """

    layer: int
    micro_batch: int
    slice: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor


def pack_rows(rows: Rows) -> tuple[Header, Tensor]:
    """Return the header and the body, uint8 [header.nbytes], of `rows`.

    Raises:
        FormatError: rows of this dtype cannot travel.
    """
    if rows.hidden.dtype not in _DTYPES:
        raise FormatError(f"hidden states are {rows.hidden.dtype}, but {', '.join(map(str, _DTYPES))} can travel")
    (num_rows, width), top_k = rows.hidden.shape, rows.experts.shape[1]
    header = Header(ROWS, rows.layer, rows.micro_batch, rows.slice, num_rows, top_k, width, dtype=rows.hidden.dtype)
    # Experts and weights come first: their length keeps the rows behind them aligned, whatever the dtype.
    parts = (rows.experts.to(torch.int32), rows.weights.to(torch.float32), rows.hidden)
    return header, torch.cat([_bytes(part) for part in parts])


def unpack_rows(header: Header, body: Tensor) -> Rows:
    """Read what `pack_rows` made; the tensors are views of `body`."""
    m, k = header.num_rows, header.top_k
    experts, weights, hidden = body.split([4 * m * k, 4 * m * k, m * header.width * header.dtype.itemsize])
    return Rows(
        header.layer,
        header.micro_batch,
        header.slice,
        hidden.view(header.dtype).view(m, header.width),
        experts.view(torch.int32).view(m, k),
        weights.view(torch.float32).view(m, k),
    )


def pack_sums(rows: Rows, sums: Tensor) -> tuple[Header, Tensor]:
    """Return the header and the body of the answer `sums` [m, M] to `rows`."""
    m, width = sums.shape
    return Header(SUMS, rows.layer, rows.micro_batch, rows.slice, m, 0, width, dtype=sums.dtype), _bytes(sums)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
