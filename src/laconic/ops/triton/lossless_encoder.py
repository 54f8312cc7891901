"""Encoding of lossless messages in Triton: kernels measure blocks, a prefix sum places them, kernels write them.

The offsets are 64-bit sums over the blocks in order, so messages are the same in every run, and the host never waits:
the lengths, whether coding pays and whether the message fits stay on the device.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.lossless import CODES, DTYPE_NUMBERS, words_of
from laconic.ops.triton import lossless_words as shared
from laconic.ops.triton.blockwise import _on_device
from laconic.ops.triton.kernel_constants import KernelConstant

_SAMPLE = KernelConstant(256)
_SPAN = KernelConstant(32)
_PROBE = KernelConstant(64)
_NUM_RANK_CODES = shared.NUM_RANK_CODES
_RAW = shared.RAW
_TOO_LONG = shared.TOO_LONG
_BLOCK = shared.BLOCK
_COUNTS = ("numel", "num_blocks")
"""Compiled once for all tensors, not anew for 1 or for multiples of 16."""

_CHUNK = 512
_NUM_WARPS = 1
"""Words that the common kernels take at a time, and their warps.

A program of one warp needs no barrier, adds up by shuffles and shares nothing; a multiprocessor holds many of them. A
block is worked on chunk by chunk, so that its words need not fit the registers.
"""
_MAX_PROGRAMS = 2048
"""Of the writing kernel; each has scratch for 4096 words and as many bytes, most often used in part."""

_RANK_WARPS = 16
"""Of the kernels for blocks by rank, so that 4096 words and what is known of each fit the registers.

With 128 registers a thread little fits beside the words. So words are read again where they are needed again, loops
move nothing out (`disable_licm`: numbers and addresses of lanes would fill the registers for the whole loop), and what
pairs each of 256 values with others is added up over the first axis, inside a thread.
"""
_GROUP = KernelConstant(16)
"""Blocks that a program of those kernels looks at, most often to find that none of them is for it."""
_MAX_RANK_PROGRAMS = 512

# What `_measure_kernel` tells of a block, beside kind, base (bit 8) and nest (bit 16).
_TRIES_RANKS = KernelConstant(22)
_DROPS_ZEROS = KernelConstant(23)
_NUM_LEFT = KernelConstant(32)


# --- what a block becomes ---


@triton.jit
def _as_numbers(words, NBYTES: tl.constexpr):
    """The bits of words as int32, those of two bytes without their sign's copies."""
    words = words.to(tl.int32)
    if NBYTES == 2:
        words = words & 0xFFFF
    return words


@triton.jit
def _load_words(words_ptr, block, i, n, NBYTES: tl.constexpr):
    return _as_numbers(tl.load(words_ptr + block * _BLOCK + i, mask=i < n, other=0), NBYTES)


