"""Layout of the messages that ranks exchange: codes and scales of one chunk per rank, in one buffer of bytes.

A row, for a chunk of n elements in b = ceil(n / 128) blocks:

    scales          4 b bytes, fp32 in the machine's byte order
    residual scales 4 b bytes, at 12 bits only
    codes           n bytes, int8
    residual codes  ceil(n / 2) bytes, int4, at 12 bits only
    zeros           up to a multiple of 4, so that the next row's scales are aligned

Scales come first, so that they can be read in place. Ranks agree on n and the number of bits before they send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE

T = TypeVar("T")

PART_SIZES = (GRADIENT_BLOCK_SIZE, 1, GRADIENT_BLOCK_SIZE // 2, 1)
"""Elements of each tensor of `Parts` that belong to one block."""


class Parts(NamedTuple):
    """A quantized gradient, or one per row: codes and scales, with a residual at 12 bits."""

    codes: Tensor
    """uint8 [..., n]."""
    scales: Tensor
    """fp32 [..., ceil(n / 128)]."""
    residual_codes: Tensor | None = None
    """uint8 [..., ceil(n / 2)]."""
    residual_scales: Tensor | None = None
    """fp32 [..., ceil(n / 128)]."""

    def map(self, function: Callable[[Tensor, T], Tensor], arguments: Iterable[T]) -> Parts:
        """Apply `function` to each tensor and its argument; a tensor that is None stays None."""
        codes, scales, *residual = (x if x is None else function(x, a) for x, a in zip(self, arguments, strict=True))
        assert codes is not None
        assert scales is not None
        return Parts(codes, scales, *residual)


def num_blocks(length: int) -> int:
    """Number of blocks of 128 that `length` elements take, the last of which may be shorter."""
    return -(-length // GRADIENT_BLOCK_SIZE)


@dataclass(frozen=True)
class ChunkLayout:
    """Layout of one chunk in a row of bytes."""

    length: int
    """Elements in the chunk."""
    bits: int
    """8, or 12 with a residual."""

    @property
    def nbytes(self) -> int:
        """Bytes of a row, padding included."""
        return sum(self._sizes())

    def zeros(self, num_rows: int, device: torch.device) -> Tensor:
        """Allocate a zeroed buffer uint8 [num_rows, nbytes]."""
        return torch.zeros(num_rows, self.nbytes, dtype=torch.uint8, device=device)

    def parts(self, buffer: Tensor) -> Parts:
        """View the codes and scales in a buffer [rows, nbytes]: codes [rows, length] and so on."""
        scales, residual_scales, codes, residual_codes, _ = buffer.split(self._sizes(), dim=1)
        residual = (residual_codes, residual_scales.view(torch.float32)) if self.bits == 12 else (None, None)
        return Parts(codes, scales.view(torch.float32), *residual)

    def write(self, parts: Parts, buffer: Tensor) -> None:
        """Cut flat `parts` into chunks of whole blocks, one per row of `buffer`; the last rows may stay empty."""
        for rows, flat in zip(self.parts(buffer), parts, strict=True):
            if rows is None or flat is None:
                continue
            width = rows.shape[1]
            num_full, rest = divmod(flat.numel(), width)
            rows[:num_full] = flat[: num_full * width].view(num_full, width)
            if rest:
                rows[num_full, :rest] = flat[flat.numel() - rest :]

    def read(self, buffer: Tensor, length: int) -> Parts:
        """The inverse of `write`: flat parts of the first `length` elements."""
        sizes = (length, num_blocks(length), (length + 1) // 2, num_blocks(length))
        return self.parts(buffer).map(lambda rows, n: rows.reshape(-1)[:n], sizes)

    def _sizes(self) -> list[int]:
        """Bytes of scales, residual scales, codes, residual codes and zeros."""
        scales, has_residual = 4 * num_blocks(self.length), self.bits == 12
        sizes = [scales, scales * has_residual, self.length, (self.length + 1) // 2 * has_residual]
        return [*sizes, -sum(sizes) % 4]
