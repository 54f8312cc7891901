"""Blocks of entropy-coded messages, the specification: byte planes under Huffman codes of at most 11 bits.

docs/formats.md, "Entropy-coded messages", says the same in words. Plain Python, a value at a time.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from laconic.ops.lossless import checksum
from laconic.ops.reference.bits import pack_bits, unpack_bits

BLOCK_NUMEL = 1 << 18
MAX_BITS = 11
STREAMS = 4
ZERO_SHARE = 32
"""Zeros are left out of a block if more than one of so many of its words is zero."""
SAMPLE_RUN, SAMPLE_STEP = 128, 2048
"""Of long planes the first so many of each so many bytes say whether all are looked at."""
RAW, CONSTANT, CODED = range(3)
_HEAD = struct.Struct("<BBB4I")  # kind, first and last value, bytes of the streams


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
    room[: len(written)] = torch.tensor(written, dtype=torch.uint8, device="cpu")
    return len(written), *_sums(data)


def decode_blocks_(out: Tensor, blocks: Tensor, itemsize: int, is_rotated: bool) -> tuple[int, int, int]:
    """Write the words of blocks, uint8 [any], to `out`, uint8 [n * itemsize]. What is behind the blocks is not read.

    Returns:
        How many bytes the blocks have, and sum and weighted sum of `out`; zeros if they are not what an encoder writes.
    """
    left = blocks.numpy().data
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
    is_there = torch.ones(n, dtype=torch.bool, device="cpu")
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
    if not n:
        return raw
    if n >= 8 * SAMPLE_STEP:
        sampled = _counts(plane[torch.arange(n, device="cpu") % SAMPLE_STEP < SAMPLE_RUN])
        # Where the squares of shares add up to less than 1.125 / 256, no code takes less than 7.8 bits a byte.
        if 2048 * sum(count * (count - 1) for count in sampled) < 9 * sum(sampled) ** 2:
            return raw
    counts = _counts(plane)
    first, last = min(values := [value for value in range(256) if counts[value]]), max(values)
    if first == last:
        return bytes([CONSTANT, first])
    lengths = _lengths(counts)
    num_bits = sum(count * length for count, length in zip(counts, lengths, strict=True))
    if 32 * (_HEAD.size + (last - first) // 2 + 1 + num_bits // 8 + STREAMS) > 31 * n:
        return raw
    codes = _codes(lengths)
    streams = [_stream(part.tolist(), codes) for part in _parts(plane)]
    halves = [*lengths[first : last + 1], 0]
    packed = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=False))
    return _HEAD.pack(CODED, first, last, *map(len, streams)) + packed + b"".join(streams)


def _decoded_plane(left: memoryview, n: int) -> tuple[Tensor, memoryview]:
    if not n:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), left
    kind = _taken(left, 1)[0][0]
    if kind == RAW:
        plane, left = _taken(left[1:], n)
        return torch.frombuffer(bytearray(plane), dtype=torch.uint8), left
    if kind == CONSTANT:
        both, left = _taken(left, 2)
        return torch.full((n,), both[1], dtype=torch.uint8, device="cpu"), left
    if kind != CODED:
        raise _Damaged
    head, left = _taken(left, _HEAD.size)
    _, first, last, *sizes = _HEAD.unpack(head)
    if first >= last:
        raise _Damaged
    packed, left = _taken(left, (last - first) // 2 + 1)
    halves = [half for both in packed for half in (both & 15, both >> 4)]
    lengths = [*[0] * first, *halves, *[0] * 256][:256]
    if (
        any(halves[last - first + 1 :])
        or max(lengths) > MAX_BITS
        or not (lengths[first] and lengths[last])
        or sum(2**-length for length in lengths if length) != 1
    ):
        raise _Damaged
    found = {code: value for value, code in _codes(lengths).items()}
    read: list[int] = []
    parts = _parts(torch.empty(n, dtype=torch.uint8, device="cpu"))
    for size, part in zip(sizes, parts, strict=True):
        stream, left = _taken(left, size)
        read += _read_stream(stream, found, len(part))
    return torch.tensor(read, dtype=torch.uint8, device="cpu"), left


def _parts(plane: Tensor) -> list[Tensor]:
    size = -(-len(plane) // STREAMS)
    return [plane[k * size : (k + 1) * size] for k in range(STREAMS)]


# --- the code ---


def _counts(plane: Tensor) -> list[int]:
    counts: list[int] = plane.long().bincount(minlength=256).tolist()
    return counts


def _lengths(counts: Sequence[int]) -> list[int]:
    """Bits of each value in a Huffman code, 0 for those that do not come; of two values or more.

    While one would have more than MAX_BITS, all counts are halved, upwards.
    """
    values = sorted((value for value in range(256) if counts[value]), key=lambda value: counts[value])
    weights = [counts[value] for value in values]
    while True:
        leaves, nodes = deque((weight, [i]) for i, weight in enumerate(weights)), deque[tuple[int, list[int]]]()
        depths = [0] * len(values)
        while len(leaves) + len(nodes) > 1:
            taken = [
                leaves.popleft() if leaves and (not nodes or leaves[0][0] <= nodes[0][0]) else nodes.popleft()
                for _ in range(2)
            ]
            below = taken[0][1] + taken[1][1]
            for i in below:
                depths[i] += 1
            nodes.append((taken[0][0] + taken[1][0], below))
        if max(depths, default=0) <= MAX_BITS:
            break
        weights = [(weight + 1) // 2 for weight in weights]
    lengths = [0] * 256
    for value, depth in zip(values, depths, strict=True):
        lengths[value] = depth
    return lengths


def _codes(lengths: Sequence[int]) -> dict[int, str]:
    """The canonical code of each value, as bits in their order: ascending, shorter ones first, then by value."""
    codes, code = {}, 0
    for length in range(1, MAX_BITS + 1):
        for value in range(256):
            if lengths[value] == length:
                codes[value] = format(code, f"0{length}b")
                code += 1
        code *= 2
    return codes


def _stream(part: Sequence[int], codes: Mapping[int, str]) -> bytes:
    text = "".join(codes[value] for value in part)
    return int(text[::-1] or "0", 2).to_bytes((len(text) + 7) // 8, "little")


def _read_stream(stream: memoryview, found: Mapping[str, int], n: int) -> list[int]:
    text = "".join(format(byte, "08b")[::-1] for byte in stream)
    part, start = [], 0
    for _ in range(n):
        stop = start + 1
        while text[start:stop] not in found:
            stop += 1
            if stop > len(text):
                raise _Damaged
        part.append(found[text[start:stop]])
        start = stop
    if len(text) - start >= 8 or "1" in text[start:]:
        raise _Damaged
    return part