@triton.jit
def _load_block(ptr, n, NBYTES: tl.constexpr):
    """The words [4096] of a block, 0 from the n-th on."""
    # Eight words share a mask, so that they are one access; those behind the last whole eight are loaded one by one.
    i = tl.arange(0, _BLOCK)
    words = tl.load(ptr + i, mask=i // 8 < n // 8, other=0)
    rest = (i // 8 == n // 8) & (i < n)
    return _as_numbers(words | tl.load(ptr + i, mask=rest, other=0), NBYTES)


@triton.jit
def _exponent(words, LAYOUT: tl.constexpr):
    mask: tl.constexpr = (1 << ((LAYOUT >> 8) & 15)) - 1
    return ((words >> ((LAYOUT >> 3) & 31)) & mask) ^ ((LAYOUT >> 21) & 15)


@triton.jit
def _load_chunk(ptr, first, n, NBYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Words [CHUNK // 8, 8] of a block from `first` on, a multiple of CHUNK; 0 from the n-th word on."""
    if first + CHUNK <= n:  # without a mask, so that accesses are wide
        if NBYTES == 4:
            # A row is two accesses.
            row = ptr + first + 8 * tl.arange(0, CHUNK // 8)[:, None]
            half = tl.arange(0, 4)[None, :]
            both = tl.join(tl.load(row + half), tl.load(row + 4 + half))
            words = tl.reshape(tl.permute(both, [0, 2, 1]), [CHUNK // 8, 8])
        else:
            words = tl.load(ptr + shared.chunk_places(first, CHUNK))
    else:
        place = shared.chunk_places(first, CHUNK)
        words = tl.load(ptr + shared.scattered(first, shared.chunk_places(0, CHUNK)), mask=place < n, other=0)
    return _as_numbers(words, NBYTES)


@triton.jit
def _cover(sums, starts, SIZE: tl.constexpr):
    """How much of the counts whose running sums are `sums` [32] lies in windows of SIZE from each of `starts` on."""
    last = tl.gather(sums, tl.minimum(tl.maximum(starts + SIZE - 1, 0), _SPAN - 1), 0)
    before = tl.gather(sums, tl.minimum(tl.maximum(starts - 1, 0), _SPAN - 1), 0)
    return tl.where(starts + SIZE > 0, last, 0) - tl.where(starts > 0, before, 0)


@triton.jit
def _widen_window(sums, start, SIZE: tl.constexpr, CODES: tl.constexpr):
    """The best window around the one at `start`: how far it starts below, and how much it covers."""
    offset = tl.arange(0, 8)
    cover = _cover(sums, start - offset, SIZE)
    # Of equal ones the lowest start.
    best = tl.max(tl.where(offset <= CODES, cover * 64 + offset, -1), axis=0)
    return best & 63, best >> 6


@triton.jit
def _fit(sums, num_counted, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """Windows for three tiers: bits on the sample, the innermost one's start in the span, o2, o3."""
    c1: tl.constexpr = (1 << W1) - 1
    c2: tl.constexpr = (1 << W2) - 1
    c3: tl.constexpr = (1 << W3) - 1
    p = tl.arange(0, _SPAN)
    cover = _cover(sums, p, c1)
    best = tl.max(tl.where(p <= _SPAN - c1, cover * 64 + (_SPAN - 1 - p), -1), axis=0)
    start = _SPAN - 1 - (best & 63)
    left = num_counted - (best >> 6)
    cost = W1 * num_counted + W2 * left
    o2, covered = _widen_window(sums, start, c1 + c2, c2)
    left = num_counted - covered
    cost += W3 * left
    o3, covered = _widen_window(sums, start - o2, c1 + c2 + c3, c3)
    return cost + 8 * (num_counted - covered), start, o2, o3


@triton.jit
def _choose(words_ptr, block, n, LAYOUT: tl.constexpr, CODE: tl.constexpr):
    """The encoder's decisions (docs/formats.md, steps 1 to 3): bits 0-3 of the kind, base, o2, o3."""
    # 1. The sample and its zeros.
    s = tl.arange(0, _SAMPLE)
    i = (s // 32) * 512 + s % 32
    sampled = i < n
    words = _load_words(words_ptr, block, i, n, LAYOUT & 7)
    num_sampled = (n // 512) * 32 + tl.minimum(n % 512, 32)
    num_zeros = tl.sum((sampled & (words == 0)).to(tl.int32), axis=0)
    zeros_out = 8 * num_zeros > num_sampled
    counted = sampled & ((words | (zeros_out == 0).to(tl.int32)) != 0)
    num_counted = num_sampled - tl.where(zeros_out, num_zeros, 0)

    # 2. How often each exponent of the span came.
    e = _exponent(words, LAYOUT)
    finite = counted
    if (LAYOUT >> 8) & 15 == 8:
        finite = counted & (e != 255)
    first = tl.max(tl.where(finite, e, 0), axis=0) - (_SPAN - 1)
    in_span = finite & (e >= first)
    sums = tl.cumsum(tl.histogram(tl.where(in_span, e - first, 0), _SPAN, mask=in_span), axis=0)

    # 3. Windows.
    if CODE == 1:
        start = _fit(sums, num_counted, 3, 0, 0)[1]
        kind = tl.zeros_like(start) + 1
        o2 = tl.zeros_like(start)
        o3 = tl.zeros_like(start)
    else:
        cost, start, o2, o3 = _fit(sums, num_counted, 2, 2, 3)
        other_cost, other_start, other_o2, other_o3 = _fit(sums, num_counted, 3, 2, 2)
        is_other = other_cost < cost
        kind = tl.where(is_other, 3, 2)
        start = tl.where(is_other, other_start, start)
        o2 = tl.where(is_other, other_o2, o2)
        o3 = tl.where(is_other, other_o3, o3)
    kind += tl.where(zeros_out, shared.ZEROS_LEFT_OUT, 0)
    return kind, (first + start) & 255, o2, o3


@triton.jit
def _has_few(values, counted, eighths):
    """Whether the bytes [64] of the probe take at most so many eighths as many values as there are words."""
    num_values = tl.sum((tl.histogram(values, 256, mask=counted) > 0).to(tl.int32), axis=0)
    num_counted = tl.sum(counted.to(tl.int32), axis=0)
    return (8 * num_values <= eighths * num_counted) & (num_counted > 0)


@triton.jit
def _may_be_ranked(words_ptr, block, n, drops_zeros, low_plane, is_bad, LAYOUT: tl.constexpr):
    """Whether ranks may be shorter (docs/formats.md, step 4); `low_plane` of float32, negative for none."""
    s = tl.arange(0, _PROBE)
    i = (s // 8) * 512 + s % 8
    words = _load_words(words_ptr, block, i, n, LAYOUT & 7)
    counted = (i < n) & ((words | (drops_zeros == 0).to(tl.int32)) != 0)
    top: tl.constexpr = (LAYOUT & 7) - 1
    if LAYOUT & 7 == 1:
        found = _has_few(words, counted, tl.where(is_bad, 6, 3))
    else:
        found = _has_few(shared.plane_of(words, top - 1, LAYOUT), counted, 6)
        if is_bad:
            found = found | _has_few(shared.plane_of(words, top, LAYOUT), counted, 6)
        if LAYOUT & 7 == 4:
            low = (words >> (8 * tl.maximum(low_plane, 0))) & 255
            found = found | ((low_plane >= 0) & _has_few(low, counted, 6))
    return found


@triton.jit
def _rank_plane(values, kept, m, is_last):
    """Rank of every byte value [256] in a plane [4096], and its shortest code: number, values listed, bytes."""
    # 1. Ranks: by count, equal counts by value. All pairs at once would not fit the registers.
    v = tl.arange(0, 256)
    count = tl.histogram(values, 256, mask=kept)
    num_values = tl.sum((count > 0).to(tl.int32), axis=0)
    key = count * 256 + (255 - v)
    rank = tl.zeros_like(v)
    for start in tl.range(0, 256, _SPAN, disable_licm=True):
        others = tl.gather(key, start + tl.arange(0, _SPAN), 0)
        rank += tl.sum((others[:, None] > key[None, :]).to(tl.int32), axis=0)

    # 2. What each code costs.
    c = tl.arange(0, _NUM_RANK_CODES)
    total = c * 0 + 2
    size = c * 0
    left = c * 0 + m
    for tier in tl.static_range(3):
        width = ((tl.full([], shared.RANK_WIDTHS[tier], tl.int64) >> (4 * c)) & 15).to(tl.int32)
        total += width * ((left + 7) // 8)
        size += (1 << width) - 1
        left = m - tl.sum(tl.where(rank[:, None] < size[None, :], count[:, None], 0), axis=0)
    is_complete = num_values <= size + 1
    listed = tl.where(is_complete, num_values, size)
    total += listed + tl.where(is_complete, 0, left)

    # 3. The shortest; one without any bits is not for the last plane.
    total = tl.where((c == 0) & (num_values == 1) & is_last, 1 << 20, total)
    best = tl.min(total * _NUM_RANK_CODES + c, axis=0)
    number = best % _NUM_RANK_CODES
    return rank, number, tl.sum(tl.where(c == number, listed, 0), axis=0), best // _NUM_RANK_CODES


@triton.jit
def _is_outside(distance, offset, size):
    """Whether distances from the outermost window's start are outside the window at `offset`."""
    return (distance - offset).to(tl.uint32) >= size.to(tl.uint32)


@triton.jit(do_not_specialize=_COUNTS)
def _measure_kernel(
    words_ptr,
    numel,
    num_blocks,
    measures_ptr,
    choices_ptr,
    LAYOUT: tl.constexpr,
    CODE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lengths, the checksum's two parts and whether ranked, int64 [4, num_blocks]; choices int64."""
    NBYTES: tl.constexpr = LAYOUT & 7
    block = tl.program_id(0).to(tl.int64)
    n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
    kind = tl.zeros_like(n)
    base = tl.zeros_like(n)
    o2 = tl.zeros_like(n)
    o3 = tl.zeros_like(n)
    if CODE != 0:
        kind, base, o2, o3 = _choose(words_ptr, block, n, LAYOUT, CODE)
    is_masked = (kind & shared.ZEROS_LEFT_OUT) != 0

    # 1. One pass over the words. Windows contain each other, so what a tier passes on is what its window does not hold.
    w1 = shared.tier_width(kind & 7, 0)
    w2 = shared.tier_width(kind & 7, 1)
    w3 = shared.tier_width(kind & 7, 2)
    size1 = (1 << w1) - 1
    size2 = size1 + (1 << w2) - 1
    size3 = size2 + (1 << w3) - 1
    start = base - o2 - o3
    none = tl.zeros([CHUNK // 8], tl.int32)
    nonzero = none
    passed1 = none
    passed2 = none
    passed3 = none
    most0 = none
    most1 = none
    totals = none.to(tl.int64)
    weighted = totals
    for first in tl.range(0, n, CHUNK, disable_licm=True):
        words = _load_chunk(words_ptr + block * _BLOCK, first, n, NBYTES, CHUNK)
        of_rows, weighted_rows = shared.row_sums(words, first, NBYTES, CHUNK)
        totals += of_rows
        weighted += weighted_rows
        if CODE != 0:
            if is_masked:
                nonzero += tl.sum((words != 0).to(tl.int32), axis=1)
            if NBYTES == 4:
                most0 = tl.maximum(most0, tl.max(words & 255, axis=1))
                most1 = tl.maximum(most1, tl.max((words >> 8) & 255, axis=1))
            e = _exponent(words, LAYOUT)
            distance = (e - start) & 255
            passed1 += tl.sum(_is_outside(distance, o2 + o3, size1).to(tl.int32), axis=1)
            passed2 += tl.sum(_is_outside(distance, o3, size2).to(tl.int32), axis=1)
            passed3 += tl.sum((distance >= size3).to(tl.int32), axis=1)
    total = tl.sum(totals, axis=0)
    length_ptr = measures_ptr + block
    is_ranked_ptr = length_ptr + 3 * num_blocks.to(tl.int64)
    tl.store(length_ptr + num_blocks, total)
    weighted_total = shared.whole_weights(total, tl.sum(weighted, axis=0), block, NBYTES)
    tl.store(length_ptr + 2 * num_blocks.to(tl.int64), weighted_total)
    tl.store(is_ranked_ptr, 0)
    if CODE == 0:
        tl.store(length_ptr, 0)
    else:
        # 2. Words that do not count were counted with the others: they are all zero.
        flip: tl.constexpr = (LAYOUT >> 21) & 15
        m = tl.where(is_masked, tl.sum(nonzero, axis=0), n)
        num_others = ((n + CHUNK - 1) // CHUNK) * CHUNK - m
        distance = (flip - start) & 255
        k2 = tl.sum(passed1, axis=0) - tl.where(_is_outside(distance, o2 + o3, size1), num_others, 0)
        k3 = tl.sum(passed2, axis=0) - tl.where(_is_outside(distance, o3, size2), num_others, 0)
        k4 = tl.sum(passed3, axis=0) - tl.where(distance >= size3, num_others, 0)

        # 3. Its length. Of float32's lower two byte planes only those that are not all zeros are there.
        num_bits: tl.constexpr = ((LAYOUT >> 3) & 31) - ((LAYOUT >> 15) & 31) + ((LAYOUT >> 20) & 1)
        length = tl.where(is_masked, (n + 7) // 8, 0) + num_bits * ((m + 7) // 8) + ((LAYOUT >> 12) & 3) * m
        low_plane = tl.zeros_like(n) - 1
        if NBYTES == 4:
            most0 = tl.max(most0, axis=0)
            most1 = tl.max(most1, axis=0)
            kind += tl.where(most0 == 0, shared.PLANE_LEFT_OUT, 0) + tl.where(most1 == 0, shared.PLANE_LEFT_OUT << 1, 0)
            length -= tl.where(most0 == 0, m, 0) + tl.where(most1 == 0, m, 0)
            low_plane = tl.where(most0 != 0, 0, tl.where(most1 != 0, 1, -1))
        length += w1 * ((m + 7) // 8) + w2 * ((k2 + 7) // 8) + w3 * ((k3 + 7) // 8) + k4

        # 4. Raw if that is shorter, and whether ranks are tried.
        raw_nbytes = n * NBYTES
        is_bad = (16 * length >= 15 * raw_nbytes) | (8 * k4 > m)
        drops_zeros = is_masked & (NBYTES > 1)
        tries_ranks = _may_be_ranked(words_ptr, block, n, drops_zeros, low_plane, is_bad, LAYOUT)
        choice = tl.where(length >= raw_nbytes, 0, kind | (base << 8) | (o2 << 16) | (o3 << 19))
        choice = choice | (tries_ranks.to(tl.int32) << _TRIES_RANKS) | (drops_zeros.to(tl.int32) << _DROPS_ZEROS)
        tl.store(length_ptr, tl.minimum(length, raw_nbytes).to(tl.int64))
        tl.store(choices_ptr + block, choice.to(tl.int64) | (m.to(tl.int64) << _NUM_LEFT))


@triton.jit(do_not_specialize=_COUNTS)
def _rank_kernel(words_ptr, numel, num_blocks, measures_ptr, choices_ptr, LAYOUT: tl.constexpr):
    """Of the blocks for which ranks are tried, those where they are shorter: length, whether ranked, choice."""
    NBYTES: tl.constexpr = LAYOUT & 7
    i = tl.arange(0, _BLOCK)
    first = tl.program_id(0) * _GROUP
    end = tl.minimum(first + _GROUP, num_blocks)
    group = first + tl.arange(0, _GROUP)
    choices = tl.load(choices_ptr + group, mask=group < end, other=0)
    if tl.max((choices >> _TRIES_RANKS) & 1, axis=0) != 0:
        for index in tl.range(first, end, disable_licm=True):
            block = tl.zeros([], tl.int64) + index
            choice = tl.load(choices_ptr + block)
            if ((choice >> _TRIES_RANKS) & 1) != 0:
                n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
                drops_zeros = ((choice >> _DROPS_ZEROS) & 1) != 0
                num_ranked = tl.where(drops_zeros, (choice >> _NUM_LEFT).to(tl.int32), n)
                nbytes = tl.where(drops_zeros, (n + 7) // 8, 0)
                for number in tl.range(0, NBYTES, disable_licm=True):
                    words = _load_block(words_ptr + block * _BLOCK, n, NBYTES)
                    ranked = (i < n) & ((words | (drops_zeros == 0).to(tl.int32)) != 0)
                    values = shared.plane_of(words, number, LAYOUT)
                    nbytes += _rank_plane(values, ranked, num_ranked, number == NBYTES - 1)[3]
                if nbytes < tl.load(measures_ptr + block):
                    kind = shared.RANKED + tl.where(drops_zeros, shared.ZEROS_LEFT_OUT, 0)
                    tl.store(measures_ptr + block, nbytes.to(tl.int64))
                    tl.store(measures_ptr + 3 * num_blocks.to(tl.int64) + block, 1)
                    tl.store(choices_ptr + block, ((choice >> _NUM_LEFT) << _NUM_LEFT) | kind)


# --- the message ---


@triton.jit(do_not_specialize=[*_COUNTS, "message_nbytes", "num_dims", *(f"size{d}" for d in range(8))])
def _write_header_kernel(
    message_ptr, info_ptr, measures_ptr, ends_ptr, numel, num_blocks, message_nbytes, num_dims, size0, size1, size2,
    size3, size4, size5, size6, size7,
    ITEM_NBYTES: tl.constexpr, DTYPE: tl.constexpr, CODE: tl.constexpr, HAS_CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where blocks end, whether coding pays and the message fits, and the header and shape, but for header_sum."""
    total = tl.zeros([], tl.int64)
    original_sum = tl.zeros([], tl.int64)
    weighted_sum = tl.zeros([], tl.int64)
    num_ranked = tl.zeros([], tl.int64)
    for first in tl.range(0, num_blocks, shared.LISTED):
        block = first + tl.arange(0, shared.LISTED)
        exists = block < num_blocks
        ptr = measures_ptr + block
        length = tl.load(ptr, mask=exists, other=0)
        tl.store(ends_ptr + block, total + tl.cumsum(length, axis=0), mask=exists)
        total += tl.sum(length, axis=0)
        stride = num_blocks + tl.zeros([], tl.int64)
        original_sum += tl.sum(tl.load(ptr + stride, mask=exists, other=0), axis=0)
        weighted_sum += tl.sum(tl.load(ptr + 2 * stride, mask=exists, other=0), axis=0)
        num_ranked += tl.sum(tl.load(ptr + 3 * stride, mask=exists, other=0), axis=0)
    shape_end = (tl.zeros_like(total) + num_dims) * 8 + shared.HEADER_NBYTES
    original_nbytes = (tl.zeros_like(total) + numel) * ITEM_NBYTES
    capacity = tl.zeros_like(total) + message_nbytes
    coded_nbytes = total + num_blocks * shared.ENTRY_NBYTES
    is_coded = (coded_nbytes < original_nbytes) & (CODE != 0)
    nbytes = shape_end + tl.where(is_coded, coded_nbytes, original_nbytes)
    fits = nbytes <= capacity
    nbytes = tl.where(fits, nbytes, shape_end)
    code = tl.where(fits, tl.where(is_coded, CODE, _RAW), _TOO_LONG).to(tl.int64)
    payload = tl.where(is_coded & fits, shape_end + num_blocks * shared.ENTRY_NBYTES, shape_end)
    if not HAS_CAPACITY:
        capacity = nbytes

    is_newer = (is_coded & fits & (num_ranked > 0)) | (DTYPE >= shared.FIRST_DTYPES)
    version = tl.where(is_newer, shared.RANKED_VERSION, shared.VERSION).to(tl.int64)

    tl.store(info_ptr + shared.CODE, code)
    tl.store(info_ptr + shared.NBYTES, nbytes)
    tl.store(info_ptr + shared.CAPACITY, nbytes)  # the zeros behind are not looked at
    tl.store(info_ptr + shared.DIRECTORY, shape_end)
    tl.store(info_ptr + shared.PAYLOAD, payload)
    front = (tl.zeros_like(total) + num_dims) << 56
    front = front | (code << 48) | (tl.full([], DTYPE, tl.int64) << 40) | (version << 32)
    shared.store_u64(message_ptr, 0, front | shared.MAGIC)
    shared.store_u64(message_ptr, 8, numel)
    shared.store_u64(message_ptr, 16, nbytes)
    shared.store_u64(message_ptr, 24, capacity)
    shared.store_u64(message_ptr, 32, original_sum)
    shared.store_u64(message_ptr, 40, weighted_sum)
    shared.store_u64(message_ptr, 56, 0)
    if num_dims > 0:
        shared.store_u64(message_ptr, 64, size0)
    if num_dims > 1:
        shared.store_u64(message_ptr, 72, size1)
    if num_dims > 2:
        shared.store_u64(message_ptr, 80, size2)
    if num_dims > 3:
        shared.store_u64(message_ptr, 88, size3)
    if num_dims > 4:
        shared.store_u64(message_ptr, 96, size4)
    if num_dims > 5:
        shared.store_u64(message_ptr, 104, size5)
    if num_dims > 6:
        shared.store_u64(message_ptr, 112, size6)
    if num_dims > 7:
        shared.store_u64(message_ptr, 120, size7)


@triton.jit
def _store_planes(ptr, codes, first, num_codes, width):
    """`width` planes, at most 4, of codes [rows, 8], from the `first` of num_codes on; codes are 0 behind the last."""
    # Bit p of a code goes to bit 8 p, and eight codes beside each other make a byte of each plane.
    spread = (codes * 0x204081) & 0x01010101
    packed = tl.sum(spread << tl.arange(0, 8)[None, :], axis=1)
    byte = first // 8 + tl.arange(0, codes.shape[0])
    nbytes = (num_codes + 7) // 8
    for plane in tl.range(0, width, disable_licm=True):
        tl.store(ptr + plane * nbytes + byte, (packed >> (8 * plane)).to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _rows(values):
    return tl.reshape(values, [_BLOCK // 8, 8])


@triton.jit
def _keep(ptr, values, left):
    """Write `values` [4096] where `left`, one after the other, to memory that the program owns; return how many."""
    number = left.to(tl.int32)
    rank = tl.cumsum(number, axis=0) - number
    tl.debug_barrier()
    # As 64 bits: so it is the ranks that change hands between threads, and not pointers.
    tl.store(ptr + rank.to(tl.int64), values.to(ptr.dtype.element_ty), mask=left)
    tl.debug_barrier()
    return tl.sum(number, axis=0)


@triton.jit
def _load_kept(ptr, count, NBYTES: tl.constexpr):
    """What `_keep` has written, zeros behind: int32 [4096]."""
    i = tl.arange(0, _BLOCK)
    return tl.where(i < count, _as_numbers(tl.load(ptr + i), NBYTES), 0)


@triton.jit
def _write_plane(ptr, scratch_ptr, values, is_last, m, NBYTES: tl.constexpr):
    """A byte plane by rank, of which the first m of values [4096] count; returns its bytes."""
    # 1. Its code and the values by rank.
    i = tl.arange(0, _BLOCK)
    rank_of, number, num_listed, nbytes = _rank_plane(values, i < m, m, is_last)
    v = tl.arange(0, 256)
    tl.store(ptr, number.to(tl.uint8))
    tl.store(ptr + 1, num_listed.to(tl.uint8))
    tl.store(ptr + 2 + rank_of, v.to(tl.uint8), mask=rank_of < num_listed)
    ptr += 2 + num_listed

    # 2. Ranks, tier by tier, and what escapes them.
    size = tl.zeros_like(m)
    for tier in tl.range(0, 3, disable_licm=True):
        width = shared.rank_width(number, tier)
        if width > 0:
            passes = (1 << width) - 1
            rank = tl.gather(rank_of, values, 0) - size
            codes = tl.where(i < m, tl.minimum(rank, passes), 0)
            nbytes_plane = (m + 7) // 8
            _store_planes(ptr, _rows(codes & 15), 0, m, tl.minimum(width, 4))
            _store_planes(ptr + 4 * nbytes_plane, _rows(codes >> 4), 0, m, width - 4)
            ptr += width * nbytes_plane
            m = _keep(scratch_ptr, values, (i < m) & (rank >= passes))
            values = _load_kept(scratch_ptr, m, NBYTES)
            size += passes
    tl.store(ptr + i, values.to(tl.uint8), mask=i < tl.where(num_listed <= size, m, 0))
    return nbytes


@triton.jit
def _bits_of(words, LAYOUT: tl.constexpr):
    """What the bit planes in front of the exponents hold of words."""
    first_bit: tl.constexpr = (LAYOUT >> 15) & 31
    low_bits: tl.constexpr = ((LAYOUT >> 3) & 31) - first_bit
    value = (words >> first_bit) & ((1 << low_bits) - 1)
    if (LAYOUT >> 20) & 1 == 1:
        value = value | (((words >> (8 * (LAYOUT & 7) - 1)) & 1) << low_bits)
    return value


@triton.jit
def _byte_of(words, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """What a byte plane holds of words."""
    words = _as_numbers(words, LAYOUT & 7)
    if ((LAYOUT >> 14) & 1 == 1) and (PLANE == ((LAYOUT >> 12) & 3) - 1):
        return ((words >> (8 * PLANE)) & 127) | ((words >> (8 * (LAYOUT & 7) - 8)) & 128)
    else:
        return (words >> (8 * PLANE)) & 255


@triton.jit
def _four_bytes(source_ptr, group, m, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Bytes 4 * group to 4 * group + 3 of a plane as uint64 below 2^32, where the first m words have all of them."""
    k = tl.arange(0, 4)[None, :]
    is_whole = (group >= 0) & (4 * group + 4 <= m)
    words = tl.load(source_ptr + 4 * group[:, None] + k, mask=is_whole[:, None], other=0)
    return tl.sum(_byte_of(words, PLANE, LAYOUT) << (8 * k), axis=1).to(tl.uint32).to(tl.uint64)


@triton.jit
def _store_byte_plane(
    message_ptr, start, source_ptr, m, PLANE: tl.constexpr, LAYOUT: tl.constexpr, CHUNK: tl.constexpr
):
    """A byte plane of the m words at source_ptr, from byte `start` of the message on."""
    # 1. Aligned words of the message, each from two aligned groups of four.
    shift = (start & 3).to(tl.int32)
    words_ptr = message_ptr.to(tl.pointer_type(tl.int32)) + (start >> 2)
    for first in tl.range(0, m // 4, CHUNK // 4, disable_licm=True):
        group = first + tl.arange(0, CHUNK // 4)
        before = _four_bytes(source_ptr, group - 1, m, PLANE, LAYOUT)
        both = (_four_bytes(source_ptr, group, m, PLANE, LAYOUT) << 32) | before
        value = (both >> (32 - 8 * shift).to(tl.uint64)).to(tl.int32)
        tl.store(words_ptr + group, value, mask=(4 * group >= shift) & (4 * group + 4 <= m))

    # 2. The bytes at both ends that are not whole words.
    k = tl.arange(0, 16)
    i = tl.where(k < 8, k, m - 16 + k)
    exists = (i >= 0) & (i < m)
    words = tl.load(source_ptr + i, mask=exists, other=0)
    tl.store(message_ptr + start + i, _byte_of(words, PLANE, LAYOUT).to(tl.uint8), mask=exists)


@triton.jit
def _write_tier(ptr, source_ptr, kept_ptr, m, width, start, offset, inner, LAYOUT: tl.constexpr, CHUNK: tl.constexpr):
    """A tier's planes of m exponents; keep those that it passes on and return how many they are.

    The exponents are those of the words at source_ptr, or if LAYOUT is 0 the bytes there, which may be those kept: what
    is kept is in front of what is yet to be read.
    """
    passes = (1 << width) - 1
    num_left = tl.zeros_like(m)
    for first in tl.range(0, m, CHUNK, disable_licm=True):
        place = shared.chunk_places(first, CHUNK)
        if LAYOUT == 0:
            e = tl.load(source_ptr + place).to(tl.int32)
        else:
            e = _exponent(_load_chunk(source_ptr, first, m, LAYOUT & 7, CHUNK), LAYOUT)
        if first + CHUNK > m:  # those behind have code 0
            e = tl.where(place < m, e, start + tl.where(offset > 0, 0, inner))
        distance = (e - start) & 255
        value = distance - tl.where(distance < offset, 0, inner)
        further = value >= passes
        _store_planes(ptr, tl.minimum(value, passes), first, m, width)
        rank, count = shared.ranks(further, tl.sum(further.to(tl.int32), axis=1))
        tl.debug_barrier()
        tl.store(kept_ptr + shared.scattered(num_left, rank), e.to(tl.uint8), mask=further)
        num_left += count
    tl.debug_barrier()
    return num_left


@triton.jit(do_not_specialize=_COUNTS)
def _write_kernel(
    words_ptr, numel, num_blocks, info_ptr, ends_ptr, lengths_ptr, choices_ptr, scratch_ptr, message_ptr,
    LAYOUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The lists, and payloads of the blocks that are not ranked; scratch of each program: 4096 words and 4096 bytes."""
    NBYTES: tl.constexpr = LAYOUT & 7
    num_bits: tl.constexpr = ((LAYOUT >> 3) & 31) - ((LAYOUT >> 15) & 31) + ((LAYOUT >> 20) & 1)
    code = tl.load(info_ptr + shared.CODE)
    lists_ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY)
    payload = tl.load(info_ptr + shared.PAYLOAD)
    scratch_ptr += tl.program_id(0).to(tl.int64) * (_BLOCK + _BLOCK // NBYTES)
    kept_ptr = (scratch_ptr + _BLOCK).to(tl.pointer_type(tl.uint8))
    lane = tl.arange(0, CHUNK)
    end = tl.where(code == _TOO_LONG, 0, num_blocks)
    for index in tl.range(tl.program_id(0), end, tl.num_programs(0), disable_licm=True):
        # 1. What and where.
        block = tl.zeros_like(code) + index
        n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
        source_ptr = words_ptr + block * _BLOCK
        kind = tl.zeros_like(n)
        choice = tl.zeros_like(code)
        at = payload + block * _BLOCK * NBYTES
        if code != _RAW:
            choice = tl.load(choices_ptr + block)
            kind = (choice & 255).to(tl.int32)
            length = tl.load(lengths_ptr + block)
            at = payload + tl.load(ends_ptr + block) - length
            tl.store(lists_ptr + 2 * block, (length & 255).to(tl.uint8))
            tl.store(lists_ptr + 2 * block + 1, (length >> 8).to(tl.uint8))
            tl.store(lists_ptr + 2 * num_blocks + block, kind.to(tl.uint8))
            tl.store(lists_ptr + 3 * num_blocks + block, ((choice >> 8) & 255).to(tl.uint8))
            tl.store(lists_ptr + 4 * num_blocks + block, ((choice >> 16) & 63).to(tl.uint8))

        if kind == 0:
            # 2. The original bytes.
            bytes_ptr = source_ptr.to(tl.pointer_type(tl.uint8))
            for first in tl.range(0, n * NBYTES, CHUNK, disable_licm=True):
                i = first + lane
                exists = i < n * NBYTES
                tl.store(message_ptr + at + i, tl.load(bytes_ptr + i, mask=exists, other=0), mask=exists)
        elif (kind & 7) != shared.RANKED:
            # 3. Zero mask. The m words that are left lie one after the other from here on.
            m = n
            if (kind & shared.ZEROS_LEFT_OUT) != 0:
                m = tl.zeros_like(n)
                for first in tl.range(0, n, CHUNK, disable_licm=True):
                    words = _load_chunk(source_ptr, first, n, NBYTES, CHUNK)
                    left = words != 0
                    _store_planes(message_ptr + at, left.to(tl.int32), first, n, 1)
                    rank, count = shared.ranks(left, tl.sum(left.to(tl.int32), axis=1))
                    place = shared.scattered(m, rank)
                    tl.store(scratch_ptr + place, words.to(scratch_ptr.dtype.element_ty), mask=left)
                    m += count
                at += (n + 7) // 8
                source_ptr = scratch_ptr
                tl.debug_barrier()

            # 4. Mantissas and signs.
            for plane in tl.static_range((LAYOUT >> 12) & 3):
                if (kind & (shared.PLANE_LEFT_OUT << plane)) == 0:
                    _store_byte_plane(message_ptr, at, source_ptr, m, plane, LAYOUT, CHUNK)
                    at += m
            ptr = message_ptr + at
            if num_bits > 0:
                for first in tl.range(0, m, CHUNK, disable_licm=True):
                    words = _load_chunk(source_ptr, first, m, NBYTES, CHUNK)
                    _store_planes(ptr, _bits_of(words, LAYOUT), first, m, num_bits)
                ptr += num_bits * ((m + 7) // 8)

            # 5. Exponents, tier by tier.
            start = ((choice >> 8) & 255).to(tl.int32)
            width = shared.tier_width(kind & 7, 0)
            num_left = _write_tier(ptr, source_ptr, kept_ptr, m, width, start, 0, 0, LAYOUT, CHUNK)
            ptr += width * ((m + 7) // 8)
            m = num_left
            inner = (1 << width) - 1
            for tier in tl.range(1, 3, disable_licm=True):
                width = shared.tier_width(kind & 7, tier)
                if width > 0:
                    offset = ((choice >> (13 + 3 * tier)) & 7).to(tl.int32)
                    start -= offset
                    num_left = _write_tier(ptr, kept_ptr, kept_ptr, m, width, start, offset, inner, 0, CHUNK)
                    ptr += width * ((m + 7) // 8)
                    m = num_left
                    inner += (1 << width) - 1
            for first in tl.range(0, m, CHUNK, disable_licm=True):
                i = first + lane
                tl.store(ptr + i, tl.load(kept_ptr + i), mask=i < m)
            tl.debug_barrier()


@triton.jit(do_not_specialize=_COUNTS)
def _write_ranked_kernel(
    words_ptr, numel, num_blocks, info_ptr, ends_ptr, lengths_ptr, choices_ptr, scratch_ptr, message_ptr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Payloads of the ranked blocks; scratch [programs, 2, 4096] of words."""
    NBYTES: tl.constexpr = LAYOUT & 7
    code = tl.load(info_ptr + shared.CODE)
    payload_ptr = message_ptr + tl.load(info_ptr + shared.PAYLOAD)
    scratch_ptr += tl.program_id(0).to(tl.int64) * (2 * _BLOCK)
    num_groups = tl.where((code == _TOO_LONG) | (code == _RAW), 0, (num_blocks + _GROUP - 1) // _GROUP)
    for number in tl.range(tl.program_id(0), num_groups, tl.num_programs(0), disable_licm=True):
        start = number * _GROUP
        end = tl.minimum(start + _GROUP, num_blocks)
        group = start + tl.arange(0, _GROUP)
        kinds = tl.load(choices_ptr + group, mask=group < end, other=0) & 7
        if tl.max((kinds == shared.RANKED).to(tl.int32), axis=0) != 0:
            for index in tl.range(start, end, disable_licm=True):
                block = tl.zeros([], tl.int64) + index
                choice = tl.load(choices_ptr + block)
                if (choice & 7) == shared.RANKED:
                    n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
                    source_ptr = words_ptr + block * _BLOCK
                    ptr = payload_ptr + tl.load(ends_ptr + block) - tl.load(lengths_ptr + block)
                    m = n
                    if (choice & shared.ZEROS_LEFT_OUT) != 0:
                        words = _load_block(source_ptr, n, NBYTES)
                        _store_planes(ptr, _rows((words != 0).to(tl.int32)), 0, n, 1)
                        ptr += (n + 7) // 8
                        source_ptr = scratch_ptr + _BLOCK
                        m = _keep(source_ptr, words, words != 0)
                    for plane in tl.range(0, NBYTES, disable_licm=True):
                        values = shared.plane_of(_load_block(source_ptr, m, NBYTES), plane, LAYOUT)
                        ptr += _write_plane(ptr, scratch_ptr, values, plane == NBYTES - 1, m, NBYTES)


@triton.jit(do_not_specialize=["num_sums"])
def _seal_kernel(message_ptr, sums_ptr, num_sums):
    """The checksum over the front, from `front_sums`: the last thing that is written."""
    shared.store_u64(message_ptr, shared.HEADER_SUM_AT, shared.front_total(sums_ptr, num_sums)[0])


def encode(x: Tensor, code: str, capacity_nbytes: int | None, size_nbytes: int) -> Tensor:
    """The message of `x` at the front of uint8 [size_nbytes]; arguments are checked by the caller."""
    layout, dtype = shared.packed_layout(x.dtype), DTYPE_NUMBERS[x.dtype]
    x = words_of(x.detach())
    nbytes = x.element_size()
    words = x.contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[nbytes])
    num_blocks = -(-words.numel() // _BLOCK.value)
    measures = torch.empty(4, num_blocks, dtype=torch.int64, device=x.device)
    choices = torch.empty(num_blocks, dtype=torch.int64, device=x.device)
    ends = torch.empty_like(choices)
    info = torch.empty(shared.INFO, dtype=torch.int64, device=x.device)
    new = torch.empty if capacity_nbytes is None else torch.zeros
    message = new(size_nbytes, dtype=torch.uint8, device=x.device)
    counts = (words.numel(), num_blocks)
    num_groups = -(-num_blocks // _GROUP.value)
    with _on_device(x):
        if num_blocks:
            _measure_kernel[(num_blocks,)](
                words, *counts, measures, choices,
                LAYOUT=layout, CODE=CODES[code], CHUNK=_CHUNK, num_warps=_NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        if num_blocks and CODES[code]:
            _rank_kernel[(num_groups,)](
                words, *counts, measures, choices, LAYOUT=layout, num_warps=_RANK_WARPS, enable_fp_fusion=False
            )
        _write_header_kernel[(1,)](
            message, info, measures, ends, *counts, size_nbytes, x.dim(), *x.shape, *[0] * (8 - x.dim()),
            ITEM_NBYTES=nbytes, DTYPE=dtype, CODE=CODES[code], HAS_CAPACITY=capacity_nbytes is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
        if num_blocks:
            read = (words, *counts, info, ends, measures, choices)
            num_programs = min(num_blocks, _MAX_PROGRAMS)
            size = _BLOCK.value + _BLOCK.value // nbytes
            scratch = torch.empty(num_programs, size, dtype=words.dtype, device=x.device)
            _write_kernel[(num_programs,)](
                *read, scratch, message, LAYOUT=layout, CHUNK=_CHUNK, num_warps=_NUM_WARPS, enable_fp_fusion=False
            )
        if num_blocks and CODES[code]:
            num_programs = min(num_groups, _MAX_RANK_PROGRAMS)
            scratch = torch.empty(num_programs, 2 * _BLOCK.value, dtype=words.dtype, device=x.device)
            _write_ranked_kernel[(num_programs,)](
                *read, scratch, message, LAYOUT=layout, num_warps=_RANK_WARPS, enable_fp_fusion=False
            )
        sums = shared.front_sums(message, info)
        _seal_kernel[(1,)](message, sums, len(sums), enable_fp_fusion=False)
    return message
