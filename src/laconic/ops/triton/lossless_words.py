"""Shared by the Triton kernels of lossless messages: words and their layout, numbers in a header, checksums.

A program works on a block of 4096 words, in int32 whatever their size. Words are bits; no float is ever computed with.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.lossless import EXPONENT_DTYPES, LAYOUTS, RANKED_WIDTHS
from laconic.ops.triton.blockwise import _on_device
from laconic.ops.triton.kernel_constants import KernelConstant

__all__ = ["front_sums", "packed_layout"]

BLOCK = KernelConstant(4096)
RAW = KernelConstant(0)
TOO_LONG = KernelConstant(255)
ZEROS_LEFT_OUT = KernelConstant(8)
PLANE_LEFT_OUT = KernelConstant(16)
MAGIC = KernelConstant(int.from_bytes(b"LCNZ", "little"))
VERSION = KernelConstant(1)
RANKED_VERSION = KernelConstant(2)
RANKED = KernelConstant(4)
NUM_RANK_CODES = KernelConstant(len(RANKED_WIDTHS))
# Bits per tier of each rank code, four bits each.
RANK_WIDTHS = KernelConstant(
    tuple(
        sum((*widths, 0, 0, 0)[tier] << (4 * number) for number, widths in enumerate(RANKED_WIDTHS))
        for tier in range(3)
    )
)
FIRST_DTYPES = KernelConstant(len(EXPONENT_DTYPES))
HEADER_NBYTES = KernelConstant(64)
HEADER_SUM_AT = KernelConstant(48)
ENTRY_NBYTES = KernelConstant(5)

# What the first kernel of either direction finds out, int64 [INFO]: the later ones read it on the device.
INFO = 13
STATUS = KernelConstant(0)
CODE = KernelConstant(1)
DTYPE = KernelConstant(2)
LAYOUT = KernelConstant(3)
NUMEL = KernelConstant(4)
NBYTES = KernelConstant(5)
CAPACITY = KernelConstant(6)
DIRECTORY = KernelConstant(7)
PAYLOAD = KernelConstant(8)
SUM = KernelConstant(9)
WEIGHTED_SUM = KernelConstant(10)
MESSAGE_VERSION = KernelConstant(11)
TRAILING = KernelConstant(12)

LISTED = KernelConstant(1024)
"""Blocks that the kernels of one program take at a time."""

_CHUNK = KernelConstant(1024)
_MAX_PROGRAMS = KernelConstant(256)


def packed_layout(dtype: torch.dtype) -> int:
    """A WordLayout in one integer, as `_field` takes it apart.

    From the lowest bit: 3 bits bytes per word, 5 exponent's first bit, 4 its width, 2 number of byte planes, 1 whether
    the last of them has the sign, 5 first of the bits that are bit planes up to the exponent, 1 whether the sign is
    another bit plane, 4 the exponent's flip.
    """
    layout = LAYOUTS[dtype]
    if not layout.has_exponent:
        return 0  # such words are not for these kernels
    sign = 8 * layout.nbytes - 1
    has_sign_bit = sign in layout.bit_shifts and sign >= layout.exponent_shift + layout.exponent_bits
    first_bit = layout.bit_shifts[0] if layout.bit_shifts else layout.exponent_shift
    packed = 0
    for value, width in (
        (layout.exponent_flip, 4),
        (has_sign_bit, 1),
        (first_bit, 5),
        (layout.sign_in_last_byte, 1),
        (len(layout.byte_shifts), 2),
        (layout.exponent_bits, 4),
        (layout.exponent_shift, 5),
        (layout.nbytes, 3),
    ):
        packed = packed << width | value
    return packed


@triton.jit
def word_nbytes(layout):
    return layout & 7


@triton.jit
def exponent_shift(layout):
    return (layout >> 3) & 31


@triton.jit
def exponent_bits(layout):
    return (layout >> 8) & 15


@triton.jit
def num_byte_planes(layout):
    return (layout >> 12) & 3


@triton.jit
def has_sign_byte(layout):
    return (layout >> 14) & 1


@triton.jit
def first_bit(layout):
    return (layout >> 15) & 31


@triton.jit
def has_sign_bit(layout):
    return (layout >> 20) & 1


@triton.jit
def exponent_flip(layout):
    return (layout >> 21) & 15


@triton.jit
def tier_width(kind, tier):
    """Bits of a tier for bits 0-2 of a kind: (3), (2, 2, 3), (3, 2, 2). Of 0 bits, a tier passes every word on."""
    further = tl.where((kind == 2) & (tier == 2), 3, 2)
    return tl.where(tier == 0, tl.where(kind == 2, 2, 3), tl.where(kind == 1, 0, further))


@triton.jit
def rank_width(number, tier):
    """Bits of a tier of a rank code; 0 for tiers that it does not have."""
    later = tl.where(tier == 1, tl.full([], RANK_WIDTHS[1], tl.int64), tl.full([], RANK_WIDTHS[2], tl.int64))
    widths = tl.where(tier == 0, tl.full([], RANK_WIDTHS[0], tl.int64), later)
    return ((widths >> (4 * number)) & 15).to(tl.int32)


@triton.jit
def plane_of(words, plane, layout):
    """A byte plane of a ranked block: the word's byte, but an exponent of 8 bits has a plane of its own, the last."""
    value = (words >> (8 * plane)) & 255
    rest = (value & 127) | (((words >> (8 * word_nbytes(layout) - 1)) & 1) << 7)
    exponent = (words >> exponent_shift(layout)) & 255
    wide = has_sign_byte(layout) == 1
    value = tl.where(wide & (plane == word_nbytes(layout) - 2), rest, value)
    return tl.where(wide & (plane == word_nbytes(layout) - 1), exponent, value)


