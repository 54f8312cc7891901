"""The checksum of the lossless format, of data that arrives in pieces."""

from __future__ import annotations

from torch import Tensor

from laconic.formats.lossless import encode, read_header

__all__ = ["Checksum", "checksum_of"]

_MASK = (1 << 64) - 1


def checksum_of(data: Tensor) -> tuple[int, int]:
    """sum and weighted_sum (docs/formats.md) of uint8 data."""
    if not data.numel():
        return 0, 0
    header = read_header(encode(data, "raw"))
    return header.sum, header.weighted_sum


class Checksum:
    """The checksum of bytes that are added piece by piece; all pieces but the last have a multiple of 4 bytes."""

    def __init__(self) -> None:
        self._sum = self._weighted_sum = self._num_words = 0

    def add(self, sum_: int, weighted_sum: int, nbytes: int) -> None:
        """Add a piece of `nbytes` whose own checksum is known."""
        self._weighted_sum = (self._weighted_sum + weighted_sum + self._num_words * sum_) & _MASK
        self._sum = (self._sum + sum_) & _MASK
        self._num_words += nbytes // 4

    def add_bytes(self, data: Tensor) -> None:
        """Add a piece, uint8."""
        self.add(*checksum_of(data), data.numel())

    def __str__(self) -> str:
        return f"{self._sum:016x}{self._weighted_sum:016x}"
