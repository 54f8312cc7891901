"""What attention and expert workers send each other: rows on the way out (a2e), sums on the way back (e2a).

A message is a header, int64 [HEADER_LENGTH], and a body of bytes whose length the header gives. Both ends are processes
of one engine on one kind of machine; the body is memory as it lies there. The header is checked all the same, because a
message read at the wrong place would be silent garbage.

    header: magic, kind, layer, micro-batch, slice, rows m, choices k, width M, dtype, coding, bytes of coded values
    body of ROWS: int32 [m, k] experts, float32 [m, k] weights, coded dtype [m, M] hidden states
    body of SUMS: coded dtype [m, M]
    body of STOP: none

Codings are those of laconic.infer.payload; a header states that of its message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.infer.payload import DTYPES, RAW, Coder, LinkTraffic, bytes_of, decode_values, num_bytes_fit

HEADER_LENGTH = 11
ROWS, SUMS, STOP = 1, 2, 3
"""Kinds of messages."""

_MAGIC = 0x4C41_4347


@dataclass(frozen=True)
class Header:
    """What a message holds and where it belongs, in numbers from 0; the micro-batch's is that in its attention worker.

    `kind` is ROWS, SUMS or STOP, `num_rows` m, `width` M, `top_k` the choices per row, 0 in SUMS; `coding` and
    `values_nbytes` are of the values, see laconic.infer.payload.
    """

    kind: int
    layer: int = 0
    micro_batch: int = 0
    slice: int = 0
    num_rows: int = 0
    top_k: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32
    coding: int = RAW
    values_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return 8 * self.num_rows * self.top_k + self.values_nbytes

    @property
    def traffic(self) -> LinkTraffic:
        """What this message adds to its direction."""
        around = 8 * HEADER_LENGTH + 8 * self.num_rows * self.top_k
        raw_nbytes = around + self.num_rows * self.width * self.dtype.itemsize
        return LinkTraffic(1, int(self.coding != RAW), raw_nbytes, around + self.values_nbytes)

    def make_body(self, device: torch.device) -> Tensor:
        """Return memory for the body, uint8 [nbytes]; FormatError if there is not as much."""
        try:
            return torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OverflowError) as error:
            raise FormatError(f"a message says that {self.nbytes} bytes follow, for which there is no room") from error

    def to_tensor(self) -> Tensor:
        """Return int64 [HEADER_LENGTH]."""
        fields = (self.layer, self.micro_batch, self.slice, self.num_rows, self.top_k, self.width)
        values = (DTYPES.index(self.dtype), self.coding, self.values_nbytes)
        return torch.tensor([_MAGIC, self.kind, *fields, *values], dtype=torch.int64, device="cpu")

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Header:
        """Read what `to_tensor` wrote; FormatError if it is no header."""
        magic, kind, *numbers, dtype, coding, values_nbytes = tensor.tolist()
        known = magic == _MAGIC and kind in (ROWS, SUMS, STOP) and min(numbers) >= 0 and 0 <= dtype < len(DTYPES)
        if not known or not num_bytes_fit(coding, values_nbytes, (numbers[3], numbers[5]), DTYPES[dtype]):
            raise FormatError(
                f"a message between workers begins with {tensor.tolist()}, which is no header of this version of"
                " laconic; run the same version on all workers"
            )
        layer, micro_batch, piece, rows, top_k, width = numbers
        return cls(kind, layer, micro_batch, piece, rows, top_k, width, DTYPES[dtype], coding, values_nbytes)


@dataclass(frozen=True)
class Rows:
    """Rows [m, M] of one slice of a micro-batch for one expert worker, in host memory, with weights float32 [m, k].

    `experts`, int32 [m, k], are numbers among the worker's experts of this layer; -1 where a choice is not for it.
    """

    layer: int
    micro_batch: int
    slice: int
    hidden: Tensor
    experts: Tensor
    weights: Tensor


def pack_rows(rows: Rows, coder: Coder) -> tuple[Header, Tensor]:
    """Return the header and the body, uint8 [header.nbytes], of `rows`; a dtype that cannot travel is a FormatError."""
    coding, values = coder.encode(rows.hidden)
    shape = (len(rows.hidden), rows.experts.shape[1], rows.hidden.shape[1])
    place = (rows.layer, rows.micro_batch, rows.slice)
    header = Header(ROWS, *place, *shape, rows.hidden.dtype, coding, values.numel())
    # Experts and weights come first: their length keeps the values behind them aligned, whatever the dtype.
    return header, torch.cat([bytes_of(rows.experts.to(torch.int32)), bytes_of(rows.weights.to(torch.float32)), values])


def unpack_rows(header: Header, body: Tensor) -> Rows:
    """Read what `pack_rows` made; raw tensors are views of `body`. Damaged values are a FormatError."""
    m, k = header.num_rows, header.top_k
    experts, weights, values = body.split([4 * m * k, 4 * m * k, header.values_nbytes])
    return Rows(
        header.layer,
        header.micro_batch,
        header.slice,
        decode_values(header.coding, values, (m, header.width), header.dtype),
        experts.view(torch.int32).view(m, k),
        weights.view(torch.float32).view(m, k),
    )


def pack_sums(rows: Rows, sums: Tensor, coder: Coder) -> tuple[Header, Tensor]:
    """Return the header and the body of the answer `sums` [m, M] to `rows`; see pack_rows."""
    coding, values = coder.encode(sums)
    m, width = sums.shape
    place = (rows.layer, rows.micro_batch, rows.slice)
    return Header(SUMS, *place, m, 0, width, sums.dtype, coding, values.numel()), values


def unpack_sums(header: Header, body: Tensor) -> Tensor:
    """Read what `pack_sums` made, [m, M]; raw sums are a view of `body`. Damaged values are a FormatError."""
    return decode_values(header.coding, body, (header.num_rows, header.width), header.dtype)
