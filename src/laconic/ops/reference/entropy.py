"""Blocks of entropy-coded messages, the specification: tabled asymmetric numeral systems (Duda, arXiv:1311.2540).

docs/formats.md, "Entropy-coded messages", says the same in words. Plain Python, a value at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from laconic.ops.lossless import checksum
from laconic.ops.reference.bits import pack_bits, unpack_bits

__all__ = ["decode_blocks_", "encode_blocks"]

BLOCK_NUMEL = 1 << 17
LOG_STATES = 12
NUM_STATES = 1 << LOG_STATES
LANES = 8
STRIDE = NUM_STATES // 2 + NUM_STATES // 8 + 3
ZERO_SHARE = 32
"""Zeros are left out of a block if more than one of so many of its words is zero."""
SAMPLE_RUN, SAMPLE_STEP = 128, 2048
"""Of long planes the first so many of each so many bytes say whether all are looked at."""
RAW, CONSTANT, CODED = range(3)
_HEAD = struct.Struct("<BBI")  # kind, number of values - 1, bytes of the stream


class _Damaged(Exception):
    pass


def encode_blocks(data: Tensor, itemsize: int, is_rotated: bool, room: Tensor) -> tuple[int, int, int]:
    """Write the blocks of `data`, uint8 [n * itemsize], to the beginning of `room`, uint8 of at least their bytes.

    Returns:
        How many bytes they have, and sum and weighted sum of `data`.
    """
    written = bytearray()
    for words in _blocks(data, itemsize):
        is_there = (words != 0).any(1)
        leaves_out = itemsize > 1 and int((~is_there).sum()) * ZERO_SHARE > len(words)
        written.append(leaves_out)
        if leaves_out:
            written += _encoded_plane(pack_bits(is_there))
            words = words[is_there]
        planes = words << 1 | words.roll(1, 1) >> 7 if is_rotated else words
        for plane in planes.t():
            written += _encoded_plane(plane)
    room[: len(written)] = torch.tensor(written, dtype=torch.uint8)
    return len(written), *_sums(data)


def decode_blocks_(out: Tensor, blocks: Tensor, itemsize: int, is_rotated: bool) -> tuple[int, int, int]:
    """Write the words of blocks, uint8 [any], to `out`, uint8 [n * itemsize]. What is behind the blocks is not read.

    Returns:
        How many bytes the blocks have, and sum and weighted sum of `out`; zeros if they are not what an encoder writes.
    """
    left = memoryview(blocks.numpy())
    try:
        for words in _blocks(out, itemsize):
            left = _decode_block(words, left, is_rotated)
    except _Damaged:
        return 0, 0, 0
    return len(blocks) - len(left), *_sums(out)


def _blocks(data: Tensor, itemsize: int) -> Iterator[Tensor]:
    words = data.view(len(data) // itemsize, itemsize)
    for start in range(0, len(words), BLOCK_NUMEL):
        yield words[start : start + BLOCK_NUMEL]


def _sums(data: Tensor) -> tuple[int, int]:
    total, weighted = checksum(data)
    return int(total) & 0xFFFFFFFFFFFFFFFF, int(weighted) & 0xFFFFFFFFFFFFFFFF


def _decode_block(words: Tensor, left: memoryview, is_rotated: bool) -> memoryview:
    n, itemsize = words.shape
    leaves_out, left = _taken(left, 1)
    if leaves_out[0] > (itemsize > 1):
        raise _Damaged
    is_there = torch.ones(n, dtype=torch.bool)
    if leaves_out[0]:
        mask, left = _decoded_plane(left, (n + 7) // 8)
        bits = unpack_bits(mask, 8 * len(mask), torch.bool, 0, 1)
        if bits[n:].any():
            raise _Damaged
        is_there = bits[:n]
    planes = []
    for _ in range(itemsize):
        plane, left = _decoded_plane(left, int(is_there.sum()))
        planes.append(plane)
    joined = torch.stack(planes, 1)
    words.zero_()
    words[is_there] = joined >> 1 | joined.roll(-1, 1) << 7 if is_rotated else joined
    return left


def _taken(left: memoryview, nbytes: int) -> tuple[memoryview, memoryview]:
    if len(left) < nbytes:
        raise _Damaged
    return left[:nbytes], left[nbytes:]


# --- one plane ---


def _encoded_plane(plane: Tensor) -> bytes:
    n = len(plane)
    raw = bytes([RAW]) + plane.contiguous().numpy().tobytes() if n else b""
    if not n or (n >= 8 * SAMPLE_STEP and not _pays(_counts(plane[torch.arange(n) % SAMPLE_STEP < SAMPLE_RUN]))):
        return raw
    counts = _counts(plane)
    values = [value for value in range(256) if counts[value]]
    table_nbytes = _HEAD.size + 3 * len(values)
    if len(values) == 1:
        return bytes([CONSTANT, *values])
    if not _pays(counts) or table_nbytes >= n:
        return raw
    shares = _shares(counts)
    stream = _stream(plane.tolist(), shares)
    if table_nbytes + len(stream) > n:
        return raw
    listed = struct.pack(f"<{len(values)}H", *(shares[value] for value in values))
    return _HEAD.pack(CODED, len(values) - 1, len(stream)) + bytes(values) + listed + stream


def _decoded_plane(left: memoryview, n: int) -> tuple[Tensor, memoryview]:
    if not n:
        return torch.empty(0, dtype=torch.uint8), left
    kind = _taken(left, 1)[0][0]
    if kind == RAW:
        plane, left = _taken(left[1:], n)
        return torch.frombuffer(bytearray(plane), dtype=torch.uint8), left
    if kind == CONSTANT:
        both, left = _taken(left, 2)
        return torch.full((n,), both[1], dtype=torch.uint8), left
    if kind != CODED:
        raise _Damaged
    head, left = _taken(left, _HEAD.size)
    _, last, nbytes = _HEAD.unpack(head)
    values, left = _taken(left, last + 1)
    listed, left = _taken(left, 2 * (last + 1))
    stream, left = _taken(left, nbytes)
    shares = [0] * 256
    for value, share in zip(values, struct.unpack(f"<{last + 1}H", listed), strict=True):
        shares[value] = share
    is_ascending = all(one < other for one, other in pairwise(values))
    if not is_ascending or sum(shares) != NUM_STATES or not all(0 < shares[value] < NUM_STATES for value in values):
        raise _Damaged
    return torch.tensor(_read_stream(stream, shares, n), dtype=torch.uint8), left


# --- the code ---


def _counts(plane: Tensor) -> list[int]:
    counts: list[int] = plane.long().bincount(minlength=256).tolist()
    return counts


def _shares(counts: Sequence[int]) -> list[int]:
    """How many states each value gets: its part of the range where counts are laid end to end, but at least one."""
    shares, before, n = [], 0, sum(counts)
    for count in counts:
        start, before = before * NUM_STATES // n, before + count
        shares.append(max(before * NUM_STATES // n - start, int(count > 0)))
    while sum(shares) > NUM_STATES:
        shares[shares.index(max(shares))] -= 1
    return shares


def _pays(counts: Sequence[int]) -> bool:
    """Whether a code saves a thirty-second of the bits, each state being as likely as any other."""
    cost = 0  # in 4096ths of a bit
    for count, share in zip(counts, _shares(counts), strict=True):
        most = LOG_STATES + 1 - share.bit_length()
        cost += count * (NUM_STATES * (most + 1) - (share << most))
    return cost < NUM_STATES * 8 * 31 // 32 * sum(counts)


def _spread(shares: Sequence[int]) -> list[int]:
    """The value of every state."""
    value_of, place = [0] * NUM_STATES, 0
    for value, share in enumerate(shares):
        for _ in range(share):
            value_of[place] = value
            place = (place + STRIDE) % NUM_STATES
    return value_of


def _stream(plane: Sequence[int], shares: Sequence[int]) -> bytes:
    """From the last value to the first: each makes its lane give away low bits until its share of states is left."""
    states: list[list[int]] = [[] for _ in shares]
    for place, value in enumerate(_spread(shares)):
        states[value].append(NUM_STATES + place)
    lanes = [NUM_STATES] * LANES
    given = []
    for i in reversed(range(len(plane))):
        state, share = lanes[i % LANES], shares[plane[i]]
        count = state.bit_length() - share.bit_length()
        count -= state >> count < share
        given.append(_bits(state, count))
        lanes[i % LANES] = states[plane[i]][(state >> count) - share]
    given += [_bits(state, LOG_STATES) for state in reversed(lanes)]
    text = "".join(given) + "1"  # the highest bit of the last byte is first
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "little")


def _bits(number: int, count: int) -> str:
    return format(number & ((1 << count) - 1), f"0{count}b") if count else ""


def _read_stream(stream: memoryview, shares: Sequence[int], n: int) -> list[int]:
    if not len(stream) or not stream[0]:
        raise _Damaged
    text = format(int.from_bytes(stream, "little"), f"0{8 * len(stream)}b").rstrip("0")[:-1]
    left = len(text)

    def read(count: int) -> int:
        nonlocal left
        left -= count
        if left < 0:
            raise _Damaged
        return int(text[left : left + count], 2) if count else 0

    nexts, entries = list(shares), []
    for value in _spread(shares):
        entries.append((value, nexts[value]))
        nexts[value] += 1
    lanes = [read(LOG_STATES) for _ in range(LANES)]
    plane = []
    for i in range(n):
        value, state = entries[lanes[i % LANES]]
        count = LOG_STATES + 1 - state.bit_length()
        lanes[i % LANES] = (state << count) + read(count) - NUM_STATES
        plane.append(value)
    if left or any(lanes):
        raise _Damaged
    return plane
