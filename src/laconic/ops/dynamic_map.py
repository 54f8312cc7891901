"""The 8-bit codes of Adam's moments: dynamic tree quantization, and the straight lines that find a code.

A block of 256 numbers shares one fp32 scale, its largest magnitude. Normalized magnitudes n = |x| / scale fall into
seven decades; decade d covers (10**(d - 7), 10**(d - 6)] with first * 2**d levels, the centres of equally wide cells,
where `first` is 1 for the signed map and 2 for the unsigned one. Zero and one are levels too. Numbered from 0 (zero)
upwards, levels are on a straight line within each decade, so that no search is needed:

    k = min(floor(n * slope[d] + offset[d]), last[d]) + (n > top),    d = how many borders lie strictly below n

with k = 0 where n <= zero_border. Borders are halfway between the levels beside them, so that k is the nearest level.
The unsigned map, which holds the second moment, has zero_border 0: only zero becomes zero, and everything else below
the smallest level becomes that level.

Levels: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2.2, equal to the last bit to
those of bitsandbytes, so that states can be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from laconic.ops.constants import constant_tensor

__all__ = ["STATE_BLOCK_SIZE", "ZERO_CODE", "dynamic_map", "dynamic_map_tensor"]

STATE_BLOCK_SIZE = 256
"""Elements that share one scale."""

ZERO_CODE = {True: 127, False: 0}
"""The code of zero, in the signed and in the unsigned map."""

_NUM_DECADES = 7
_TABLE = 8


@dataclass(frozen=True)
class DynamicMap:
    """One map as tables of fp32 numbers; those by decade are padded to 8 at the end."""

    signed: bool
    levels: tuple[float, ...]
    """Level of each of the 256 codes, ascending. Signed: code 127 + k is level k, code 127 - k its negative, k <= 127
    (the level 1 has no negative)."""
    borders: tuple[float, ...]
    """By decade from the second on: the magnitude halfway between the last level of the decade before and the first of
    its own. Padding: infinity."""
    slopes: tuple[float, ...]
    offsets: tuple[float, ...]
    last: tuple[int, ...]
    """Number of the last level of each decade."""
    zero_border: float
    """Magnitudes up to this one become zero."""
    top: float
    """Magnitudes above this one become one."""


@cache
def dynamic_map(signed: bool) -> DynamicMap:
    """The signed map (first moment) or the unsigned one (second moment)."""
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

    def table(values: list[float], filler: float) -> tuple[float, ...]:
        return tuple(float(np.float32(value)) for value in values) + (filler,) * (_TABLE - len(values))

    return DynamicMap(
        signed=signed,
        levels=tuple(levels),
        borders=table(borders, float("inf")),
        slopes=table(slopes, 0.0),
        offsets=table(offsets, 0.0),
        last=(*last, last[-1]),
        zero_border=float(np.float32(magnitudes[0] / 2)) if signed else 0.0,
        top=float(np.float32((magnitudes[-1] + 1.0) / 2)),
    )


@constant_tensor
def dynamic_map_tensor(signed: bool, device: torch.device) -> Tensor:
    """The tables of `dynamic_map` on a device, for kernels: struct DynamicMap of csrc/kernels/adamw.h, fp32 [290].

    In this order: 256 levels, 8 borders, slopes, offsets and last numbers, zero_border, top.
    """
    found = dynamic_map(signed)
    tables = (found.levels, found.borders, found.slopes, found.offsets, found.last, (found.zero_border, found.top))
    return torch.tensor([number for table in tables for number in table], dtype=torch.float32, device=device)
