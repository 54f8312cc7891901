"""A decoder of lossless messages written from docs/formats.md alone, one bit at a time and without torch."""

from __future__ import annotations

import struct

WIDTHS = {1: (3,), 2: (2, 2, 3), 3: (3, 2, 2)}
# dtype: bytes per word, first bit and number of bits of the exponent, what it is exclusive or'ed with, byte planes as
# lists of bits, bit planes.
LAYOUTS = {
    0: (1, 4, 4, 0, [], [0, 1, 2, 3]),
    1: (2, 7, 8, 0, [[*range(7), 15]], []),
    2: (2, 10, 5, 0, [[*range(8)]], [8, 9, 15]),
    3: (4, 23, 8, 0, [[*range(8)], [*range(8, 16)], [*range(16, 23), 31]], []),
    4: (1, 3, 4, 0, [], [0, 1, 2, 7]),
    5: (1, 2, 5, 0, [], [0, 1, 7]),
    6: (1, 4, 4, 8, [], [0, 1, 2, 3]),
}
LAYOUTS |= {7: LAYOUTS[0], 15: LAYOUTS[2], 16: LAYOUTS[3], 18: LAYOUTS[4], 19: LAYOUTS[5], 20: LAYOUTS[0]}
LAYOUTS |= {n: (k, 0, 0, 0, [], []) for n, k in ((8, 2), (9, 2), (10, 4), (11, 4), (12, 8), (13, 8), (14, 8), (17, 8))}
RANKS = [(), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]
RANKS += [(1, 1), (1, 2, 2), (1, 2, 4), (2, 1, 1), (2, 2, 3), (3, 2, 3), (4, 3, 4), (5, 4, 4)]


def decode(message: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """The dtype's number, the shape, and the original's bytes."""
    magic, version, dtype, code, num_dims = struct.unpack_from("<4s4B", message)
    numel, nbytes, capacity, total, weighted, header_sum, reserved = struct.unpack_from("<7Q", message, 8)
    assert (magic, reserved) == (b"LCNZ", 0)
    assert version in (1, 2)
    assert version == 2 or dtype < 7
    assert len(message) == capacity
    assert not any(message[nbytes:])
    shape = struct.unpack_from(f"<{num_dims}Q", message, 64)
    at = 64 + 8 * num_dims
    num_blocks = -(-numel // 4096) if code else 0
    front = bytearray(message[: at + 5 * num_blocks])
    front[48:56] = bytes(8)
    front_sums = _checksum(front)
    assert header_sum == (front_sums[0] + (front_sums[1] << 20)) % 2**64
    if code == 0:
        original = message[at:nbytes]
    else:
        lengths = struct.unpack_from(f"<{num_blocks}H", message, at)
        kinds, bases, nests = (message[at + i * num_blocks :][:num_blocks] for i in (2, 3, 4))
        at += 5 * num_blocks
        original = b""
        for b in range(num_blocks):
            payload = _Payload(message[at : at + lengths[b]])
            n = min(4096, numel - 4096 * b)
            if kinds[b] & 7 == 4:
                assert (version, kinds[b] & ~8, bases[b], nests[b]) == (2, 4, 0, 0)
                original += _ranked_block(payload, n, LAYOUTS[dtype], kinds[b])
            else:
                original += _block(payload, n, LAYOUTS[dtype], kinds[b], bases[b], nests[b])
            assert payload.at == len(payload.data)
            at += lengths[b]
        assert at == nbytes
    assert _checksum(original) == (total, weighted)
    return dtype, shape, original


class _Payload:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def bits(self, count: int) -> list[int]:
        stream = int.from_bytes(self.bytes((count + 7) // 8), "little")
        assert stream >> count == 0
        return [(stream >> i) & 1 for i in range(count)]


def _block(payload: _Payload, n: int, layout: tuple, kind: int, base: int, nest: int) -> bytes:
    nbytes, exponent_bit, exponent_bits, flip, byte_planes, bit_planes = layout
    if kind == 0:
        return payload.bytes(n * nbytes)
    kept = payload.bits(n) if kind & 8 else [1] * n
    m = sum(kept)
    words = [0] * m
    for p, places in enumerate(byte_planes):
        plane = bytes(m) if p < 2 and (kind >> (4 + p)) & 1 else payload.bytes(m)
        for i, byte in enumerate(plane):
            words[i] |= sum(((byte >> k) & 1) << place for k, place in enumerate(places))
    for place in bit_planes:
        for i, bit in enumerate(payload.bits(m)):
            words[i] |= bit << place
    exponents = dict.fromkeys(range(m))
    left, start, inner = list(range(m)), base, 0
    for width, offset in zip(WIDTHS[kind & 7], (0, nest & 7, nest >> 3), strict=False):
        start -= offset
        planes = [payload.bits(len(left)) for _ in range(width)]
        codes = [sum(plane[i] << k for k, plane in enumerate(planes)) for i in range(len(left))]
        for i, code in zip(left, codes, strict=True):
            exponents[i] = (start + (code if code < offset else code + inner)) % 256
        left = [i for i, code in zip(left, codes, strict=True) if code == (1 << width) - 1]
        inner += (1 << width) - 1
    exponents |= dict(zip(left, payload.bytes(len(left)), strict=True))
    assert all(e < 1 << exponent_bits for e in exponents.values())
    coded = iter([word | (exponents[i] ^ flip) << exponent_bit for i, word in enumerate(words)])
    return b"".join((next(coded) if keep else 0).to_bytes(nbytes, "little") for keep in kept)


def _ranked_block(payload: _Payload, n: int, layout: tuple, kind: int) -> bytes:
    nbytes, exponent_bit, exponent_bits = layout[:3]
    kept = payload.bits(n) if kind & 8 else [1] * n
    m = sum(kept)
    words = [0] * m
    for p in range(nbytes):
        places = list(range(8 * p, 8 * p + 8))
        if exponent_bits == 8 and p == nbytes - 2:
            places[7] = 8 * nbytes - 1
        if exponent_bits == 8 and p == nbytes - 1:
            places = list(range(exponent_bit, exponent_bit + 8))
        for i, byte in enumerate(_ranked_plane(payload, m)):
            words[i] |= sum(((byte >> k) & 1) << place for k, place in enumerate(places))
    coded = iter(words)
    return b"".join((next(coded) if keep else 0).to_bytes(nbytes, "little") for keep in kept)


def _ranked_plane(payload: _Payload, m: int) -> list[int]:
    number, listed = payload.bytes(2)
    size = sum((1 << width) - 1 for width in RANKS[number])
    assert listed <= size + 1
    values = payload.bytes(listed)
    ranks, left = [0] * m, list(range(m))
    for width in RANKS[number]:
        planes = [payload.bits(len(left)) for _ in range(width)]
        codes = [sum(plane[i] << k for k, plane in enumerate(planes)) for i in range(len(left))]
        for i, code in zip(left, codes, strict=True):
            ranks[i] += code
        left = [i for i, code in zip(left, codes, strict=True) if code == (1 << width) - 1]
    escaped = dict(zip(left, payload.bytes(len(left)), strict=True)) if listed <= size else {}
    return [escaped[i] if i in escaped else values[rank] for i, rank in enumerate(ranks)]


def _checksum(data: bytes) -> tuple[int, int]:
    data = bytes(data) + bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return sum(words) % 2**64, sum((j + 1) * word for j, word in enumerate(words)) % 2**64
