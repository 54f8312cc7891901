"""The numbers behind each code: levels, decision thresholds, and the limits every implementation shares.

A code maps a normalized value n = x / scale to a small integer. Integers of other than 4 bits are arithmetic: round n,
clamp, store. So is `uint2`, with n = (x - minimum) / step and two numbers per block instead of one. The three 4-bit
codes are data: at most 16 sorted levels, and the rule "index = how many thresholds lie strictly below n". Tie rules
need no code of their own because they are folded into the thresholds: where a tie should go up, the stored threshold is
the fp32 number just below the midpoint. So one kernel per instruction set serves every 4-bit code, and this file is the
only place where levels are written down.

nf4: Dettmers et al., "QLoRA", 2023, appendix E. e2m1: OCP Microscaling Formats v1.0, FP4. uint2: per-group
quantization of Chen et al., "ActNN", ICML 2021, section 4.1, equation 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.ops.constants import constant_tensor
from laconic.options import BLOCK_CODES, CODE_BITS

BITS = CODE_BITS
"""Bits stored per element of each code."""

LEVEL_MAX = {name: code.level_max for name, code in BLOCK_CODES.items()}
"""The level that a block's largest magnitude is mapped to; of an affine code its largest value."""

AFFINE = tuple(name for name, code in BLOCK_CODES.items() if code.is_affine)
"""The codes with two numbers per block, step and minimum: value = minimum + code * step, code from 0 to LEVEL_MAX."""

ARITHMETIC = tuple(name for name, bits in BITS.items() if bits != 4)
"""The codes that have no tables: affine ones, and integers from -LEVEL_MAX to LEVEL_MAX in two's complement."""

GRADIENT_BLOCK_SIZE = 128
"""Elements that share one scale in a gradient of 8 or 12 bits."""

MIN_SCALE = 2.0**-126
"""Smallest scale that is stored: the smallest normal fp32 number. A block below it becomes zeros."""

_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Codebook:
    """One 4-bit code as five tables of 16 fp32 numbers, padded at the end.

    With K distinct levels, sorted and numbered 0..K-1 ("index"):
    nearest:     index = count(n > threshold[k] for k < K-1)
    stochastic:  index = j + (u < (n - level[j]) * reciprocal_gap[j]), j = count(n > floor_threshold[k] for k < K-1)
    Both saturate by themselves when n lies outside the levels, so no clamp is part of the definition.
    """

    levels: tuple[float, ...]
    """Level of each of the 16 codes, in code order; what dequantize looks up."""
    sorted_levels: tuple[float, ...]
    """The K levels that quantize produces, ascending. Padding: the largest level."""
    codes: tuple[int, ...]
    """Code of each sorted level. Padding: the largest level's code."""
    thresholds: tuple[float, ...]
    """Decision thresholds of nearest rounding. Padding: infinity."""
    floor_thresholds: tuple[float, ...]
    """The fp32 number just below each level from the second on, so that j is the level at or below n. Below zero it is
    -2**-126, the next normal number, so that no subnormal decides anything. Padding: infinity."""
    reciprocal_gaps: tuple[float, ...]
    """fp32(1 / (level[j+1] - level[j])); 0 for the last level and the padding, where nothing lies above."""
    zero_code: int
    """The code whose level is +0."""


def bits_of(code: str) -> int:
    """Bits stored per element of `code`: 2, 4, 5, 6 or 8.

    Raises:
        KeyError: the code is not known.
    """
    return BITS[code]


def rounding_error(code: str) -> float:
    """The largest error of rounding to nearest, as a share of the largest magnitude in a block: half the widest gap.

    Of an affine code half a step, whose range is at most twice that magnitude.
    """
    if code in AFFINE:
        return 1 / LEVEL_MAX[code]
    if code in ARITHMETIC:
        return 0.5 / LEVEL_MAX[code]
    levels = codebook(code).sorted_levels
    return max(above - below for below, above in pairwise(levels)) / 2 / LEVEL_MAX[code]


def scales_per_block(code: str) -> int:
    """Numbers stored for each block of `code`: 2 if it is affine (step, minimum), else 1 (scale)."""
    return 2 if code in AFFINE else 1


@cache
def codebook(code: str) -> Codebook:
    """The tables of a 4-bit code ("nf4", "e2m1" or "int4").

    Raises:
        KeyError: the code is none of these.
    """
    without_8 = [c for c in range(16) if c != 8]
    if code == "nf4":
        # Midpoints rounded to fp32; a value equal to one goes to the lower level.
        return _build(_NF4, produced=list(range(16)), ties_to_even_code=False)
    if code == "e2m1":
        # Code 8 (minus zero) can be read but is never written.
        return _build(_E2M1 + tuple(-v for v in _E2M1), produced=without_8, ties_to_even_code=True)
    if code == "int4":
        # Code 8 (minus eight) can be read but is never written, so the range is symmetric.
        levels = tuple(float(c if c < 8 else c - 16) for c in range(16))
        return _build(levels, produced=without_8, ties_to_even_code=True)
    raise KeyError(code)


