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

__all__ = ["encode"]

_SAMPLE = tl.constexpr(256)
_SPAN = tl.constexpr(32)
_PROBE = tl.constexpr(64)
_NUM_RANK_CODES = shared.NUM_RANK_CODES
_RAW = shared.RAW
_TOO_LONG = shared.TOO_LONG
_BLOCK = shared.BLOCK
_COUNTS = ("numel", "num_blocks")
"""Compiled once for all tensors, not anew for 1 or for multiples of 16."""

_NUM_WARPS = 16
"""Of the kernels that measure and write, so that 4096 words and what is known of each fit the registers.

With 128 registers a thread little fits beside the words. So words are read again where they are needed again, loops
move nothing out (`disable_licm`: numbers and addresses of lanes would fill the registers for the whole loop), and what
pairs each of 256 values with others is added up over the first axis, inside a thread.
"""
_MAX_PROGRAMS = 1024
"""Of the writing kernel; each has scratch for 8192 words, so that all of it stays in the L2 cache."""


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
def _cover(count, starts, SIZE: tl.constexpr):
    """How much of count [32] lies in windows of SIZE from each of `starts` [k] on."""
    p = tl.arange(0, _SPAN)
    inside = (p[None, :] >= starts[:, None]) & (p[None, :] < starts[:, None] + SIZE)
    return tl.sum(tl.where(inside, count[None, :], 0), axis=1)


@triton.jit
def _widen_window(count, start, SIZE: tl.constexpr, CODES: tl.constexpr):
    """The best window around the one at `start`: how far it starts below, and how much it covers."""
    offset = tl.arange(0, 8)
    cover = _cover(count, start - offset, SIZE)
    # Of equal ones the lowest start.
    best = tl.max(tl.where(offset <= CODES, cover * 64 + offset, -1), axis=0)
    return best & 63, best >> 6


