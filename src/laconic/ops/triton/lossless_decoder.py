"""Decoding of lossless messages in Triton: header and lists are checked on the device, then blocks are decoded.

No byte is used before what bounds it was checked: the header's lengths against the tensor's, the lists' lengths against
the payload's, and each read of a block against the block's end. The host never waits; it gets a status.
"""

# The parameters of kernels have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.ops.lossless import DTYPE_NUMBERS, LAYOUTS, Status, words_of
from laconic.ops.triton import lossless_words as shared
from laconic.ops.triton.blockwise import _on_device
from laconic.ops.triton.kernel_constants import KernelConstant

_BLOCK = shared.BLOCK
_RAW = shared.RAW
_TOO_LONG = shared.TOO_LONG
_NUM_DTYPES = KernelConstant(len(DTYPE_NUMBERS))
_ANY = -1
_FIRST_COMPLEX = KernelConstant(DTYPE_NUMBERS[torch.complex32])
_LAST_COMPLEX = KernelConstant(DTYPE_NUMBERS[torch.complex128])
_FIRST_DTYPES = shared.FIRST_DTYPES
_COUNTS = ("numel", "num_blocks", "expected_dtype", "num_sums")
"""Compiled once for all tensors, not anew for 1 or for multiples of 16."""

_CHUNK = 256
_NUM_WARPS = 1
"""Words that the common kernel takes at a time, and its warps: a program of one warp needs no barrier."""
_MAX_PROGRAMS = 2048
"""Of it; each has scratch for 4096 words and as many bytes, most often used in part."""

_RANK_WARPS = 16
"""Of the kernel for ranked blocks, so that 4096 words and what is known of each fit the registers."""
_GROUP = KernelConstant(16)
"""Blocks that a program of it looks at, most often to find that none of them is for it."""

_TRUNCATED = KernelConstant(int(Status.TRUNCATED))
_NOT_A_MESSAGE = KernelConstant(int(Status.NOT_A_MESSAGE))
_VERSION = KernelConstant(int(Status.VERSION))
_FIELD = KernelConstant(int(Status.FIELD))
_LENGTH = KernelConstant(int(Status.LENGTH))
_HEADER_SUM = KernelConstant(int(Status.HEADER_SUM))
_TOO_LONG_STATUS = KernelConstant(int(Status.TOO_LONG))
_MISMATCH = KernelConstant(int(Status.MISMATCH))
_DIRECTORY = KernelConstant(int(Status.DIRECTORY))
_PAYLOAD = KernelConstant(int(Status.PAYLOAD))
_CHECKSUM = KernelConstant(int(Status.CHECKSUM))
_TRAILING = KernelConstant(int(Status.TRAILING))


# --- what is in front of the payloads ---


@triton.jit
def _first(status, finding, number):
    """The status, or this one if nothing was found before."""
    return tl.where((status == 0) & finding, number, status)


@triton.jit
def _packed_layout(dtype, LAYOUTS: tl.constexpr):
    """One of LAYOUTS; the numbers of a message are not known to the host."""
    layout = tl.zeros_like(dtype)
    for number in tl.static_range(_NUM_DTYPES):
        layout = tl.where(dtype == number, LAYOUTS[number], layout)
    return layout


