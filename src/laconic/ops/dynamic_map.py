"""The codes of Adam's moments, and the straight lines that find a code.

In 8 bits (dynamic tree quantization) a block of 256 numbers shares one fp32 scale, its largest magnitude. Normalized
magnitudes n = |x| / scale fall into seven decades; decade d covers (10**(d - 7), 10**(d - 6)] with first * 2**d
levels, the centres of equally wide cells,
where `first` is 1 for the signed map and 2 for the unsigned one. Zero and one are levels too. Numbered from 0 (zero)
upwards, levels are on a straight line within each decade, so that no search is needed:

    k = min(floor(n * slope[d] + offset[d]), last[d]) + (n > top),    d = how many borders lie strictly below n

with k = 0 where n <= zero_border. Borders are halfway between the levels beside them, so that k is the nearest level.
The unsigned map, which holds the second moment, has zero_border 0: only zero becomes zero, and everything else below
the smallest level becomes that level.

In 4 bits a block of 128 numbers shares a scale, and 16 levels leave no room for seven decades:

- signed: zero, and (k / 8)**2 for k = 1 ... 8 with the negatives of all but the last. A line has one level. Far from
  -1 there is none, so the scale has the sign of the largest magnitude, which then takes the level 1 either way.
- unsigned: four lines, each from a quarter of its end e = 1/64, 1/16, 1/4, 1 up, with the centres of four equal cells,
  but 1 as the last of all. Zero is none of them: what is not zero must not become it, and where all of a block is zero,
  so is the scale.

Levels of 8 bits: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2.2, equal to the last
bit to those of bitsandbytes, so that states can be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from laconic.ops.constants import constant_tensor
from laconic.options import MOMENT_BLOCK_SIZES

STATE_BLOCK_SIZE = MOMENT_BLOCK_SIZES[8]
"""Elements of 8 bits that share one scale."""

_NUM_DECADES = 7
_TABLE = 8


def has_signed_scale(signed: bool, bits: int) -> bool:
    """Whether the scale of a block is its number of largest magnitude with its sign; else it is that magnitude."""
    return signed and bits == 4


def zero_code(signed: bool, bits: int = 8) -> int:
    """The code of zero, in the signed and in the unsigned map."""
    return (1 << (bits - 1)) - 1 if signed else 0


@dataclass(frozen=True)
class DynamicMap:
    """One map as tables of fp32 numbers; those by decade are padded to 8 at the end."""

    signed: bool
    levels: tuple[float, ...]
    """Level of each of the 256 or 16 codes, ascending. Signed: with z = `zero_code`, code z + k is level k, code z - k
    its negative, k <= z (the level 1 has no negative)."""
    borders: tuple[float, ...]
    """By decade from the second on: the magnitude halfway between the last level of the decade before and the first of
    its own. Padding: infinity."""
    slopes: tuple[float, ...]
    offsets: tuple[float, ...]
    last: tuple[int, ...]
    """Number of the last level of each decade."""
    zero_border: float
    """Magnitudes up to this one take level 0."""
    top: float
    """Magnitudes above this one become one."""


@cache
def dynamic_map(signed: bool, bits: int = 8) -> DynamicMap:
    """The signed map (first moment) or the unsigned one (second moment)."""
    if bits == 4:
        return _signed_map_of_4_bits() if signed else _unsigned_map_of_4_bits()
    first = 1 if signed else 2
    counts = [first << decade for decade in range(_NUM_DECADES)]
    ends = [10.0 ** (decade - _NUM_DECADES + 1) for decade in range(_NUM_DECADES)]

    # 1. Levels, with the roundings of the published table: all of it in fp32.
    magnitudes: list[float] = []
    with unset_fake_temporarily():
        for count, end in zip(counts, ends, strict=True):
            cells = torch.linspace(0.1, 1, count + 1, dtype=torch.float32, device="cpu")
            magnitudes += (end * ((cells[:-1] + cells[1:]) / 2.0)).tolist()
    levels = [0.0, *magnitudes, 1.0]
    if signed:
        levels = [-level for level in reversed(magnitudes)] + levels

    # 2. The lines, from exact cells: level k of a decade is the centre of the cell where the line goes from k to k + 1.
    numbers = np.cumsum([1, *counts])  # of each decade's first level
    slopes = [count / (0.9 * end) for count, end in zip(counts, ends, strict=True)]
    offsets = [float(number) - slope * 0.1 * end for number, slope, end in zip(numbers[:-1], slopes, ends, strict=True)]
    if not signed:  # the first cell begins at 0, so that the line is never below 1
        offsets[0], slopes[0] = 1.0, 1.0 / (0.1 * ends[0] + 1.0 / slopes[0])
    by_number = [0.0, *magnitudes, 1.0]
    borders = [(by_number[number - 1] + by_number[number]) / 2 for number in numbers[1:-1]]
    last = [int(number) - 1 for number in numbers[1:]]
    return _map(signed, levels, borders, slopes, offsets, last, magnitudes[0] / 2 if signed else 0.0)


def _signed_map_of_4_bits() -> DynamicMap:
    magnitudes = [(k / 8) ** 2 for k in range(1, 9)]
    levels = [-magnitude for magnitude in reversed(magnitudes[:-1])] + [0.0, *magnitudes]
    middles = [(low + high) / 2 for low, high in pairwise([0.0, *magnitudes])]
    numbers = range(1, 8)
    return _map(True, levels, middles[1:-1], [0.0] * 7, [float(k) for k in numbers], [*numbers], middles[0])


def _unsigned_map_of_4_bits() -> DynamicMap:
    ends = [4.0**d for d in range(-3, 1)]
    levels = [end * (1 + 3 * (cell + 0.5) / 4) / 4 for end in ends for cell in range(4)]
    levels[-1] = 1.0
    borders = [(levels[4 * d - 1] + levels[4 * d]) / 2 for d in range(1, 4)]
    offsets = [4 * d - 4 / 3 for d in range(4)]
    # Cells begin below the line, but for the first one: that one begins at 0.
    return _map(
        False, levels, borders, [16 / 3 / end for end in ends], offsets, [3, 7, 11, 14], (levels[0] + levels[1]) / 2
    )


def _map(
    signed: bool,
    levels: list[float],
    borders: list[float],
    slopes: list[float],
    offsets: list[float],
    last: list[int],
    zero_border: float,
) -> DynamicMap:
    """A map whose tables are rounded to fp32 and padded."""

    def table(values: list[float], filler: float) -> tuple[float, ...]:
        return tuple(float(np.float32(value)) for value in values) + (filler,) * (_TABLE - len(values))

    return DynamicMap(
        signed=signed,
        levels=table(levels, 0.0),
        borders=table(borders, float("inf")),
        slopes=table(slopes, 0.0),
        offsets=table(offsets, 0.0),
        last=(*last, *[last[-1]] * (_TABLE - len(last))),
        zero_border=float(np.float32(zero_border)),
        top=float(np.float32((levels[-2] + levels[-1]) / 2)),
    )


@constant_tensor
def dynamic_map_tensor(signed: bool, device: torch.device, bits: int = 8) -> Tensor:
    """The tables of `dynamic_map` on a device, for kernels: struct DynamicMap of csrc/kernels/adamw.h, fp32 [290].

    In this order: 256 levels, 8 borders, slopes, offsets and last numbers, zero_border, top.
    """
    found = dynamic_map(signed, bits)
    levels = (*found.levels, *[0.0] * (256 - len(found.levels)))
    tables = (levels, found.borders, found.slopes, found.offsets, found.last, (found.zero_border, found.top))
    return torch.tensor([number for table in tables for number in table], dtype=torch.float32, device=device)