@triton.jit
def _fit(count, num_counted, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """Windows for three tiers: bits on the sample, the innermost one's start in the span, o2, o3."""
    c1: tl.constexpr = (1 << W1) - 1
    c2: tl.constexpr = (1 << W2) - 1
    c3: tl.constexpr = (1 << W3) - 1
    p = tl.arange(0, _SPAN)
    cover = _cover(count, p, c1)
    best = tl.max(tl.where(p <= _SPAN - c1, cover * 64 + (_SPAN - 1 - p), -1), axis=0)
    start = _SPAN - 1 - (best & 63)
    left = num_counted - (best >> 6)
    cost = W1 * num_counted + W2 * left
    o2, covered = _widen_window(count, start, c1 + c2, c2)
    left = num_counted - covered
    cost += W3 * left
    o3, covered = _widen_window(count, start - o2, c1 + c2 + c3, c3)
    return cost + 8 * (num_counted - covered), start, o2, o3


@triton.jit
def _choose(words_ptr, block, n, LAYOUT: tl.constexpr, CODE: tl.constexpr):
    """The encoder's decisions (docs/formats.md, steps 1 to 3): bits 0-3 of the kind, base, o2, o3."""
    # 1. The sample and its zeros.
    s = tl.arange(0, _SAMPLE)
    i = (s // 32) * 512 + s % 32
    sampled = i < n
    words = _load_words(words_ptr, block, i, n, LAYOUT & 7)
    num_zeros = tl.sum((sampled & (words == 0)).to(tl.int32), axis=0)
    zeros_out = 8 * num_zeros > tl.sum(sampled.to(tl.int32), axis=0)
    counted = sampled & ((words | (zeros_out == 0).to(tl.int32)) != 0)
    num_counted = tl.sum(counted.to(tl.int32), axis=0)

    # 2. How often each exponent of the span came.
    e = _exponent(words, LAYOUT)
    finite = counted
    if (LAYOUT >> 8) & 15 == 8:
        finite = counted & (e != 255)
    first = tl.max(tl.where(finite, e, 0), axis=0) - (_SPAN - 1)
    place = first + tl.arange(0, _SPAN)
    count = tl.sum((finite[:, None] & (e[:, None] == place[None, :])).to(tl.int32), axis=0)

    # 3. Windows.
    if CODE == 1:
        start = _fit(count, num_counted, 3, 0, 0)[1]
        kind = tl.zeros_like(start) + 1
        o2 = tl.zeros_like(start)
        o3 = tl.zeros_like(start)
    else:
        cost, start, o2, o3 = _fit(count, num_counted, 2, 2, 3)
        other_cost, other_start, other_o2, other_o3 = _fit(count, num_counted, 3, 2, 2)
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
    i = tl.arange(0, _PROBE)
    is_same = (values[:, None] == values[None, :]) & counted[None, :] & (i[None, :] < i[:, None])
    is_first = counted & (tl.sum(is_same.to(tl.int32), axis=1) == 0)
    num_counted = tl.sum(counted.to(tl.int32), axis=0)
    return (8 * tl.sum(is_first.to(tl.int32), axis=0) <= eighths * num_counted) & (num_counted > 0)


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
        found = is_bad & _has_few(shared.plane_of(words, top, LAYOUT), counted, 6)
        rest: tl.constexpr = top - 1
        found = found | _has_few(shared.plane_of(words, rest, LAYOUT), counted, 6)
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


@triton.jit(do_not_specialize=_COUNTS)
def _measure_kernel(words_ptr, numel, num_blocks, measures_ptr, choices_ptr, LAYOUT: tl.constexpr, CODE: tl.constexpr):
    """Lengths, the checksum's two parts and whether ranked, int64 [4, num_blocks]; kind, base and nest, int32."""
    block = tl.program_id(0).to(tl.int64)
    n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
    i = tl.arange(0, _BLOCK)
    words = _load_block(words_ptr + block * _BLOCK, n, LAYOUT & 7)
    total, weighted = shared.block_sums(words, block, LAYOUT & 7)
    length_ptr = measures_ptr + block
    is_ranked_ptr = length_ptr + 3 * num_blocks.to(tl.int64)
    tl.store(length_ptr + num_blocks, total)
    tl.store(length_ptr + 2 * num_blocks.to(tl.int64), weighted)
    if CODE == 0:
        tl.store(length_ptr, 0)
        tl.store(is_ranked_ptr, 0)
    else:
        num_bits: tl.constexpr = ((LAYOUT >> 3) & 31) - ((LAYOUT >> 15) & 31) + ((LAYOUT >> 20) & 1)
        kind, base, o2, o3 = _choose(words_ptr, block, n, LAYOUT, CODE)
        is_masked = (kind & shared.ZEROS_LEFT_OUT) != 0
        kept = (i < n) & ((words | (is_masked == 0).to(tl.int32)) != 0)
        m = tl.sum(kept.to(tl.int32), axis=0)
        length = tl.where(is_masked, (n + 7) // 8, 0) + num_bits * ((m + 7) // 8)

        # Byte planes; of float32's lower two only those that are not all zeros.
        low_plane = tl.zeros_like(m) - 1
        for plane in tl.static_range((LAYOUT >> 12) & 3):
            if (LAYOUT & 7 == 4) and (plane < 2):
                is_left_out = tl.max(tl.where(kept, (words >> (8 * plane)) & 255, 0), axis=0) == 0
                low_plane = tl.where(is_left_out | (low_plane >= 0), low_plane, plane)
                kind += tl.where(is_left_out, shared.PLANE_LEFT_OUT << plane, 0)
                length += tl.where(is_left_out, 0, m)
            else:
                length += m

        # Windows contain each other, so what a tier passes on is what its window does not hold.
        e = _exponent(words, LAYOUT)
        start = base
        size = 0
        k = m
        for tier in tl.static_range(3):
            if tier == 1:
                start -= o2
            if tier == 2:
                start -= o3
            width = shared.tier_width(kind & 7, tier)
            size += (1 << width) - 1
            length += width * ((k + 7) // 8)
            k = tl.sum((kept & (((e - start) & 255) >= size)).to(tl.int32), axis=0)
        length += k

        # By rank if that is shorter, or raw.
        raw_nbytes = n * (LAYOUT & 7)
        choice = kind | (base << 8) | (o2 << 16) | (o3 << 19)
        is_bad = (16 * length >= 15 * raw_nbytes) | (8 * k > m)
        choice = tl.where(length >= raw_nbytes, 0, choice)
        length = tl.minimum(length, raw_nbytes)
        is_ranked = tl.zeros_like(m)
        drops_zeros = is_masked & (LAYOUT & 7 > 1)
        if _may_be_ranked(words_ptr, block, n, drops_zeros, low_plane, is_bad, LAYOUT):
            num_ranked = tl.where(drops_zeros, m, n)
            ranked_nbytes = tl.where(drops_zeros, (n + 7) // 8, 0)
            for number in tl.range(0, LAYOUT & 7, disable_licm=True):
                words = _load_block(words_ptr + block * _BLOCK, n, LAYOUT & 7)
                ranked = (i < n) & ((words | (drops_zeros == 0).to(tl.int32)) != 0)
                values = shared.plane_of(words, number, LAYOUT)
                ranked_nbytes += _rank_plane(values, ranked, num_ranked, number == (LAYOUT & 7) - 1)[3]
            is_ranked = (ranked_nbytes < length).to(tl.int32)
            length = tl.minimum(length, ranked_nbytes)
            ranked_kind = shared.RANKED + tl.where(drops_zeros, shared.ZEROS_LEFT_OUT, 0)
            choice = tl.where(is_ranked == 1, ranked_kind, choice)
        tl.store(length_ptr, length.to(tl.int64))
        tl.store(is_ranked_ptr, is_ranked.to(tl.int64))
        tl.store(choices_ptr + block, choice)


# --- the message ---


@triton.jit(do_not_specialize=[*_COUNTS, "message_nbytes", "num_dims", *(f"size{d}" for d in range(8))])
def _write_header_kernel(
    message_ptr,
    info_ptr,
    totals_ptr,
    numel,
    num_blocks,
    message_nbytes,
    num_dims,
    size0,
    size1,
    size2,
    size3,
    size4,
    size5,
    size6,
    size7,
    ITEM_NBYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    CODE: tl.constexpr,
    HAS_CAPACITY: tl.constexpr,
):
    """Whether coding pays, whether the message fits, and the header and shape, but for header_sum."""
    total = tl.load(totals_ptr)
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

    is_newer = (is_coded & fits & (tl.load(totals_ptr + 3) > 0)) | (DTYPE >= shared.FIRST_DTYPES)
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
    shared.store_u64(message_ptr, 32, tl.load(totals_ptr + 1))
    shared.store_u64(message_ptr, 40, tl.load(totals_ptr + 2))
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
def _store_planes(ptr, codes, num_codes, width):
    """`width` planes of the first num_codes of codes [4096]; return their bytes."""
    bit = tl.arange(0, 8)
    rows = tl.reshape(tl.where(tl.arange(0, _BLOCK) < num_codes, codes, 0), [_BLOCK // 8, 8])
    byte = tl.arange(0, _BLOCK // 8)
    nbytes = (num_codes + 7) // 8
    for plane in tl.range(0, width, disable_licm=True):
        packed = tl.sum(((rows >> plane) & 1) << bit[None, :], axis=1)
        tl.store(ptr + plane * nbytes + byte, packed.to(tl.uint8), mask=byte < nbytes)
    return width * nbytes


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
            ptr += _store_planes(ptr, tl.minimum(rank, passes), m, width)
            m = _keep(scratch_ptr, values, (i < m) & (rank >= passes))
            values = _load_kept(scratch_ptr, m, NBYTES)
            size += passes
    tl.store(ptr + i, values.to(tl.uint8), mask=i < tl.where(num_listed <= size, m, 0))
    return nbytes


@triton.jit(do_not_specialize=_COUNTS)
def _write_kernel(
    words_ptr,
    numel,
    num_blocks,
    info_ptr,
    ends_ptr,
    lengths_ptr,
    choices_ptr,
    scratch_ptr,
    message_ptr,
    LAYOUT: tl.constexpr,
):
    NBYTES: tl.constexpr = LAYOUT & 7
    first_bit: tl.constexpr = (LAYOUT >> 15) & 31
    low_bits: tl.constexpr = ((LAYOUT >> 3) & 31) - first_bit
    num_bits: tl.constexpr = low_bits + ((LAYOUT >> 20) & 1)
    code = tl.load(info_ptr + shared.CODE)
    lists_ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY)
    payload_ptr = message_ptr + tl.load(info_ptr + shared.PAYLOAD)
    scratch_ptr += tl.program_id(0).to(tl.int64) * (2 * _BLOCK)
    i = tl.arange(0, _BLOCK)
    end = tl.where(code == _TOO_LONG, 0, num_blocks)
    for index in tl.range(tl.program_id(0), end, tl.num_programs(0), disable_licm=True):
        # 1. What and where.
        block = tl.zeros_like(code) + index
        n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
        source_ptr = words_ptr + block * _BLOCK
        kind = tl.zeros_like(n)
        choice = tl.zeros_like(n)
        ptr = payload_ptr + block * _BLOCK * NBYTES
        if code != _RAW:
            choice = tl.load(choices_ptr + block)
            kind = choice & 255
            length = tl.load(lengths_ptr + block)
            ptr = payload_ptr + tl.load(ends_ptr + block) - length
            tl.store(lists_ptr + 2 * block, (length & 255).to(tl.uint8))
            tl.store(lists_ptr + 2 * block + 1, (length >> 8).to(tl.uint8))
            tl.store(lists_ptr + 2 * num_blocks + block, kind.to(tl.uint8))
            tl.store(lists_ptr + 3 * num_blocks + block, ((choice >> 8) & 255).to(tl.uint8))
            tl.store(lists_ptr + 4 * num_blocks + block, (choice >> 16).to(tl.uint8))

        if kind == 0:
            # 2. The original bytes.
            words = _load_block(source_ptr, n, NBYTES)
            for k in tl.static_range(NBYTES):
                tl.store(ptr + i * NBYTES + k, ((words >> (8 * k)) & 255).to(tl.uint8), mask=i < n)
        else:
            # 3. Zero mask. The words that are left lie one after the other from here on.
            m = n
            if (kind & shared.ZEROS_LEFT_OUT) != 0:
                words = _load_block(source_ptr, n, NBYTES)
                ptr += _store_planes(ptr, (words != 0).to(tl.int32), n, 1)
                source_ptr = scratch_ptr + _BLOCK
                m = _keep(source_ptr, words, words != 0)
            if (kind & 7) == shared.RANKED:
                # 4. Byte planes by rank.
                for number in tl.range(0, NBYTES, disable_licm=True):
                    values = shared.plane_of(_load_block(source_ptr, m, NBYTES), number, LAYOUT)
                    ptr += _write_plane(ptr, scratch_ptr, values, number == NBYTES - 1, m, NBYTES)
            else:
                # 5. Mantissas and signs.
                words = _load_block(source_ptr, m, NBYTES)
                for plane in tl.static_range((LAYOUT >> 12) & 3):
                    value = (words >> (8 * plane)) & 255
                    if ((LAYOUT >> 14) & 1 == 1) and (plane == ((LAYOUT >> 12) & 3) - 1):
                        value = (value & 127) | (((words >> (8 * NBYTES - 1)) & 1) << 7)
                    count = tl.where((kind & (shared.PLANE_LEFT_OUT << plane)) == 0, m, 0)
                    tl.store(ptr + i, value.to(tl.uint8), mask=i < count)
                    ptr += count
                if num_bits > 0:
                    value = (words >> first_bit) & ((1 << low_bits) - 1)
                    if (LAYOUT >> 20) & 1 == 1:
                        value = value | (((words >> (8 * NBYTES - 1)) & 1) << low_bits)
                    ptr += _store_planes(ptr, value, m, num_bits)

                # 6. Exponents, tier by tier.
                e = _exponent(words, LAYOUT)
                start = (choice >> 8) & 255
                inner = tl.zeros_like(kind)
                for tier in tl.range(0, 3, disable_licm=True):
                    offset = tl.where(tier > 0, (choice >> (13 + 3 * tier)) & 7, 0)
                    start -= offset
                    width = shared.tier_width(kind & 7, tier)
                    if width > 0:
                        passes = (1 << width) - 1
                        distance = (e - start) & 255
                        value = tl.where(distance < offset, distance, distance - inner)
                        further = distance >= inner + passes
                        ptr += _store_planes(ptr, tl.where(further, passes, value), m, width)
                        m = _keep(scratch_ptr, e, (i < m) & further)
                        e = _load_kept(scratch_ptr, m, NBYTES)
                        inner += passes
                tl.store(ptr + i, e.to(tl.uint8), mask=i < m)


@triton.jit
def _seal_kernel(message_ptr, sums_ptr):
    """The checksum over the front, from `front_sums`: the last thing that is written."""
    header_sum = tl.load(sums_ptr) + (tl.load(sums_ptr + 1) << 20)
    shared.store_u64(message_ptr, shared.HEADER_SUM_AT, header_sum)


def encode(x: Tensor, code: str, capacity_nbytes: int | None, size_nbytes: int) -> Tensor:
    """The message of `x` at the front of uint8 [size_nbytes]; arguments are checked by the caller."""
    layout, dtype = shared.packed_layout(x.dtype), DTYPE_NUMBERS[x.dtype]
    x = words_of(x.detach())
    nbytes = x.element_size()
    words = x.contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[nbytes])
    num_blocks = triton.cdiv(words.numel(), _BLOCK.value)
    measures = torch.empty(4, num_blocks, dtype=torch.int64, device=x.device)
    choices = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
    info = torch.empty(shared.INFO, dtype=torch.int64, device=x.device)
    new = torch.empty if capacity_nbytes is None else torch.zeros
    message = new(size_nbytes, dtype=torch.uint8, device=x.device)
    num_programs = min(num_blocks, _MAX_PROGRAMS)
    scratch = torch.empty(num_programs, 2 * _BLOCK.value, dtype=words.dtype, device=x.device)
    with _on_device(x):
        if num_blocks:
            _measure_kernel[(num_blocks,)](
                words,
                words.numel(),
                num_blocks,
                measures,
                choices,
                LAYOUT=layout,
                CODE=CODES[code],
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
        _write_header_kernel[(1,)](
            message,
            info,
            measures.sum(1),
            words.numel(),
            num_blocks,
            size_nbytes,
            x.dim(),
            *x.shape,
            *[0] * (8 - x.dim()),
            ITEM_NBYTES=nbytes,
            DTYPE=dtype,
            CODE=CODES[code],
            HAS_CAPACITY=capacity_nbytes is not None,
            enable_fp_fusion=False,
        )
        if num_blocks:
            ends = measures[0].cumsum(0)
            _write_kernel[(num_programs,)](
                words,
                words.numel(),
                num_blocks,
                info,
                ends,
                measures,
                choices,
                scratch,
                message,
                LAYOUT=layout,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
        _seal_kernel[(1,)](message, shared.front_sums(message, info), enable_fp_fusion=False)
    return message
