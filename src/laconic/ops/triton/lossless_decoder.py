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

__all__ = ["decode"]

_BLOCK = shared.BLOCK
_RAW = shared.RAW
_TOO_LONG = shared.TOO_LONG
_LISTED = tl.constexpr(512)
_NUM_DTYPES = tl.constexpr(len(DTYPE_NUMBERS))
_ANY = -1
_FIRST_COMPLEX = tl.constexpr(DTYPE_NUMBERS[torch.complex32])
_LAST_COMPLEX = tl.constexpr(DTYPE_NUMBERS[torch.complex128])
_FIRST_DTYPES = shared.FIRST_DTYPES
_COUNTS = ("numel", "num_blocks", "expected_dtype")
"""Compiled once for all tensors, not anew for 1 or for multiples of 16."""

_NUM_WARPS = 16
"""So that 4096 words and what is known of each fit the registers."""

_TRUNCATED = tl.constexpr(int(Status.TRUNCATED))
_NOT_A_MESSAGE = tl.constexpr(int(Status.NOT_A_MESSAGE))
_VERSION = tl.constexpr(int(Status.VERSION))
_FIELD = tl.constexpr(int(Status.FIELD))
_LENGTH = tl.constexpr(int(Status.LENGTH))
_HEADER_SUM = tl.constexpr(int(Status.HEADER_SUM))
_TOO_LONG_STATUS = tl.constexpr(int(Status.TOO_LONG))
_MISMATCH = tl.constexpr(int(Status.MISMATCH))
_DIRECTORY = tl.constexpr(int(Status.DIRECTORY))
_PAYLOAD = tl.constexpr(int(Status.PAYLOAD))
_CHECKSUM = tl.constexpr(int(Status.CHECKSUM))
_TRAILING = tl.constexpr(int(Status.TRAILING))


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
def _read_lists_kernel(message_ptr, info_ptr, numel, num_blocks, lists_ptr):
    """Of each block the payload's length and whether no encoder writes such an entry: int64 [2, num_blocks]."""
    block = tl.program_id(0).to(tl.int64) * _LISTED + tl.arange(0, _LISTED)
    is_listed = (tl.load(info_ptr + shared.STATUS) == 0) & (tl.load(info_ptr + shared.NUMEL) == numel)
    exists = block < tl.where(is_listed & _is_coded(info_ptr), num_blocks, 0)
    ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY)
    length = tl.load(ptr + 2 * block, mask=exists, other=0).to(tl.int64)
    length += tl.load(ptr + 2 * block + 1, mask=exists, other=0).to(tl.int64) << 8
    kind = tl.load(ptr + 2 * num_blocks + block, mask=exists, other=0).to(tl.int32)
    base = tl.load(ptr + 3 * num_blocks + block, mask=exists, other=0).to(tl.int32)
    nest = tl.load(ptr + 4 * num_blocks + block, mask=exists, other=0).to(tl.int32)
    item = tl.load(info_ptr + shared.LAYOUT) & 7
    shape = kind & 7
    o2 = nest & 7
    o3 = nest >> 3
    is_sound = (shape < 4) & (kind < tl.where(item == 4, 64, 16)) & (o3 < 8)
    raw_nbytes = tl.minimum(numel - block * _BLOCK, _BLOCK) * item
    is_sound = is_sound & ((shape != 0) | (((kind | base | nest) == 0) & (length == raw_nbytes)))
    is_sound = is_sound & ((shape != 1) | (nest == 0)) & ((shape != 2) | (o2 < 4))
    is_sound = is_sound & ((shape != 3) | ((o2 < 4) & (o3 < 4)))
    is_newer = tl.load(info_ptr + shared.MESSAGE_VERSION) == shared.RANKED_VERSION
    is_ranked = is_newer & (shape == shared.RANKED) & (kind < 16) & ((base | nest) == 0)
    is_sound = is_sound | is_ranked
    tl.store(lists_ptr + block, length, mask=block < num_blocks)
    tl.store(lists_ptr + num_blocks + block, (exists & (is_sound == 0)).to(tl.int64), mask=block < num_blocks)


