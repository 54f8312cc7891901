"""Lossless messages: the specification.

A block's payload is a row of *sections*. A section has one bit or one byte for some of the block's words, in order; in
bytes a section of k bits takes ceil(k / 8). Both directions go through the sections once, for all blocks at a time: the
encoder lists them, the decoder moves a cursor per block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.ops.declarations.lossless import check_lossless_decode_, check_lossless_decode_add_, check_lossless_encode
from laconic.ops.lossless import (
    BLOCK_NUMEL,
    CODES,
    DTYPE_NUMBERS,
    EXPONENT_DTYPES,
    HEADER_NBYTES,
    LAYOUTS,
    MAGIC,
    MAX_FRONT_NBYTES,
    PLANE_LEFT_OUT,
    RANKED,
    RANKED_VERSION,
    TOO_LONG,
    VERSION,
    WIDTHS,
    ZEROS_LEFT_OUT,
    DamagedMessage,
    Header,
    Status,
    WordLayout,
    checksum,
    front_checksum,
    parse_header,
    words_of,
)
from laconic.ops.reference.lossless_ranked import decode_ranked, encode_ranked, split_planes

__all__ = ["lossless_decode_", "lossless_decode_add_", "lossless_encode"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPAN = 32  # exponents that the encoder considers, from the largest one down
_GROUP = 256 * BLOCK_NUMEL  # elements that are worked on at a time, to bound memory


# --- ops ---


@torch.no_grad()
def lossless_encode(x: Tensor, code: str, capacity_nbytes: int | None) -> Tensor:
    """The message of `x` at the front of uint8 [capacity or max_nbytes]; see `laconic.ops.lossless_encode`."""
    size = check_lossless_encode(x, code, capacity_nbytes)
    layout, dtype = LAYOUTS[x.dtype], DTYPE_NUMBERS[x.dtype]
    x = words_of(x)
    original = x.reshape(-1).contiguous().view(torch.uint8)
    raw_nbytes = HEADER_NBYTES + 8 * x.dim() + original.numel()

    # 1. The body: coded if that is shorter.
    number, body, directory_nbytes = CODES["raw"], original, 0
    version = VERSION if dtype < len(EXPONENT_DTYPES) else RANKED_VERSION
    if code != "raw":
        encode_group = _encode_blocks if layout.has_exponent else _encode_ranked_blocks
        groups = [encode_group(group, layout, code) for group in _words(original, layout).split(_GROUP)]
        payload, lengths, kinds, bases, nests = (torch.cat(parts) for parts in zip(*groups, strict=True))
        directory = torch.cat((lengths.to(torch.int16).view(torch.uint8), kinds, bases, nests))
        if HEADER_NBYTES + 8 * x.dim() + directory.numel() + payload.numel() < raw_nbytes:
            number, body, directory_nbytes = CODES[code], torch.cat((directory, payload)), directory.numel()
            if ((kinds & 7) == RANKED).any():
                version = RANKED_VERSION

    # 2. Without the body if it does not fit.
    nbytes = HEADER_NBYTES + 8 * x.dim() + body.numel()
    if capacity_nbytes is not None and nbytes > capacity_nbytes:
        number, body, directory_nbytes = TOO_LONG, body[:0], 0
        version = VERSION if dtype < len(EXPONENT_DTYPES) else RANKED_VERSION
        nbytes = HEADER_NBYTES + 8 * x.dim()

    # 3. The header, whose own checksum goes in last.
    sums = [int(value) & 0xFFFFFFFFFFFFFFFF for value in checksum(original)]
    dims = (dtype, number, x.dim())
    capacity = nbytes if capacity_nbytes is None else capacity_nbytes
    header = MAGIC + struct.pack(f"<4B7Q{x.dim()}Q", version, *dims, x.numel(), nbytes, capacity, *sums, 0, 0, *x.shape)
    message = torch.zeros(size, dtype=torch.uint8, device=x.device)
    message[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    message[len(header) : nbytes] = body
    header_sum = struct.pack("<Q", front_checksum(message[: len(header) + directory_nbytes]))
    message[48:56] = torch.frombuffer(bytearray(header_sum), dtype=torch.uint8)
    return message


@torch.no_grad()
def lossless_decode_(out: Tensor, message: Tensor) -> Tensor:
    """Write the values of `message` to `out`; see `laconic.ops.lossless_decode_`."""
    check_lossless_decode_(out, message)
    try:
        words = words_of(out)
        words.copy_(_decode(message, words.numel(), out.dtype).view(words.dtype).view(words.shape))
        return torch.zeros((), dtype=torch.int32, device=out.device)
    except DamagedMessage as damage:
        return torch.tensor(int(damage.status), dtype=torch.int32, device=out.device)


@torch.no_grad()
def lossless_decode_add_(total: Tensor, message: Tensor) -> Tensor:
    """Add the values of `message` to `total`; see `laconic.ops.lossless_decode_add_`."""
    check_lossless_decode_add_(total, message)
    try:
        total.add_(_decode(message, total.numel(), None).float().view(total.shape))
        return torch.zeros((), dtype=torch.int32, device=total.device)
    except DamagedMessage as damage:
        return torch.tensor(int(damage.status), dtype=torch.int32, device=total.device)


# --- encode ---


@dataclass(frozen=True)
class _Section:
    """One value for some words; `block` [k] ascends, `value` [k] is a bit or a byte."""

    block: Tensor
    value: Tensor
    is_bits: bool

    def nbytes(self, num_blocks: int) -> Tensor:
        """[num_blocks] bytes that the section takes of each payload."""
        count = torch.bincount(self.block, minlength=num_blocks)
        return (count + 7) // 8 if self.is_bits else count


@dataclass(frozen=True)
class _Choice:
    """What the encoder decided, each [num_blocks]: bits 0-3 of the kind, and where the windows start."""

    kind: Tensor
    base: Tensor
    o2: Tensor
    o3: Tensor


def _encode_blocks(words: Tensor, layout: WordLayout, code: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Payloads of consecutive blocks, and of each block its length (int64), kind, base and nest (uint8)."""
    num_blocks = -(-words.numel() // BLOCK_NUMEL)
    block = torch.arange(words.numel(), device=words.device) // BLOCK_NUMEL
    choice = _choose(words, block, num_blocks, layout, code)

    # 1. All sections of all blocks.
    sections = []
    kind = choice.kind.clone()
    zeros_out = (kind & ZEROS_LEFT_OUT).bool()
    masked = zeros_out[block]
    sections.append(_Section(block[masked], (words != 0)[masked].long(), True))
    kept = ~masked | (words != 0)
    kept_words, kept_block = words[kept], block[kept]
    for index, value in enumerate(_byte_planes(kept_words, layout)):
        needed = torch.ones(num_blocks, dtype=torch.bool, device=words.device)
        if layout.nbytes == 4 and index < 2:
            needed = (
                torch.zeros(num_blocks, device=words.device, dtype=torch.float32).index_add_(
                    0, kept_block, (value != 0).float()
                )
                > 0
            )
            kind += torch.where(needed, 0, PLANE_LEFT_OUT << index)
        sections.append(_Section(kept_block[needed[kept_block]], value[needed[kept_block]], False))
    sections += [_Section(kept_block, (kept_words >> shift) & 1, True) for shift in layout.bit_shifts]
    exponent_sections = list(_exponent_sections(_exponent(kept_words, layout), kept_block, choice))
    sections += exponent_sections

    # 2. Blocks that look as if ranks were shorter are ranked if they are; those that do not get shorter are raw.
    lengths = torch.stack([section.nbytes(num_blocks) for section in sections]).sum(0)
    raw_lengths = torch.bincount(block, minlength=num_blocks) * layout.nbytes
    num_escapes = sum(section.nbytes(num_blocks) for section in exponent_sections if not section.is_bits)
    is_bad = (16 * lengths >= 15 * raw_lengths) | (8 * num_escapes > torch.bincount(kept_block, minlength=num_blocks))
    data = _bytes(words, layout)
    payloads = {}
    for b in _candidates(data, words, block, kind, is_bad, layout).nonzero()[:, 0].tolist():
        payload = encode_ranked(data[block == b], layout, layout.nbytes > 1 and bool(zeros_out[b]))
        if len(payload) < min(int(lengths[b]), int(raw_lengths[b])):
            payloads[b] = payload
            lengths[b], kind[b] = len(payload), RANKED + (ZEROS_LEFT_OUT if layout.nbytes > 1 else 0) * zeros_out[b]
    for b in (lengths >= raw_lengths).nonzero()[:, 0].tolist():
        payloads[b] = data[block == b].flatten()
        lengths[b], kind[b] = raw_lengths[b], 0
    nest = choice.o2 | (choice.o3 << 3)
    plain = (kind & 7 == 0) | (kind & 7 == RANKED)
    kind, base, nest = (value.to(torch.uint8) for value in (kind, choice.base * ~plain, nest * ~plain))
    sections = [
        _Section(section.block[~plain[section.block]], section.value[~plain[section.block]], section.is_bits)
        for section in sections
    ]
    if payloads:
        of_blocks = torch.tensor(sorted(payloads), device=words.device)
        values = torch.cat([payloads[b] for b in sorted(payloads)]).long()
        sections.append(_Section(of_blocks.repeat_interleave(lengths[of_blocks]), values, False))

    # 3. The payloads: each value added in where its section and its rank in the block say.
    payload = torch.zeros(int(lengths.sum()), dtype=torch.uint8, device=words.device)
    cursor = lengths.cumsum(0) - lengths
    for section in sections:
        rank = _rank(section.block, num_blocks)
        if section.is_bits:
            place, part = cursor[section.block] + rank // 8, section.value << (rank % 8)
        else:
            place, part = cursor[section.block] + rank, section.value
        payload.scatter_add_(0, place, part.to(torch.uint8))
        cursor = cursor + section.nbytes(num_blocks)
    return payload, lengths, kind, base, nest


def _encode_ranked_blocks(
    words: Tensor, layout: WordLayout, code: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_encode_blocks`, of words without an exponent: their blocks are ranked or raw."""
    payloads, kinds = [], []
    for block in words.split(BLOCK_NUMEL):
        data = _bytes(block, layout)
        sample = block[torch.arange(len(block), device=words.device) % 512 < 32]
        zeros_out = 8 * int((sample == 0).sum()) > len(sample)
        payload = encode_ranked(data, layout, zeros_out)
        is_shorter = len(payload) < data.numel()
        payloads.append(payload if is_shorter else data.flatten())
        kinds.append(RANKED + ZEROS_LEFT_OUT * zeros_out if is_shorter else 0)
    kind = torch.tensor(kinds, dtype=torch.uint8, device=words.device)
    none = torch.zeros_like(kind)
    lengths = torch.tensor([len(payload) for payload in payloads], device=words.device)
    return torch.cat(payloads), lengths, kind, none, none


def _candidates(data: Tensor, words: Tensor, block: Tensor, kind: Tensor, is_bad: Tensor, layout: WordLayout) -> Tensor:
    """Where ranks may be shorter (docs/formats.md, step 4), from a sixty-fourth of the words: bool [num_blocks].

    `data` are the bytes of the words, uint8 [n, k]; `is_bad` says where windows did not fit.
    """
    # 1. The probe.
    num_blocks = len(kind)
    zeros_out = (kind & ZEROS_LEFT_OUT).bool() & (layout.nbytes > 1)
    probed = (torch.arange(len(words), device=words.device) % 512 < 8) & (~zeros_out[block] | (words != 0))
    at = block[probed]
    num_probed = torch.bincount(at, minlength=num_blocks)
    planes = [plane[probed] for plane in split_planes(data, layout)]

    def has_few(plane: Tensor, most: float) -> Tensor:
        """Where the probe of a plane has at most so many values per word."""
        seen = torch.zeros(num_blocks, 256, dtype=torch.bool, device=words.device)
        seen[at, plane.long()] = True
        return (seen.sum(1) <= most * num_probed) & (num_probed > 0)

    # 2. Bytes besides the exponent that take few values.
    found = is_bad & has_few(planes[-1], 3 / 4)
    if layout.nbytes == 1:
        found |= has_few(planes[0], 3 / 8)
    if layout.nbytes == 2:
        found |= has_few(planes[0], 3 / 4)
    if layout.nbytes == 4:
        found |= has_few(planes[2], 3 / 4)
        left_out = [(kind & PLANE_LEFT_OUT << index).bool() for index in (0, 1)]
        found |= ~left_out[0] & has_few(planes[0], 3 / 4)
        found |= left_out[0] & ~left_out[1] & has_few(planes[1], 3 / 4)
    return found


def _exponent_sections(exponent: Tensor, block: Tensor, choice: _Choice) -> Iterator[_Section]:
    """The planes of every tier and the escapes, kind by kind."""
    for kind, widths in enumerate(WIDTHS):
        left = ((choice.kind & 7) == kind)[block]
        e, b = exponent[left], block[left]
        for width, start, offset, inner in _tiers(widths, choice):
            distance = (e - start[b]) & 255
            code = torch.where(distance < offset[b], distance, distance - inner)
            further = distance >= inner + (1 << width) - 1
            code = torch.where(further, (1 << width) - 1, code)
            for bit in range(width):
                yield _Section(b, (code >> bit) & 1, True)
            e, b = e[further], b[further]
        if widths:
            yield _Section(b, e, False)


def _choose(words: Tensor, block: Tensor, num_blocks: int, layout: WordLayout, code: str) -> _Choice:
    """The encoder's decisions of docs/formats.md, steps 1 to 3, from a sixteenth of the words."""
    # 1. The sample and its zeros.
    sampled = torch.arange(words.numel(), device=words.device) % 512 < 32
    zero = torch.bincount(block[sampled & (words == 0)], minlength=num_blocks)
    zeros_out = 8 * zero > torch.bincount(block[sampled], minlength=num_blocks)
    counted = sampled & (~zeros_out[block] | (words != 0))
    cell = block[counted] * 256 + _exponent(words[counted], layout)
    histogram = torch.bincount(cell, minlength=num_blocks * 256).view(num_blocks, 256)
    num_counted = histogram.sum(1)

    # 2. The span of exponents that count, as running totals: total[:, p] is how often the first p of them came.
    finite = histogram.clone()
    if layout.exponent_bits == 8:
        finite[:, 255] = 0
    exponents = torch.arange(256, device=words.device)
    largest = torch.where(finite > 0, exponents, 0).amax(1)
    first = largest - (_SPAN - 1)
    span = first[:, None] + torch.arange(_SPAN, device=words.device)
    count = torch.where(span >= 0, finite.gather(1, span.clamp(min=0)), 0)
    total = torch.nn.functional.pad(count.cumsum(1), (1, 0))

    def covered(start: Tensor, size: int) -> Tensor:
        """How often an exponent of each window came; starts [num_blocks, k] count from `first`."""
        return total.gather(1, (start + size).clamp(0, _SPAN)) - total.gather(1, start.clamp(0, _SPAN))

    # 3. Windows, each the best around the one before, and what they cost.
    def fit(kind: int) -> tuple[Tensor, _Choice]:
        sizes, starts, offsets = 0, torch.zeros_like(first), []
        cost = torch.zeros_like(first)
        remaining = num_counted
        for tier, width in enumerate(WIDTHS[kind]):
            codes = (1 << width) - 1
            sizes += codes
            if tier == 0:
                candidates = torch.arange(_SPAN - sizes + 1, device=words.device).expand(num_blocks, -1)
            else:
                candidates = starts[:, None] - torch.arange(codes, -1, -1, device=words.device)
            cover = covered(candidates, sizes)
            best = cover.argmax(1, keepdim=True)  # of equal ones the first, which starts lowest
            start = candidates.gather(1, best)[:, 0]
            offsets.append(starts - start)
            starts = start
            cost = cost + width * remaining
            remaining = num_counted - cover.gather(1, best)[:, 0]
        none = torch.zeros_like(first)
        o2, o3 = (*offsets[1:], none, none)[:2]
        base = (first + starts + o2 + o3) & 255
        chosen_kind = kind + ZEROS_LEFT_OUT * zeros_out.long()
        return cost + 8 * remaining, _Choice(chosen_kind, base, o2, o3)

    if code == "window":
        return fit(1)[1]
    (cost, a), (other_cost, b) = fit(2), fit(3)
    other = other_cost < cost
    return _Choice(
        torch.where(other, b.kind, a.kind),
        torch.where(other, b.base, a.base),
        torch.where(other, b.o2, a.o2),
        torch.where(other, b.o3, a.o3),
    )


# --- decode ---


class _Payloads:
    """Reads the sections of consecutive blocks from bytes that may be damaged: never outside of them."""

    def __init__(self, data: Tensor, start: Tensor, length: Tensor) -> None:
        self.data = torch.nn.functional.pad(data, (0, 1))  # so that a clamped index exists
        self.cursor, self.end = start.clone(), start + length
        self.sound = torch.ones((), dtype=torch.bool, device=data.device)

    def bits(self, block: Tensor) -> Tensor:
        """The next section, one bit for each entry of `block` [k], ascending: int64 [k]."""
        rank, count = _rank(block, self.cursor.numel()), torch.bincount(block, minlength=self.cursor.numel())
        value = (self._at(self.cursor[block] + rank // 8) >> (rank % 8)) & 1
        # What is left over of the last byte must be 0.
        self.sound &= ~((count % 8 > 0) & ((self._at(self.cursor + count // 8) >> (count % 8)) != 0)).any()
        self.cursor += (count + 7) // 8
        return value

    def bytes(self, block: Tensor) -> Tensor:
        """The next section, one byte for each entry of `block` [k], ascending: int64 [k]."""
        value = self._at(self.cursor[block] + _rank(block, self.cursor.numel()))
        self.cursor += torch.bincount(block, minlength=self.cursor.numel())
        return value

    def rest(self, block: int) -> Tensor:
        """The rest of one block's payload, uint8 [k], for another reader."""
        start, self.cursor[block] = int(self.cursor[block]), self.end[block]
        return self.data[start : int(self.end[block])]

    def finished(self) -> Tensor:
        """Whether every section was there and nothing is left: a cursor only moves forward."""
        return self.sound & (self.cursor == self.end).all()

    def _at(self, index: Tensor) -> Tensor:
        return self.data[index.clamp(max=self.data.numel() - 1)].long()


def _decode(message: Tensor, numel: int, dtype: torch.dtype | None) -> Tensor:
    """The values [numel] of a message, after every check.

    Raises:
        DamagedMessage: a check fails.
    """
    # 1. Header and lists.
    header = parse_header(bytes(message[:MAX_FRONT_NBYTES].tolist()), message.numel())
    expected = EXPONENT_DTYPES if dtype is None else (dtype,)
    if front_checksum(message[: header.payload_offset]) != header.header_sum:
        raise DamagedMessage(Status.HEADER_SUM)
    if header.code == "too long":
        raise DamagedMessage(Status.TOO_LONG)
    if header.numel != numel or header.dtype not in expected:
        raise DamagedMessage(Status.MISMATCH)

    # 2. The bytes of the original.
    layout = LAYOUTS[header.dtype]
    payload = message[header.payload_offset : header.nbytes]
    if header.code == "raw":
        original = payload.clone()
    else:
        lists = message[header.directory_offset : header.payload_offset]
        lengths, *rest = lists.split([2 * header.num_blocks] + [header.num_blocks] * 3)
        length = lengths.clone().view(torch.int16).long() & 0xFFFF
        kind, base, nest = (part.long() for part in rest)
        _check_directory(header, length, kind, base, nest, payload.numel(), layout)
        start = length.cumsum(0) - length
        words = []
        for first in range(0, header.num_blocks, _GROUP // BLOCK_NUMEL):
            group = slice(first, first + _GROUP // BLOCK_NUMEL)
            choice = _Choice(kind[group], base[group], nest[group] & 7, nest[group] >> 3)
            payloads = _Payloads(payload, start[group], length[group])
            words.append(_decode_blocks(payloads, choice, min(_GROUP, numel - first * BLOCK_NUMEL), layout))
        original = torch.cat(words).to(_WORDS[layout.nbytes]).view(torch.uint8)

    # 3. What surrounds it.
    sums = tuple(int(value) & 0xFFFFFFFFFFFFFFFF for value in checksum(original))
    if sums != (header.sum, header.weighted_sum):
        raise DamagedMessage(Status.CHECKSUM)
    if message[header.nbytes : header.capacity_nbytes].any():
        raise DamagedMessage(Status.TRAILING)
    return original.view(header.dtype)


def _check_directory(
    header: Header, length: Tensor, kind: Tensor, base: Tensor, nest: Tensor, payload_nbytes: int, layout: WordLayout
) -> None:
    """Every entry is one that an encoder can write, and the lengths add up.

    Raises:
        DamagedMessage: an entry or the sum of lengths is not valid.
    """
    shape, o2, o3 = kind & 7, nest & 7, nest >> 3
    ranked = (shape == RANKED) & (header.version == RANKED_VERSION)
    coded = (shape < len(WIDTHS)) & (kind < (64 if layout.nbytes == 4 else 16)) & (o3 < 8)
    if not layout.has_exponent:
        coded &= shape == 0
    sound = torch.where(ranked, (kind < 16) & ((base | nest) == 0), coded)
    block_numel = torch.full_like(length, BLOCK_NUMEL)
    block_numel[-1] = header.numel - BLOCK_NUMEL * (len(length) - 1)
    sound &= (shape != 0) | ((kind | base | nest) == 0) & (length == block_numel * layout.nbytes)
    sound &= (shape != 1) | (nest == 0)
    sound &= (shape != 2) | (o2 < 4)
    sound &= (shape != 3) | ((o2 < 4) & (o3 < 4))
    if not (sound.all() and int(length.sum()) == payload_nbytes):
        raise DamagedMessage(Status.DIRECTORY)


def _decode_blocks(payloads: _Payloads, choice: _Choice, numel: int, layout: WordLayout) -> Tensor:
    """The words [numel] of consecutive blocks, int64.

    Raises:
        DamagedMessage: a payload is too short, too long, or none that an encoder writes.
    """
    block = torch.arange(numel, device=choice.kind.device) // BLOCK_NUMEL
    words = torch.zeros_like(block)
    ranked = (choice.kind & 7) == RANKED
    for b in ranked.nonzero()[:, 0].tolist():
        own = slice(b * BLOCK_NUMEL, min((b + 1) * BLOCK_NUMEL, numel))
        data = decode_ranked(payloads.rest(b), own.stop - own.start, layout, bool(choice.kind[b] & ZEROS_LEFT_OUT))
        words[own] = _words(data.flatten(), layout)
    raw = ((choice.kind & 7) == 0)[block]
    kept = ~raw & ~ranked[block]
    masked = kept & (choice.kind & ZEROS_LEFT_OUT).bool()[block]
    kept[masked] = payloads.bits(block[masked]).bool()
    kept_block = block[kept]

    # 1. Mantissas and signs.
    value = torch.zeros_like(kept_block)
    for index, shift in enumerate(layout.byte_shifts):
        there = ((choice.kind & (PLANE_LEFT_OUT << index)) == 0)[kept_block]
        byte = payloads.bytes(kept_block[there])
        if layout.sign_in_last_byte and index == len(layout.byte_shifts) - 1:
            value[there] |= ((byte & 127) << shift) | ((byte >> 7) << (8 * layout.nbytes - 1))
        else:
            value[there] |= byte << shift
    for shift in layout.bit_shifts:
        value |= payloads.bits(kept_block) << shift

    # 2. Exponents, tier by tier; `left` are the words that no tier has coded yet.
    exponent = torch.zeros_like(kept_block)
    for kind, widths in enumerate(WIDTHS):
        left = ((choice.kind & 7) == kind)[kept_block].nonzero()[:, 0]
        for width, start, offset, inner in _tiers(widths, choice):
            b = kept_block[left]
            code = torch.zeros_like(b)
            for bit in range(width):
                code |= payloads.bits(b) << bit
            distance = torch.where(code < offset[b], code, code + inner)
            exponent[left] = (start[b] + distance) & 255
            left = left[code == (1 << width) - 1]
        if widths:
            exponent[left] = payloads.bytes(kept_block[left])
    words[kept] = value | ((exponent ^ layout.exponent_flip) << layout.exponent_shift)

    # 3. Raw blocks.
    raw_bytes = payloads.bytes(block[raw].repeat_interleave(layout.nbytes))
    words[raw] = _words(raw_bytes.byte(), layout)
    if not (payloads.finished() and not (exponent >> layout.exponent_bits).any()):
        raise DamagedMessage(Status.PAYLOAD)
    return words


# --- both ways ---


def _tiers(widths: tuple[int, ...], choice: _Choice) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """Of each tier its width, where its window starts, how far below the inner one, and the inner one's size."""
    start, inner = choice.base, 0
    for width, offset in zip(widths, (torch.zeros_like(start), choice.o2, choice.o3), strict=False):
        start = (start - offset) & 255
        yield width, start, offset, inner
        inner += (1 << width) - 1


def _rank(block: Tensor, num_blocks: int) -> Tensor:
    """How many entries before each one are of the same block; `block` [k] ascends."""
    count = torch.bincount(block, minlength=num_blocks)
    return torch.arange(block.numel(), device=block.device) - (count.cumsum(0) - count)[block]


def _words(original: Tensor, layout: WordLayout) -> Tensor:
    """Bytes of the original -> words, int64, without sign unless they fill it."""
    words = original.view(_WORDS[layout.nbytes]).long()
    return words if layout.nbytes == 8 else words & ((1 << (8 * layout.nbytes)) - 1)


def _bytes(words: Tensor, layout: WordLayout) -> Tensor:
    """The reverse: uint8 [n, k]."""
    return words.to(_WORDS[layout.nbytes]).view(torch.uint8).view(-1, layout.nbytes)


def _exponent(words: Tensor, layout: WordLayout) -> Tensor:
    return ((words >> layout.exponent_shift) & ((1 << layout.exponent_bits) - 1)) ^ layout.exponent_flip


def _byte_planes(words: Tensor, layout: WordLayout) -> list[Tensor]:
    planes = [(words >> shift) & 255 for shift in layout.byte_shifts]
    if layout.sign_in_last_byte:
        planes[-1] = (planes[-1] & 127) | ((words >> (8 * layout.nbytes - 1)) << 7)
    return planes