@constant_tensor
def codebook_tensor(code: str, device: torch.device) -> Tensor:
    """The tables of `codebook` on a device, for kernels: six times 16 numbers and the zero code, fp32.

    The order is that of struct Codebook in csrc/kernels/blockwise.h. Codes in ARITHMETIC have no tables; their tensor
    is empty.
    """
    if code in ARITHMETIC:
        return torch.empty(0, dtype=torch.float32, device=device)
    book = codebook(code)
    tables = (book.levels, book.sorted_levels, book.codes, book.thresholds, book.floor_thresholds, book.reciprocal_gaps)
    numbers = [*(number for table in tables for number in table), book.zero_code]
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def bucket_rounder(code: str) -> float:
    """What fp32 n is added to, so that the low six bits of the sum are the number of n's bucket, 32 around n = 0.

    Buckets are LEVEL_MAX / 16 wide, or a little more: a power of two. So they reach twice as far as LEVEL_MAX, and |n|
    at most 1.5 times, where the scale is rounded down to the least fp16 number.
    """
    width = 2.0 ** (math.ceil(math.log2(LEVEL_MAX[code])) - 4)
    return width * (1.5 * 2**23 + 32)


@constant_tensor
def bucket_tensor(code: str, stochastic: bool, device: torch.device) -> Tensor:
    """A 4-bit code's tables by bucket, for kernels that look up where others search: int32, floats as their bits.

    First the threshold in each of 64 buckets, of which none has two; infinity where there is none. Then for each bucket
    and whether n is above its threshold, place = 2 * bucket + is_above: of rounding to nearest the code [128]; of
    stochastic rounding the level below [128], the reciprocal gap [128], and for each place and whether it goes up the
    code [256]. No n is in bucket 0, whose codes are 0.
    """
    book = codebook(code)
    table = np.array(book.floor_thresholds if stochastic else book.thresholds, np.float32)
    sought = table[np.isfinite(table)]
    at = (sought + np.float32(bucket_rounder(code))).view(np.int32) & 63
    thresholds = np.full(64, np.inf, np.float32)
    thresholds[at] = sought
    index = (at < np.arange(64)[:, None]).sum(1)  # of the level below a bucket's threshold
    index = np.stack((index, index + 1), 1).flatten().clip(max=15)
    tables = [thresholds.view(np.int32)]
    if stochastic:
        numbers = (book.sorted_levels, book.reciprocal_gaps)
        tables += [np.array(number, np.float32)[index].view(np.int32) for number in numbers]
        index = np.stack((index, index + 1), 1).flatten().clip(max=15)
    codes = np.array(book.codes, np.int32)[index]
    codes[: len(codes) // 64] = 0
    return torch.from_numpy(np.concatenate([*tables, codes])).to(device)


def _build(levels: tuple[float, ...], produced: list[int], ties_to_even_code: bool) -> Codebook:
    order = sorted(produced, key=lambda c: levels[c])
    by_index = np.array([levels[c] for c in order], dtype=np.float32)
    below, above = by_index[:-1].astype(np.float64), by_index[1:].astype(np.float64)
    thresholds = ((below + above) / 2).astype(np.float32)
    if ties_to_even_code:
        goes_up = np.array([c % 2 == 0 for c in order[1:]])
        thresholds = np.where(goes_up, np.nextafter(thresholds, np.float32(-np.inf)), thresholds)
    floor_thresholds = np.nextafter(by_index[1:], np.float32(-np.inf))
    floor_thresholds[by_index[1:] == 0] = -MIN_SCALE
    gaps = (1.0 / (above - below)).astype(np.float32)

    def padded(values: NDArray[np.float32], filler: float) -> tuple[float, ...]:
        return tuple(float(v) for v in values) + (float(filler),) * (16 - len(values))

    return Codebook(
        levels=tuple(float(np.float32(v)) for v in levels),
        sorted_levels=padded(by_index, by_index[-1]),
        codes=tuple(order) + (order[-1],) * (16 - len(order)),
        thresholds=padded(thresholds, np.inf),
        floor_thresholds=padded(floor_thresholds, np.inf),
        reciprocal_gaps=padded(gaps, 0.0),
        zero_code=levels.index(0.0),
    )