@triton.jit
def _status_of_front(message_ptr, info_ptr, front_ptr, listed_ptr, numel, dtype):
    """The status after header and lists; front_ptr int64 [3] of `front_sums`, listed_ptr int64 [2] total and faults."""
    status = tl.load(info_ptr + shared.STATUS)
    header_sum = tl.load(front_ptr) + (tl.load(front_ptr + 1) << 20)
    there = shared.load_u64(message_ptr, shared.HEADER_SUM_AT, tl.where(status == 0, 64, 0))
    status = _first(status, header_sum != there, _HEADER_SUM)
    status = _first(status, tl.load(info_ptr + shared.CODE) == _TOO_LONG, _TOO_LONG_STATUS)
    found = tl.load(info_ptr + shared.DTYPE)
    is_other = tl.where(dtype >= 0, found != dtype, found >= _FIRST_DTYPES)
    status = _first(status, (tl.load(info_ptr + shared.NUMEL) != numel) | is_other, _MISMATCH)
    payload_nbytes = tl.load(info_ptr + shared.NBYTES) - tl.load(info_ptr + shared.PAYLOAD)
    is_listed = (tl.load(listed_ptr) == payload_nbytes) & (tl.load(listed_ptr + 1) == 0)
    return _first(status, _is_coded(info_ptr) & (is_listed == 0), _DIRECTORY)


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
def _decode_block(ptr, end, n, kind, base, nest, layout):
    """The words int32 [4096] of a coded block, and whether an encoder can have written it."""
    # 1. Which words there are. The cursor only moves forward, so it misses the end for good once it is beyond.
    i = tl.arange(0, _BLOCK)
    cursor = tl.zeros_like(n)
    left = i < n
    is_masked = ((kind & shared.ZEROS_LEFT_OUT) != 0).to(tl.int32)
    mask, is_sound = _bits(ptr, cursor, end, left, i, n, is_masked)
    left = left & ((mask | (1 - is_masked)) != 0)
    cursor += is_masked * ((n + 7) // 8)
    rank, count = _ranks(left)

    # 2. Mantissas and signs.
    words = tl.zeros_like(i)
    nbytes = shared.word_nbytes(layout)
    sign_shift = 8 * nbytes - 1
    num_planes = shared.num_byte_planes(layout)
    for plane in tl.static_range(3):
        is_there = ((kind & (shared.PLANE_LEFT_OUT << plane)) == 0) | (nbytes != 4) | (plane == 2)
        is_there = is_there & (plane < num_planes)
        place = cursor + rank
        byte = tl.load(ptr + place, mask=left & (place < tl.where(is_there, end, 0)), other=0).to(tl.int32)
        has_sign = (plane == num_planes - 1) & (shared.has_sign_byte(layout) == 1)
        with_sign = ((byte & 127) << (8 * plane)) | ((byte >> 7) << sign_shift)
        words |= tl.where(has_sign, with_sign, byte << (8 * plane))
        cursor += tl.where(is_there, count, 0)
    first = shared.first_bit(layout)
    low_bits = shared.exponent_shift(layout) - first
    num_bits = low_bits + shared.has_sign_bit(layout)
    bits, is_tidy = _bits(ptr, cursor, end, left, rank, count, num_bits)
    is_sound = is_sound & is_tidy
    words |= (bits & ((1 << low_bits) - 1)) << first
    words |= tl.where(shared.has_sign_bit(layout) == 1, (bits >> low_bits) << sign_shift, 0)
    cursor += num_bits * ((count + 7) // 8)

    # 3. Exponents, tier by tier, and those that escaped.
    kept = left
    exponent = tl.zeros_like(i)
    window = base
    inner = tl.zeros_like(base)
    for tier in range(0, 3):
        offset = tl.where(tier > 0, (nest >> tl.maximum(3 * tier - 3, 0)) & 7, 0)
        window -= offset
        width = shared.tier_width(kind & 7, tier)
        passes = (1 << width) - 1
        codes, is_tidy = _bits(ptr, cursor, end, left, rank, count, width)
        is_sound = is_sound & is_tidy
        distance = tl.where(codes < offset, codes, codes + inner)
        exponent = tl.where(left, (window + distance) & 255, exponent)
        cursor += width * ((count + 7) // 8)
        left = left & (codes == passes)
        rank, count = _ranks(left)
        inner += passes
    place = cursor + rank
    escaped = tl.load(ptr + place, mask=left & (place < end), other=0).to(tl.int32)
    exponent = tl.where(left, escaped, exponent)
    cursor += count
    is_exponent = tl.max(exponent, axis=0) >> shared.exponent_bits(layout) == 0
    is_sound = is_sound & is_exponent & (cursor == end)
    words |= (exponent ^ shared.exponent_flip(layout)) << shared.exponent_shift(layout)
    return tl.where(kept, words, 0), is_sound


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


@triton.jit(do_not_specialize=_COUNTS)
def _decode_kernel(
    message_ptr,
    info_ptr,
    front_ptr,
    listed_ptr,
    ends_ptr,
    numel,
    num_blocks,
    expected_dtype,
    out_ptr,
    results_ptr,
    ADDS: tl.constexpr,
):
    """Write or add each block's words; of each block, a fault and its parts of the checksum, int64 [3, num_blocks]."""
    # 1. What and where. A message that was found damaged has no words.
    block = tl.program_id(0).to(tl.int64)
    status = _status_of_front(message_ptr, info_ptr, front_ptr, listed_ptr, numel, expected_dtype)
    layout = tl.load(info_ptr + shared.LAYOUT).to(tl.int32)
    item = shared.word_nbytes(layout)
    n = tl.where(status == 0, tl.minimum(numel - block * _BLOCK, _BLOCK), 0).to(tl.int32)
    i = tl.arange(0, _BLOCK)
    is_coded = _is_coded(info_ptr) & (status == 0)
    ptr = message_ptr + tl.load(info_ptr + shared.PAYLOAD)
    entry_ptr = message_ptr + tl.load(info_ptr + shared.DIRECTORY) + 2 * num_blocks.to(tl.int64) + block
    kind = tl.load(entry_ptr, mask=is_coded, other=0).to(tl.int32)
    base = tl.load(entry_ptr + num_blocks, mask=is_coded, other=0).to(tl.int32)
    nest = tl.load(entry_ptr + 2 * num_blocks.to(tl.int64), mask=is_coded, other=0).to(tl.int32)
    end = tl.load(ends_ptr + block)
    previous_end = tl.load(ends_ptr + block - 1, mask=block > 0, other=0)

    # 2. The words.
    words = tl.zeros_like(i)
    is_sound = n >= 0
    if kind == 0:
        start = tl.where(is_coded, previous_end, block * _BLOCK * item)
        for k in tl.static_range(4):
            byte = tl.load(ptr + start + i * item + k, mask=i < tl.where(k < item, n, 0), other=0).to(tl.int32)
            words |= byte << (8 * k)
    else:
        # Places count from the block's first byte, in 32 bits: lists say lengths of 16 bits.
        ptr += previous_end
        size = (end - previous_end).to(tl.int32)
        if (kind & 7) == shared.RANKED:
            words, is_sound = _decode_ranked_block(ptr, size, n, kind, layout)
        else:
            words, is_sound = _decode_block(ptr, size, n, kind, base, nest, layout)

    # 3. Their checksum, and where they go.
    total, weighted = shared.block_sums(words, block, item)
    results_ptr += block
    tl.store(results_ptr, (is_sound == 0).to(tl.int64))
    tl.store(results_ptr + num_blocks, total)
    tl.store(results_ptr + 2 * num_blocks.to(tl.int64), weighted)
    place = out_ptr + block * _BLOCK + i
    if ADDS:
        dtype = tl.load(info_ptr + shared.DTYPE)
        tl.store(place, tl.load(place, mask=i < n, other=0) + _to_float(words, dtype), mask=i < n)
    else:
        tl.store(place, words.to(out_ptr.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=_COUNTS)
def _finish_kernel(message_ptr, info_ptr, front_ptr, listed_ptr, results_ptr, numel, expected_dtype, status_ptr):
    status = _status_of_front(message_ptr, info_ptr, front_ptr, listed_ptr, numel, expected_dtype)
    status = _first(status, tl.load(results_ptr) != 0, _PAYLOAD)
    is_sum = tl.load(results_ptr + 1) == tl.load(info_ptr + shared.SUM)
    is_sum = is_sum & (tl.load(results_ptr + 2) == tl.load(info_ptr + shared.WEIGHTED_SUM))
    status = _first(status, is_sum == 0, _CHECKSUM)
    status = _first(status, tl.load(front_ptr + 2) != 0, _TRAILING)
    tl.store(status_ptr, status.to(tl.int32))


def decode(out: Tensor, message: Tensor, adds: bool) -> Tensor:
    """Write or add the values of a message; return its status. Arguments are checked by the caller."""
    expected_dtype = _ANY if adds else DTYPE_NUMBERS[out.dtype]
    flat = words_of(out.detach()).view(-1)
    if not adds:
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()])
    numel = flat.numel()
    num_blocks = triton.cdiv(numel, _BLOCK.value)
    layouts = tuple(shared.packed_layout(dtype) for dtype in DTYPE_NUMBERS)

    items = tuple(LAYOUTS[dtype].nbytes for dtype in DTYPE_NUMBERS)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=out.device)

    info, lists, results = numbers(shared.INFO), numbers(2, num_blocks), numbers(3, num_blocks)
    status = torch.empty((), dtype=torch.int32, device=out.device)
    with _on_device(out):
        _read_header_kernel[(1,)](message, message.numel(), info, LAYOUTS=layouts, ITEMS=items, enable_fp_fusion=False)
        front = shared.front_sums(message, info)
        if num_blocks:
            _read_lists_kernel[(triton.cdiv(num_blocks, _LISTED.value),)](
                message, info, numel, num_blocks, lists, enable_fp_fusion=False
            )
        listed = lists.sum(1)
        if num_blocks:
            ends = lists[0].cumsum(0)
            _decode_kernel[(num_blocks,)](
                message,
                info,
                front,
                listed,
                ends,
                numel,
                num_blocks,
                expected_dtype,
                flat,
                results,
                ADDS=adds,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
        _finish_kernel[(1,)](
            message, info, front, listed, results.sum(1), numel, expected_dtype, status, enable_fp_fusion=False
        )
    return status