@triton.jit
def from_plane(value, plane, layout):
    """The reverse: what a plane adds to the words."""
    word = value << (8 * plane)
    rest = ((value & 127) << (8 * plane)) | ((value >> 7) << (8 * word_nbytes(layout) - 1))
    wide = has_sign_byte(layout) == 1
    word = tl.where(wide & (plane == word_nbytes(layout) - 2), rest, word)
    return tl.where(wide & (plane == word_nbytes(layout) - 1), value << exponent_shift(layout), word)


@triton.jit
def load_u64(ptr, offset, size):
    """Eight bytes from `offset` on as int64; those from `size` on count as 0."""
    k = tl.arange(0, 8)
    data = tl.load(ptr + offset + k, mask=offset + k < size, other=0).to(tl.int64)
    return tl.sum(data << (8 * k).to(tl.int64), axis=0)


@triton.jit
def store_u64(ptr, offset, value):
    k = tl.arange(0, 8)
    number = tl.full([8], value, tl.int64)
    tl.store(ptr + offset + k, ((number >> (8 * k).to(tl.int64)) & 255).to(tl.uint8))


@triton.jit
def chunk_places(first, CHUNK: tl.constexpr):
    """Places of a chunk's words, [CHUNK // 8, 8]: a thread holds whole rows, the words of a byte of bits."""
    return first + 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def scattered(first, places):
    """first + places [rows, 8] for accesses of single bytes or words: rows stay with their threads.

    Threads take rows where those seem to lie closer than columns. Nothing becomes wider by that: that would need known
    alignment, which places without a pattern do not have.
    """
    return tl.max_contiguous(first + places, [2, 1])


@triton.jit
def ranks(left, of_row):
    """How many of [rows, 8] before each are left, int32, and how many are; each row has of_row."""
    number = left.to(tl.int32)
    before = tl.cumsum(of_row, axis=0) - of_row
    return tl.cumsum(number, axis=1) - number + before[:, None], tl.sum(of_row, axis=0)