@triton.jit(do_not_specialize=["available"])
def _read_header_kernel(message_ptr, available, info_ptr, LAYOUTS: tl.constexpr, ITEMS: tl.constexpr):
    # 1. The fixed part. What is not there reads as 0.
    size = tl.zeros([], tl.int64) + available
    front = shared.load_u64(message_ptr, 0, size)
    numel = shared.load_u64(message_ptr, 8, size)
    nbytes = shared.load_u64(message_ptr, 16, size)
    capacity = shared.load_u64(message_ptr, 24, size)
    dtype = (front >> 40) & 255
    code = (front >> 48) & 255
    num_dims = (front >> 56) & 255
    status = tl.where(size < shared.HEADER_NBYTES, _TRUNCATED, 0).to(tl.int64)
    status = _first(status, (front & 0xFFFFFFFF) != shared.MAGIC, _NOT_A_MESSAGE)
    version = (front >> 32) & 255
    status = _first(status, (version != shared.VERSION) & (version != shared.RANKED_VERSION), _VERSION)
    is_field = (
        (dtype < tl.where(version == shared.VERSION, _FIRST_DTYPES, _NUM_DTYPES))
        & ((code <= 2) | (code == _TOO_LONG))
        & (num_dims <= 8)
    )
    status = _first(status, (is_field == 0) | (shared.load_u64(message_ptr, 56, size) != 0), _FIELD)

    # 2. Lengths. As unsigned numbers, the negative ones are larger than any tensor.
    layout = _packed_layout(dtype, LAYOUTS)
    status = _first(status, (nbytes < 0) | (capacity < nbytes) | (size < capacity), _LENGTH)
    directory = shared.HEADER_NBYTES + 8 * num_dims
    num_blocks = numel // _BLOCK + (numel % _BLOCK != 0).to(tl.int64)
    is_coded = (code != _RAW) & (code != _TOO_LONG)
    payload = tl.where(is_coded & (numel > 0), directory + shared.ENTRY_NBYTES * num_blocks, directory)
    rest = nbytes - payload
    item = tl.maximum(_packed_layout(dtype, ITEMS), 1)
    is_coded_length = (numel > 0) & (rest > 0) & ((numel - 1) // 8 < rest)
    is_raw_length = (rest >= 0) & (rest % item == 0) & (rest // item == numel)
    fits = tl.where(code == _TOO_LONG, rest == 0, tl.where(code == _RAW, is_raw_length, is_coded_length))
    status = _first(status, fits == 0, _LENGTH)

    # 3. The shape: its product without overflow.
    product = tl.zeros([], tl.int64) + 1
    is_empty = product == 0
    is_shape = product == 1
    last = tl.zeros([], tl.int64)
    for d in tl.static_range(8):
        if d < num_dims:
            length = shared.load_u64(message_ptr, 64 + 8 * d, size)
            is_shape = is_shape & (length >= 0) & (length <= 0x7FFFFFFFFFFFFFFF // product)
            is_empty = is_empty | (length == 0)
            last = length
            product = tl.where(is_shape, product * tl.maximum(length, 1), 1)
    status = _first(status, (is_shape == 0) | (numel != tl.where(is_empty, 0, product)), _FIELD)
    status = _first(status, (dtype >= _FIRST_COMPLEX) & (dtype <= _LAST_COMPLEX) & (last != 2), _FIELD)

    is_sound = status == 0
    tl.store(info_ptr + shared.STATUS, status)
    tl.store(info_ptr + shared.CODE, code)
    tl.store(info_ptr + shared.DTYPE, dtype)
    tl.store(info_ptr + shared.LAYOUT, layout)
    tl.store(info_ptr + shared.NUMEL, numel)
    tl.store(info_ptr + shared.MESSAGE_VERSION, version)
    # So that nobody reads by lengths that were found to be wrong.
    tl.store(info_ptr + shared.NBYTES, tl.where(is_sound, nbytes, 0))
    tl.store(info_ptr + shared.CAPACITY, tl.where(is_sound, capacity, 0))
    tl.store(info_ptr + shared.DIRECTORY, tl.where(is_sound, directory, 0))
    tl.store(info_ptr + shared.PAYLOAD, tl.where(is_sound, payload, 0))
    tl.store(info_ptr + shared.SUM, shared.load_u64(message_ptr, 32, size))
    tl.store(info_ptr + shared.WEIGHTED_SUM, shared.load_u64(message_ptr, 40, size))


@triton.jit
def _is_coded(info_ptr):
    code = tl.load(info_ptr + shared.CODE)
    return (code != _RAW) & (code != _TOO_LONG)


@triton.jit(do_not_specialize=_COUNTS)
def _read_lists_kernel(message_ptr, info_ptr, sums_ptr, num_sums, numel, num_blocks, expected_dtype, ends_ptr):
    """Where each block's payload ends, int64 [num_blocks], and the status after header and lists."""
    # 1. Each block's length, and whether no encoder writes such an entry.
    status = tl.load(info_ptr + shared.STATUS)
    is_coded = _is_coded(info_ptr)
    is_listed = (status == 0) & (tl.load(info_ptr + shared.NUMEL) == numel)
    num_listed = tl.where(is_listed & is_coded, num_blocks, 0)
    ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY)
    item = tl.load(info_ptr + shared.LAYOUT) & 7
    is_newer = tl.load(info_ptr + shared.MESSAGE_VERSION) == shared.RANKED_VERSION
    total = tl.zeros([], tl.int64)
    num_faults = tl.zeros([], tl.int64)
    for first in tl.range(0, num_blocks, shared.LISTED):
        block = tl.zeros([], tl.int64) + first + tl.arange(0, shared.LISTED)
        exists = block < num_listed
        length = tl.load(ptr + 2 * block, mask=exists, other=0).to(tl.int64)
        length += tl.load(ptr + 2 * block + 1, mask=exists, other=0).to(tl.int64) << 8
        kind = tl.load(ptr + 2 * num_blocks + block, mask=exists, other=0).to(tl.int32)
        base = tl.load(ptr + 3 * num_blocks + block, mask=exists, other=0).to(tl.int32)
        nest = tl.load(ptr + 4 * num_blocks + block, mask=exists, other=0).to(tl.int32)
        shape = kind & 7
        o2 = nest & 7
        o3 = nest >> 3
        is_sound = (shape < 4) & (kind < tl.where(item == 4, 64, 16)) & (o3 < 8)
        raw_nbytes = tl.minimum(numel - block * _BLOCK, _BLOCK) * item
        is_sound = is_sound & ((shape != 0) | (((kind | base | nest) == 0) & (length == raw_nbytes)))
        is_sound = is_sound & ((shape != 1) | (nest == 0)) & ((shape != 2) | (o2 < 4))
        is_sound = is_sound & ((shape != 3) | ((o2 < 4) & (o3 < 4)))
        is_ranked = (shape == shared.RANKED) & (kind < tl.where(is_newer, 16, 0)) & ((base | nest) == 0)
        num_faults += tl.sum((exists & ((is_sound | is_ranked) == 0)).to(tl.int64), axis=0)
        tl.store(ends_ptr + block, total + tl.cumsum(length, axis=0), mask=block < num_blocks)
        total += tl.sum(length, axis=0)

    # 2. The status.
    header_sum, trailing = shared.front_total(sums_ptr, num_sums)
    there = shared.load_u64(message_ptr, shared.HEADER_SUM_AT, tl.where(status == 0, 64, 0))
    status = _first(status, header_sum != there, _HEADER_SUM)
    status = _first(status, tl.load(info_ptr + shared.CODE) == _TOO_LONG, _TOO_LONG_STATUS)
    found = tl.load(info_ptr + shared.DTYPE)
    is_other = tl.where(expected_dtype >= 0, found != expected_dtype, found >= _FIRST_DTYPES)
    status = _first(status, (tl.load(info_ptr + shared.NUMEL) != numel) | is_other, _MISMATCH)
    payload_nbytes = tl.load(info_ptr + shared.NBYTES) - tl.load(info_ptr + shared.PAYLOAD)
    is_whole = (total == payload_nbytes) & (num_faults == 0)
    status = _first(status, is_coded & (is_whole == 0), _DIRECTORY)
    tl.store(info_ptr + shared.STATUS, status)
    tl.store(info_ptr + shared.TRAILING, trailing)


# --- blocks ---


@triton.jit
def _bits(ptr, cursor, end, left, rank, count, width):
    """`width` planes at the cursor: the codes of the words that are left, and whether unused bits are 0."""
    nbytes = (count + 7) // 8
    codes = tl.zeros_like(rank)
    is_sound = count >= 0
    for plane in range(0, width):
        at = cursor + plane * nbytes
        place = at + rank // 8
        byte = tl.load(ptr + place, mask=left & (place < end), other=0).to(tl.int32)
        codes |= ((byte >> (rank % 8)) & 1) << plane
        last = at + count // 8
        rest = tl.load(ptr + last, mask=(count % 8 > 0) & (last < end), other=0).to(tl.int32)
        is_sound = is_sound & ((rest >> (count % 8)) == 0)
    return codes, is_sound


@triton.jit
def _ranks(left):
    """Each word's rank among those that are left, and how many are."""
    number = left.to(tl.int32)
    return tl.cumsum(number, axis=0) - number, tl.sum(number, axis=0)


@triton.jit
def _load_bytes(ptr, first, n, CHUNK: tl.constexpr):
    """Bytes of a chunk as int32 [CHUNK // 8, 8], 0 from the n-th on; they may begin anywhere."""
    ptr += shared.scattered(first, shared.chunk_places(0, CHUNK))
    if first + CHUNK <= n:
        values = tl.load(ptr)
    else:
        values = tl.load(ptr, mask=shared.chunk_places(first, CHUNK) < n, other=0)
    return values.to(tl.int32)


@triton.jit
def _halves(values):
    """[rows, 8] as two of [rows, 4]: of 32 bits, a row is two accesses."""
    return tl.split(tl.permute(tl.reshape(values, [values.shape[0], 2, 4]), [0, 2, 1]))


@triton.jit
def _store_words(ptr, words, dtype, first, n, ADDS: tl.constexpr, CHUNK: tl.constexpr):
    """Write or add a chunk's words [CHUNK // 8, 8], up to the n-th of the block at ptr."""
    half = first + 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 4)[None, :]
    place = shared.scattered(first, shared.chunk_places(0, CHUNK))
    exists = shared.chunk_places(first, CHUNK) < n
    if ADDS:
        value = _to_float(words, dtype)
        if first + CHUNK <= n:
            low, high = _halves(value)
            tl.store(ptr + half, tl.load(ptr + half) + low)
            tl.store(ptr + half + 4, tl.load(ptr + half + 4) + high)
        else:
            tl.store(ptr + place, tl.load(ptr + place, mask=exists, other=0) + value, mask=exists)
    else:
        value = words.to(ptr.dtype.element_ty)
        if first + CHUNK <= n:
            if ptr.dtype.element_ty.primitive_bitwidth == 32:
                low, high = _halves(value)
                tl.store(ptr + half, low)
                tl.store(ptr + half + 4, high)
            else:
                tl.store(ptr + shared.chunk_places(first, CHUNK), value)
        else:
            tl.store(ptr + place, value, mask=exists)


@triton.jit
def _load_codes(ptr, first, count, width, CHUNK: tl.constexpr):
    """A chunk of the codes whose `width` planes, at most 4, are at ptr, 0 from count on.

    Also how many of each row have all bits set: int32 [CHUNK // 8, 8] and [CHUNK // 8].
    """
    byte = first // 8 + tl.arange(0, CHUNK // 8)
    nbytes = (count + 7) // 8
    packed = tl.zeros([CHUNK // 8], tl.int32)
    full = packed + 255
    for plane in tl.static_range(4):
        exists = byte < tl.where(plane < width, nbytes, 0)
        value = tl.load(ptr + plane * nbytes + byte, mask=exists, other=0).to(tl.int32)
        packed |= value << (8 * plane)
        full = full & tl.where(plane < width, value, 255)
    # Bit 8 p of what belongs to a word goes to bit p.
    spread = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 0x01010101
    return ((spread * 0x204081) >> 21) & 15, _num_bits(full)


@triton.jit
def _num_bits(byte):
    """How many bits of bytes are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte & 15) + (byte >> 4)


@triton.jit
def _check_planes(ptr, cursor, end, count, width, CHUNK: tl.constexpr):
    """Of `width` planes, at most 4, of count codes: how many have all bits set, and whether unused bits are 0."""
    nbytes = (count + 7) // 8
    num_full = tl.zeros([CHUNK], tl.int32)
    unused = tl.zeros([CHUNK], tl.int32)
    for first in tl.range(0, nbytes, CHUNK, disable_licm=True):
        byte = first + tl.arange(0, CHUNK)
        used = tl.where(byte < count // 8, 255, (1 << (count % 8)) - 1)
        full = tl.where(byte < nbytes, used, 0)
        for plane in tl.static_range(4):
            if plane < width:
                start = cursor + plane * nbytes
                exists = byte < tl.minimum(nbytes, end - start)
                value = tl.load(ptr + start + byte, mask=exists, other=0).to(tl.int32)
                full = full & value
                unused = unused | (value & ~used)
        num_full += _num_bits(full)
    return tl.sum(num_full, axis=0), tl.max(unused, axis=0) == 0


@triton.jit
def _read_tier(ptr, kept_ptr, count, num_left, width, start, offset, inner, CHUNK: tl.constexpr):
    """The exponents of a tier's count words, to the end of kept_ptr [4096], where those are that it passed on."""
    passes = (1 << width) - 1
    later_ptr = kept_ptr + (_BLOCK - num_left)
    kept_ptr += _BLOCK - count
    for first in tl.range(0, count, CHUNK, disable_licm=True):
        codes, of_row = _load_codes(ptr, first, count, width, CHUNK)
        left = codes == passes
        rank, num_passed = shared.ranks(left, of_row)
        later = tl.load(later_ptr + shared.scattered(0, rank), mask=left, other=0).to(tl.int32)
        later_ptr += num_passed
        exponent = start + tl.where(codes < offset, codes, codes + inner)
        exists = shared.chunk_places(first, CHUNK) < count
        place = shared.scattered(first, shared.chunk_places(0, CHUNK))
        tl.debug_barrier()
        tl.store(kept_ptr + place, tl.where(left, later, exponent).to(tl.uint8), mask=exists)
    tl.debug_barrier()


@triton.jit
def _decode_ranked_block(ptr, end, n, kind, layout):
    """As `_decode_block`, of a block whose byte planes are coded by rank."""
    # 1. Which words there are.
    i = tl.arange(0, _BLOCK)
    kept = i < n
    is_masked = ((kind & shared.ZEROS_LEFT_OUT) != 0).to(tl.int32)
    cursor = tl.zeros_like(n)
    mask, is_sound = _bits(ptr, cursor, end, kept, i, n, is_masked)
    kept = kept & ((mask | (1 - is_masked)) != 0)
    cursor += is_masked * ((n + 7) // 8)
    kept_rank, num_kept = _ranks(kept)

    # 2. Plane by plane.
    words = tl.zeros_like(i)
    for plane in range(0, shared.word_nbytes(layout)):
        number = tl.load(ptr + cursor, mask=cursor < end, other=255).to(tl.int32)
        num_listed = tl.load(ptr + cursor + 1, mask=cursor + 1 < end, other=0).to(tl.int32)
        is_sound = is_sound & (number < shared.NUM_RANK_CODES)
        number = tl.minimum(number, shared.NUM_RANK_CODES - 1)
        values = cursor + 2
        cursor = values + num_listed
        left = kept
        rank = kept_rank
        count = num_kept
        place = tl.zeros_like(i)
        size = tl.zeros_like(number)
        for tier in range(0, 3):
            width = shared.rank_width(number, tier)
            passes = (1 << width) - 1
            codes, is_tidy = _bits(ptr, cursor, end, left, rank, count, width)
            is_sound = is_sound & is_tidy
            place = tl.where(left, size + codes, place)
            cursor += width * ((count + 7) // 8)
            left = left & (codes == passes)
            rank, count = _ranks(left)
            size += passes
        is_sound = is_sound & (num_listed <= size + 1)
        at = values + place
        byte = tl.load(ptr + at, mask=kept & (place < num_listed) & (at < end), other=0).to(tl.int32)
        at = cursor + rank
        escapes = left & (at < tl.where(num_listed <= size, end, 0))
        byte = tl.where(escapes, tl.load(ptr + at, mask=escapes, other=0).to(tl.int32), byte)
        cursor += tl.where(num_listed <= size, count, 0)
        words |= shared.from_plane(byte, plane, layout)
    return tl.where(kept, words, 0), is_sound & (cursor == end)


@triton.jit
def _to_float(words, dtype):
    """The fp32 value of words of any dtype."""
    value = words.to(tl.float32, bitcast=True)
    value = tl.where(dtype == 0, words.to(tl.float32), value)
    value = tl.where(dtype == 1, (words << 16).to(tl.float32, bitcast=True), value)
    # float8_e5m2 is float16 without its last 8 bits.
    half = tl.where(dtype == 5, words << 8, words).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    value = tl.where((dtype == 2) | (dtype == 5), half, value)
    # float8_e4m3fn: exponents are 120 less; those of 0 have no hidden bit; all bits set is NaN.
    magnitude = words & 127
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    small = (magnitude & 7).to(tl.float32) * 0.001953125
    unsigned = tl.where(magnitude == 127, float("nan"), tl.where(magnitude < 8, small, normal))
    value = tl.where(dtype == 4, tl.where(words > 127, -unsigned, unsigned), value)
    return tl.where(dtype == 6, ((words ^ 128) - 128).to(tl.float32), value)


@triton.jit
def _entry(message_ptr, info_ptr, ends_ptr, num_blocks, block, is_coded):
    """A block's kind, base and nest, where its payload is and its bytes."""
    entry_ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY) + 2 * num_blocks.to(tl.int64) + block
    kind = tl.load(entry_ptr, mask=is_coded, other=0).to(tl.int32)
    base = tl.load(entry_ptr + num_blocks, mask=is_coded, other=0).to(tl.int32)
    nest = tl.load(entry_ptr + 2 * num_blocks.to(tl.int64), mask=is_coded, other=0).to(tl.int32)
    end = tl.load(ends_ptr + block)
    previous_end = tl.load(ends_ptr + block - 1, mask=block > 0, other=0)
    return kind, base, nest, previous_end, (end - previous_end).to(tl.int32)


@triton.jit
def _store_results(results_ptr, num_blocks, block, is_sound, total, weighted, nbytes):
    results_ptr += block
    tl.store(results_ptr, (is_sound == 0).to(tl.int64))
    tl.store(results_ptr + num_blocks, total)
    weighted = shared.whole_weights(total, weighted, block, nbytes)
    tl.store(results_ptr + 2 * num_blocks.to(tl.int64), weighted)


@triton.jit(do_not_specialize=_COUNTS)
def _decode_kernel(
    message_ptr, info_ptr, ends_ptr, numel, num_blocks, out_ptr, results_ptr, scratch_ptr,
    ADDS: tl.constexpr, LAYOUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write or add the words of each block that is not ranked; of each, a fault and its parts of the checksum.

    Results int64 [3, num_blocks]; scratch int32 [programs, 4096 + 1024]. LAYOUT is the message's, or 0 if it may
    have any.
    """
    status = tl.load(info_ptr + shared.STATUS)
    is_coded = _is_coded(info_ptr) & (status == 0)
    dtype = tl.load(info_ptr + shared.DTYPE).to(tl.int32)
    if LAYOUT == 0:
        layout = tl.load(info_ptr + shared.LAYOUT).to(tl.int32)
    else:
        layout = tl.full([], LAYOUT, tl.int32)
    item = shared.word_nbytes(layout)
    num_planes = shared.num_byte_planes(layout)
    low_bits = shared.exponent_shift(layout) - shared.first_bit(layout)
    num_bits = low_bits + shared.has_sign_bit(layout)
    scratch_ptr += tl.program_id(0).to(tl.int64) * (_BLOCK + _BLOCK // 4)
    kept_ptr = (scratch_ptr + _BLOCK).to(tl.pointer_type(tl.uint8))
    for index in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0), disable_licm=True):
        # 1. What and where. A message that was found damaged has no words.
        block = tl.zeros([], tl.int64) + index
        n = tl.where(status == 0, tl.minimum(numel - block * _BLOCK, _BLOCK), 0).to(tl.int32)
        kind, base, nest, start, end = _entry(message_ptr, info_ptr, ends_ptr, num_blocks, block, is_coded)
        payload = tl.load(info_ptr + shared.PAYLOAD)
        place_ptr = out_ptr + block * _BLOCK
        totals = tl.zeros([CHUNK // 8], tl.int64)
        weighted = totals
        is_sound = n >= 0
        is_masked = (kind & shared.ZEROS_LEFT_OUT) != 0
        if kind == 0:
            # 2. The original bytes.
            ptr = message_ptr + payload + tl.where(is_coded, start, block * _BLOCK * item)
            for first in tl.range(0, n, CHUNK, disable_licm=True):
                place = shared.chunk_places(first, CHUNK)
                words = tl.zeros_like(place)
                for k in tl.range(0, item, disable_licm=True):
                    byte_ptr = ptr + shared.scattered(k, place * item)
                    byte = tl.load(byte_ptr, mask=place < n, other=0).to(tl.int32)
                    words |= byte << (8 * k)
                of_rows, weighted_rows = shared.row_sums(words, first, item, CHUNK)
                totals += of_rows
                weighted += weighted_rows
                _store_words(place_ptr, words, dtype, first, n, ADDS, CHUNK)
        elif (kind & 7) != shared.RANKED:
            # 3. How many codes there are of each sort: zero mask, bit planes, tiers. The cursor only moves forward, so
            # it misses the end for good once it is beyond. Places count from the block's first byte, in 32 bits: lists
            # say lengths of 16 bits.
            ptr = message_ptr + payload + start
            planes_nbytes = num_planes
            if item == 4:
                planes_nbytes -= ((kind >> 4) & 1) + ((kind >> 5) & 1)
            cursor = tl.zeros_like(n)
            count = n
            m = n
            k2 = n
            k3 = n
            for stage in tl.range(0, 5, disable_licm=True):
                width = shared.tier_width(kind & 7, stage - 2)
                width = tl.where(stage == 0, is_masked.to(tl.int32), tl.where(stage == 1, num_bits, width))
                passed = count
                if width > 0:
                    passed, is_tidy = _check_planes(ptr, cursor, end, count, width, CHUNK // 2)
                    is_sound = is_sound & is_tidy
                    cursor += width * ((count + 7) // 8)
                if stage == 0:
                    m = passed
                    cursor += planes_nbytes * m
                count = tl.where(stage == 1, m, passed)
                k2 = tl.where(stage == 2, count, k2)
                k3 = tl.where(stage == 3, count, k3)
            is_sound = is_sound & (cursor + count == end)
            if is_sound:
                # 4. Exponents from the escapes to the second tier, each time at the end of the scratch.
                ptr += cursor
                left_ptr = kept_ptr + (_BLOCK - count)
                for first in tl.range(0, count, CHUNK, disable_licm=True):
                    i = first + tl.arange(0, CHUNK)
                    tl.store(left_ptr + i, tl.load(ptr + i, mask=i < count, other=0), mask=i < count)
                tl.debug_barrier()
                w1 = shared.tier_width(kind & 7, 0)
                inner = (1 << w1) - 1
                tier1 = (1 << shared.tier_width(kind & 7, 1)) - 1
                for step in tl.range(0, 2, disable_licm=True):
                    width = shared.tier_width(kind & 7, 2 - step)
                    if width > 0:
                        of_tier = tl.where(step == 0, k3, k2)
                        ptr -= width * ((of_tier + 7) // 8)
                        offset = tl.where(step == 0, nest >> 3, nest & 7)
                        window = base - (nest & 7) - tl.where(step == 0, offset, 0)
                        within = inner + tl.where(step == 0, tier1, 0)
                        _read_tier(ptr, kept_ptr, of_tier, count, width, window, offset, within, CHUNK)
                        count = of_tier

                # 5. The words, those of a block without zeros to the scratch first.
                ptr -= w1 * ((m + 7) // 8)
                later_ptr = kept_ptr + (_BLOCK - k2)
                bits_ptr = ptr - num_bits * ((m + 7) // 8)
                planes_ptr = bits_ptr - planes_nbytes * m
                largest = tl.zeros([CHUNK // 8], tl.int32)
                for first in tl.range(0, m, CHUNK, disable_licm=True):
                    place = shared.chunk_places(first, CHUNK)
                    codes, of_row = _load_codes(ptr, first, m, w1, CHUNK)
                    further = codes == inner
                    rank, num_further = shared.ranks(further, of_row)
                    later = tl.load(later_ptr + shared.scattered(0, rank), mask=further, other=0).to(tl.int32)
                    later_ptr += num_further
                    e = tl.where(further, later, (base + codes) & 255)
                    if first + CHUNK > m:
                        e = tl.where(place < m, e, 0)
                    largest = tl.maximum(largest, tl.max(e, axis=1))
                    words = (e ^ shared.exponent_flip(layout)) << shared.exponent_shift(layout)
                    if num_bits > 0:
                        bits = _load_codes(bits_ptr, first, m, num_bits, CHUNK)[0]
                        words |= (bits & ((1 << low_bits) - 1)) << shared.first_bit(layout)
                        if shared.has_sign_bit(layout) == 1:
                            words |= (bits >> low_bits) << (8 * item - 1)
                    byte_ptr = planes_ptr
                    for plane in tl.static_range(3):
                        is_there = (item != 4) | ((kind & (shared.PLANE_LEFT_OUT << plane)) == 0) | (plane == 2)
                        if is_there & (plane < num_planes):
                            byte = _load_bytes(byte_ptr, first, m, CHUNK)
                            if (plane == num_planes - 1) & (shared.has_sign_byte(layout) == 1):
                                words |= ((byte & 127) << (8 * plane)) | ((byte >> 7) << (8 * item - 1))
                            else:
                                words |= byte << (8 * plane)
                            byte_ptr += m
                    if is_masked:
                        tl.store(scratch_ptr + place, words)
                    else:
                        if first + CHUNK > n:
                            words = tl.where(place < n, words, 0)
                        of_rows, weighted_rows = shared.row_sums(words, first, item, CHUNK)
                        totals += of_rows
                        weighted += weighted_rows
                        _store_words(place_ptr, words, dtype, first, n, ADDS, CHUNK)
                is_sound = (tl.max(largest, axis=0) >> shared.exponent_bits(layout)) == 0
                tl.debug_barrier()

                # 6. Zeros between them.
                if is_masked:
                    words_ptr = scratch_ptr
                    mask_ptr = planes_ptr - (n + 7) // 8
                    for first in tl.range(0, n, CHUNK, disable_licm=True):
                        bits, of_row = _load_codes(mask_ptr, first, n, 1, CHUNK)
                        rank, num_kept = shared.ranks(bits != 0, of_row)
                        words = tl.load(words_ptr + shared.scattered(0, rank), mask=bits != 0, other=0)
                        words_ptr += num_kept
                        of_rows, weighted_rows = shared.row_sums(words, first, item, CHUNK)
                        totals += of_rows
                        weighted += weighted_rows
                        _store_words(place_ptr, words, dtype, first, n, ADDS, CHUNK)
                    tl.debug_barrier()
        if (kind & 7) != shared.RANKED:
            total = tl.sum(totals, axis=0)
            _store_results(results_ptr, num_blocks, block, is_sound, total, tl.sum(weighted, axis=0), item)


@triton.jit(do_not_specialize=_COUNTS)
def _decode_ranked_kernel(message_ptr, info_ptr, ends_ptr, numel, num_blocks, out_ptr, results_ptr, ADDS: tl.constexpr):
    """As `_decode_kernel`, the ranked blocks."""
    status = tl.load(info_ptr + shared.STATUS)
    is_coded = _is_coded(info_ptr) & (status == 0)
    i = tl.arange(0, _BLOCK)
    first = tl.program_id(0) * _GROUP
    last = tl.minimum(first + _GROUP, num_blocks)
    group = first + tl.arange(0, _GROUP)
    kinds_ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY) + 2 * num_blocks.to(tl.int64)
    kinds = tl.load(kinds_ptr + group, mask=group < tl.where(is_coded, last, 0), other=0).to(tl.int32) & 7
    if tl.max((kinds == shared.RANKED).to(tl.int32), axis=0) != 0:
        dtype = tl.load(info_ptr + shared.DTYPE)
        layout = tl.load(info_ptr + shared.LAYOUT).to(tl.int32)
        item = shared.word_nbytes(layout)
        for index in tl.range(first, last, disable_licm=True):
            block = tl.zeros([], tl.int64) + index
            kind, _, _, start, end = _entry(message_ptr, info_ptr, ends_ptr, num_blocks, block, is_coded)
            if (kind & 7) == shared.RANKED:
                n = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
                ptr = message_ptr + tl.load(info_ptr + shared.PAYLOAD) + start
                words, is_sound = _decode_ranked_block(ptr, end, n, kind, layout)
                totals, weighted = shared.row_sums(tl.reshape(words, [_BLOCK // 8, 8]), 0, item, _BLOCK)
                total = tl.sum(totals, axis=0)
                _store_results(results_ptr, num_blocks, block, is_sound, total, tl.sum(weighted, axis=0), item)
                place = out_ptr + block * _BLOCK + i
                if ADDS:
                    value = _to_float(words, dtype)
                    tl.store(place, tl.load(place, mask=i < n, other=0) + value, mask=i < n)
                else:
                    tl.store(place, words.to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=_COUNTS)
def _finish_kernel(info_ptr, results_ptr, num_blocks, status_ptr):
    num_faults = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    weighted = tl.zeros([], tl.int64)
    for first in tl.range(0, num_blocks, shared.LISTED):
        block = first + tl.arange(0, shared.LISTED)
        exists = block < num_blocks
        stride = num_blocks + tl.zeros([], tl.int64)
        num_faults += tl.sum(tl.load(results_ptr + block, mask=exists, other=0), axis=0)
        total += tl.sum(tl.load(results_ptr + stride + block, mask=exists, other=0), axis=0)
        weighted += tl.sum(tl.load(results_ptr + 2 * stride + block, mask=exists, other=0), axis=0)
    status = _first(tl.load(info_ptr + shared.STATUS), num_faults != 0, _PAYLOAD)
    is_sum = (total == tl.load(info_ptr + shared.SUM)) & (weighted == tl.load(info_ptr + shared.WEIGHTED_SUM))
    status = _first(status, is_sum == 0, _CHECKSUM)
    status = _first(status, tl.load(info_ptr + shared.TRAILING) != 0, _TRAILING)
    tl.store(status_ptr, status.to(tl.int32))


def decode(out: Tensor, message: Tensor, adds: bool) -> Tensor:
    """Write or add the values of a message; return its status. Arguments are checked by the caller."""
    expected_dtype = _ANY if adds else DTYPE_NUMBERS[out.dtype]
    flat = words_of(out.detach()).view(-1)
    if not adds:
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()])
    numel = flat.numel()
    num_blocks = -(-numel // _BLOCK.value)
    layouts = tuple(shared.packed_layout(dtype) for dtype in DTYPE_NUMBERS)

    items = tuple(LAYOUTS[dtype].nbytes for dtype in DTYPE_NUMBERS)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=out.device)

    info, ends, results = numbers(shared.INFO), numbers(num_blocks), numbers(3, num_blocks)
    status = torch.empty((), dtype=torch.int32, device=out.device)
    with _on_device(out):
        _read_header_kernel[(1,)](message, message.numel(), info, LAYOUTS=layouts, ITEMS=items, enable_fp_fusion=False)
        sums = shared.front_sums(message, info)
        _read_lists_kernel[(1,)](
            message, info, sums, len(sums), numel, num_blocks, expected_dtype, ends, enable_fp_fusion=False
        )
        if num_blocks:
            num_programs = min(num_blocks, _MAX_PROGRAMS)
            scratch = torch.empty(num_programs, _BLOCK.value + _BLOCK.value // 4, dtype=torch.int32, device=out.device)
            read = (message, info, ends, numel, num_blocks)
            _decode_kernel[(num_programs,)](
                *read, flat, results, scratch,
                ADDS=adds, LAYOUT=0 if adds else shared.packed_layout(out.dtype), CHUNK=_CHUNK, num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            _decode_ranked_kernel[(-(-num_blocks // _GROUP.value),)](
                *read, flat, results, ADDS=adds, num_warps=_RANK_WARPS, enable_fp_fusion=False
            )
        _finish_kernel[(1,)](info, results, num_blocks, status, enable_fp_fusion=False)
    return status
