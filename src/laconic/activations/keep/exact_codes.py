"""Saved tensors in fewer bits without a loss, where backward reads less of them than they hold.

A relu needs to know which values pass, dropout which it kept, max pooling which value of a window was the largest, and
pooling needs no value of its input at all. Backward gets a tensor that leads it to the very same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic.ops import pack_bits, unpack_bits
from laconic.ops.constants import constant_tensor


@dataclass(frozen=True, eq=False, slots=True)
class MemoryLayout:
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
    def of(cls, x: Tensor) -> MemoryLayout:
        """The layout of x, whatever its memory format."""
        # What nearly all are is asked without a call.
        if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)) or _is_dense(x):
            # Sizes of other classes may be symbols, which have no hash.
            return (_layout if type(x) is Tensor else cls)(x.shape, x.stride(), x.dtype)
        return cls(x.shape, torch.empty(x.shape, device="meta", dtype=torch.float32).stride(), x.dtype)

    def flatten(self, x: Tensor) -> Tensor:
        """The values [numel] of x, a tensor of this layout or, if that has gaps, of this shape."""
        if x.stride() == self.stride:
            return x.as_strided((x.numel(),), (1,))
        return x.contiguous().view(-1)

    def unflatten(self, values: Tensor) -> Tensor:
        """The tensor of this layout of which `flatten` returned `values`."""
        return values.as_strided(self.shape, self.stride)


_layout = lru_cache(maxsize=1024)(MemoryLayout)


def _is_dense(x: Tensor) -> bool:
    """Whether the values of x fill a stretch of memory, each place once."""
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


def as_mask(mask: Tensor, layout: MemoryLayout, true: float, false: float) -> Coded:
    """One bit per value for a tensor that is `true` or `false`.

    Args:
        mask: of the shape and in the memory order of `layout`; what is not zero stands for `true`.
        layout: of the tensor that `decode` returns; its dtype is one of `MASK_DTYPES`.
        true, false: its values.
    """
    return mask_of_bits(pack_bits(layout.flatten(mask.detach())), layout, true, false)


def mask_of_bits(bits: Tensor, layout: MemoryLayout, true: float, false: float) -> Coded:
    """What `as_mask` returns, from packed bits.

    Args:
        bits: uint8 [ceil(numel / 8)], of `pack_bits`.
        layout, true, false: as in `as_mask`.
    """
    numel = layout.shape.numel()

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        return layout.unflatten(unpack_bits(tensors[0], length=numel, dtype=layout.dtype, zero=false, one=true))

    return Coded((bits,), decode)


def as_shape(x: Tensor) -> Coded:
    """No bits at all, for an input of which backward reads shape and memory format only."""
    layout, device = MemoryLayout.of(x), x.device

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
    layout, window = MemoryLayout.of(indices), (width, kernel, dilation)
    steps = layout.flatten(indices - _corners(indices, width, stride, padding))
    offsets = _offsets_of_steps(*window, indices.device).index_select(0, steps)
    numel, in_nibbles = offsets.numel(), math.prod(kernel) <= 16
    if in_nibbles:
        pairs = torch.nn.functional.pad(offsets, (0, numel % 2)).view(-1, 2)
        offsets = pairs[:, 0] | (pairs[:, 1] << 4)

    def decode(tensors: tuple[Tensor, ...]) -> Tensor:
        (codes,) = tensors
        if in_nibbles:
            codes = torch.stack([codes & 15, codes >> 4], -1).view(-1)[:numel]
        places = layout.unflatten(_steps_of_offsets(*window, codes.device).index_select(0, codes.int()))
        return places.add_(_corners(places, width, stride, padding))

    return Coded((offsets,), decode)


def _corners(indices: Tensor, width: int, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """int64 [height, width]: flat index in the input of the first value of each window, padding counted."""
    rows, columns = (
        torch.arange(size, device=indices.device) * step - border
        for size, step, border in zip(indices.shape[-2:], stride, padding, strict=True)
    )
    return rows.unsqueeze(-1) * width + columns


_Size = tuple[int, int]


@constant_tensor
def _steps_of_offsets(width: int, kernel: _Size, dilation: _Size, device: torch.device) -> Tensor:
    """int64 [places of a window]: how far each is behind the first, in the flat index of an input of this width."""
    rows, columns = (torch.arange(size, device=device) * step for size, step in zip(kernel, dilation, strict=True))
    return (rows.unsqueeze(-1) * width + columns).flatten()


@constant_tensor
def _offsets_of_steps(width: int, kernel: _Size, dilation: _Size, device: torch.device) -> Tensor:
    """uint8 [largest step + 1], the inverse; places of one step, in a window wider than its input, are the same."""
    steps = _steps_of_offsets(width, kernel, dilation, device)
    largest = (kernel[0] - 1) * dilation[0] * width + (kernel[1] - 1) * dilation[1]
    offsets = torch.zeros(largest + 1, dtype=torch.uint8, device=device)
    offsets[steps] = torch.arange(len(steps), device=device).to(torch.uint8)
    return offsets
