"""Saved tensors in fewer bits without a loss, where backward reads less of them than they hold.

A relu needs to know which values pass, dropout which it kept, max pooling which value of a window was the largest, and
pooling needs no value of its input at all. Backward gets a tensor that leads it to the very same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["Coded", "Layout", "as_mask", "as_offsets", "as_shape", "pack_bits", "unpack_bits"]


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype of a tensor, to write it down in the order in which it lies in memory.

    Attributes:
        shape: of the tensor.
        stride: of the tensor, or of a contiguous one if it has gaps or overlaps.
        dtype: of the tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """The layout of x, whatever its memory format."""
        if _is_dense(x):
            return cls(x.shape, x.stride(), x.dtype)
        return cls(x.shape, torch.empty(x.shape, device="meta").stride(), x.dtype)

    def flatten(self, x: Tensor) -> Tensor:
        """The values [numel] of x, a tensor of this layout or, if that has gaps, of this shape."""
        if x.stride() == self.stride:
            return x.as_strided((x.numel(),), (1,))
        return x.contiguous().view(-1)

    def unflatten(self, values: Tensor) -> Tensor:
        """The tensor of this layout of which `flatten` returned `values`."""
        return values.as_strided(self.shape, self.stride)


def _is_dense(x: Tensor) -> bool:
    """Whether the values of x fill a stretch of memory, each place once."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Coded:
    """The `tensors` that stand for another one, and the function that returns what backward takes for that."""

    tensors: tuple[Tensor, ...]
    decode: Callable[[tuple[Tensor, ...]], Tensor]


_SPREAD = 0x0102040810204080
"""A product with it moves the lowest bits of the eight bytes of a word next to each other, into the highest byte."""


def pack_bits(mask: Tensor) -> Tensor:
    """Eight values of a bool tensor [n] in a byte, the first in the lowest bit: uint8 [ceil(n / 8)]."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 8))
    return ((padded.view(torch.int64) * _SPREAD) >> 56).to(torch.uint8)


def unpack_bits(codes: Tensor, numel: int) -> Tensor:
    """The bool tensor [numel] that `pack_bits` wrote as uint8 `codes`."""
    return _bytes_of_codes(codes.device)[codes.int()].view(torch.bool)[:numel]


@cache
def _bytes_of_codes(device: torch.device) -> Tensor:
    """int64 [256]: each byte's eight bits, a byte each."""
    words = [sum(((code >> bit) & 1) << (8 * bit) for bit in range(8)) for code in range(256)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def as_mask(mask: Tensor, layout: Layout, true: float, false: float) -> Coded:
    """One bit per value for a tensor that is `true` or `false`.

    Args:
        mask: bool, of the shape and in the memory order of `layout`.
        layout: of the tensor that `decode` returns.
        true, false: its values.
    """
    numel = mask.numel()

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        values = unpack_bits(tensors[0], numel)
        if layout.dtype is torch.bool:
            return layout.unflatten(values)
        if (true, false) == (1.0, 0.0):
            return layout.unflatten(values.to(layout.dtype))
        pair = torch.tensor([false, true], dtype=layout.dtype, device=values.device)
        return layout.unflatten(torch.where(values, pair[1], pair[0]))

    return Coded((pack_bits(layout.flatten(mask)),), decode)


def as_shape(x: Tensor) -> Coded:
    """No bits at all, for an input of which backward reads shape and memory format only."""
    layout, device = Layout.of(x), x.device

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)

    return Coded((), decode)


def as_offsets(
    indices: Tensor,
    width: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Coded:
    """The place of each maximum inside of its window, in four bits or a byte, for indices of two-dimensional pooling.

    Args:
        indices: int64 [..., height, width] of the output, each the flat index of a value in its plane of the input.
        width: of the input.
        kernel, stride, padding, dilation: of the pooling; the window has at most 256 places.
    """
    layout = Layout.of(indices)
    corners = _corners(indices, stride, padding)
    rows = (indices.div(width, rounding_mode="floor") - corners[0]).div_(dilation[0], rounding_mode="floor")
    columns = (indices.remainder(width) - corners[1]).div_(dilation[1], rounding_mode="floor")
    offsets = layout.flatten(rows.mul_(kernel[1]).add_(columns).to(torch.uint8))
    numel, in_nibbles = offsets.numel(), math.prod(kernel) <= 16
    if in_nibbles:
        pairs = torch.nn.functional.pad(offsets, (0, numel % 2)).view(-1, 2)
        offsets = pairs[:, 0] | (pairs[:, 1] << 4)

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        (codes,) = tensors
        if in_nibbles:
            codes = torch.stack([codes & 15, codes >> 4], -1).view(-1)[:numel]
        places = layout.unflatten(codes.long())
        corners = _corners(places, stride, padding)
        rows = places.div(kernel[1], rounding_mode="floor").mul_(dilation[0]).add_(corners[0])
        columns = places.remainder(kernel[1]).mul_(dilation[1]).add_(corners[1])
        return rows.mul_(width).add_(columns)

    return Coded((offsets,), decode)


def _corners(indices: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row [height, 1] and column [width] of the first value of each window, padding counted."""
    height, width = indices.shape[-2:]
    rows = torch.arange(height, device=indices.device).unsqueeze(-1) * stride[0] - padding[0]
    return rows, torch.arange(width, device=indices.device) * stride[1] - padding[1]