@triton.jit
def row_sums(words, first, nbytes, CHUNK: tl.constexpr):
    """What each row of a chunk adds to its block's two sums, int64 [rows]; words int32, 0 where there is none.

    Weights count from the block's start: `whole_weights` makes them those of the checksum. Halves of 16 bits add up in
    32 bits.
    """
    place = tl.arange(0, 8)[None, :] * nbytes
    part = words << (8 * (place & 3))
    low = part & 0xFFFF
    high = (part >> 16) & 0xFFFF
    total = tl.sum(low, axis=1).to(tl.int64) + (tl.sum(high, axis=1).to(tl.int64) << 16)
    within = tl.sum(low * (place >> 2), axis=1).to(tl.int64) + (tl.sum(high * (place >> 2), axis=1).to(tl.int64) << 16)
    weight = (first + 8 * tl.arange(0, CHUNK // 8)) * nbytes // 4 + 1
    return total, total * weight + within


@triton.jit
def whole_weights(total, weighted, block, nbytes):
    """A block's weighted sum with weights that count from the tensor's start."""
    return weighted + block * (BLOCK // 4) * nbytes * total


@triton.jit
def _front_sums_kernel(message_ptr, info_ptr, sums_ptr):
    # 1. The front's checksum without header_sum itself.
    program = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * _CHUNK
    lane = tl.arange(0, _CHUNK)
    payload = tl.load(info_ptr + PAYLOAD)
    total = tl.zeros([_CHUNK], tl.int64)
    weighted = tl.zeros([_CHUNK], tl.int64)
    for start in range(program * _CHUNK, (payload + 3) // 4, stride):
        index = start + lane
        word = tl.zeros([_CHUNK], tl.int64)
        for k in tl.static_range(4):
            place = 4 * index + k
            counts = (place < payload) & ((place < HEADER_SUM_AT) | (place >= HEADER_SUM_AT + 8))
            word += tl.load(message_ptr + place, mask=counts, other=0).to(tl.int64) << (8 * k)
        total += word
        weighted += word * (index + 1)

    # 2. How much of the end is not zero.
    nbytes = tl.load(info_ptr + NBYTES)
    capacity = tl.load(info_ptr + CAPACITY)
    trailing = tl.zeros([_CHUNK], tl.int64)
    for start in range(nbytes + program * _CHUNK, capacity, stride):
        place = start + lane
        trailing |= tl.load(message_ptr + place, mask=place < capacity, other=0).to(tl.int64)
    tl.store(sums_ptr + 3 * program, tl.sum(total, axis=0))
    tl.store(sums_ptr + 3 * program + 1, tl.sum(weighted, axis=0))
    tl.store(sums_ptr + 3 * program + 2, tl.sum(trailing, axis=0))


@triton.jit
def front_total(sums_ptr, num_programs):
    """From `front_sums` the checksum of the front, and something that is 0 if only zeros follow the message."""
    k = tl.arange(0, _MAX_PROGRAMS)
    exists = k < num_programs
    total = tl.sum(tl.load(sums_ptr + 3 * k, mask=exists, other=0), axis=0)
    weighted = tl.sum(tl.load(sums_ptr + 3 * k + 1, mask=exists, other=0), axis=0)
    return total + (weighted << 20), tl.max(tl.load(sums_ptr + 3 * k + 2, mask=exists, other=0), axis=0)


def front_sums(message: Tensor, info: Tensor) -> Tensor:
    """int64 [programs, 3], for `front_total`: parts of the two sums of the front's checksum, and of what follows."""
    num_programs = min(max(1, -(-message.numel() // 1 << 14)), _MAX_PROGRAMS.value)
    sums = torch.empty(num_programs, 3, dtype=torch.int64, device=message.device)
    with _on_device(message):
        _front_sums_kernel[(num_programs,)](message, info, sums, enable_fp_fusion=False)
    return sums
