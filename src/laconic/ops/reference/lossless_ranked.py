"""Ranked blocks of lossless messages: every byte of a word is a plane of its own, coded by the frequency of its values.

The values of a plane are numbered by rank, the most frequent first; the tiers of the windows then code ranks instead of
exponents. This serves where windows around one exponent do not fit, and words without an exponent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops.lossless import RANKED_WIDTHS, DamagedMessage, Status, WordLayout


def split_planes(data: Tensor, layout: WordLayout) -> list[Tensor]:
    """Bytes of words, uint8 [n, k] -> k planes, uint8 [n]. An exponent of 8 bits gets a plane of its own, the last."""
    planes = list(data.unbind(1))
    if layout.sign_in_last_byte:
        low, high = planes[-2:]
        planes[-2:] = (low & 127) | (high & 128), (high & 127) << 1 | low >> 7
    return planes


def _join_planes(planes: list[Tensor], layout: WordLayout) -> Tensor:
    if layout.sign_in_last_byte:
        rest, exponent = planes[-2:]
        planes[-2:] = (rest & 127) | (exponent & 1) << 7, (rest & 128) | exponent >> 1
    return torch.stack(planes, 1)


def encode_ranked(data: Tensor, layout: WordLayout, zeros_out: bool) -> Tensor:
    """The payload, uint8 [any], of the words whose bytes are `data`, uint8 [n, k]."""
    parts = []
    if zeros_out:
        kept = (data != 0).any(1)
        parts.append(_pack(kept))
        data = data[kept]
    planes = split_planes(data, layout)
    parts += [_encode_plane(plane, index == len(planes) - 1) for index, plane in enumerate(planes)]
    return torch.cat(parts)


def decode_ranked(payload: Tensor, n: int, layout: WordLayout, zeros_out: bool) -> Tensor:
    """The bytes of the n words in `payload`, uint8 [n, k].

    Raises:
        DamagedMessage: the payload is none that an encoder writes.
    """
    reader = _Reader(payload)
    kept = reader.bits(n) if zeros_out else torch.ones(n, dtype=torch.bool, device=payload.device)
    m = int(kept.sum())
    planes = [_decode_plane(reader, m) for _ in range(layout.nbytes)]
    if reader.at != len(payload):
        raise DamagedMessage(Status.PAYLOAD)
    data = payload.new_zeros(n, layout.nbytes)
    data[kept] = _join_planes(planes, layout)
    return data


def _encode_plane(plane: Tensor, is_last: bool) -> Tensor:
    # 1. Ranks: by count, equal counts by value.
    counts = torch.bincount(plane.long(), minlength=256)
    order = counts.sort(descending=True, stable=True).indices
    covered = [0, *counts[order].cumsum(0).tolist()]
    num_values = int((counts > 0).sum())

    # 2. The shortest code. One without any bits is not for the last plane: each word takes at least one.
    def nbytes(number: int) -> int:
        total, size, left = 2, 0, len(plane)
        for width in RANKED_WIDTHS[number]:
            total += width * ((left + 7) // 8)
            size += (1 << width) - 1
            left = len(plane) - covered[size]
        return total + (num_values if num_values <= size + 1 else size + left)

    has_no_bits = is_last and num_values == 1
    number = min(range(has_no_bits, len(RANKED_WIDTHS)), key=nbytes)
    size = sum((1 << width) - 1 for width in RANKED_WIDTHS[number])
    num_listed = num_values if num_values <= size + 1 else size

    # 3. Tiers of ranks, and what escapes them.
    parts = [torch.tensor([number, num_listed], dtype=torch.uint8, device=plane.device), order[:num_listed].byte()]
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(256, device=plane.device))
    left = rank[plane.long()]
    for width in RANKED_WIDTHS[number]:
        code = left.clamp(max=(1 << width) - 1)
        parts += [_pack((code >> bit) & 1 != 0) for bit in range(width)]
        left = left[left >= (1 << width) - 1] - ((1 << width) - 1)
    if num_listed <= size:
        parts.append(order[left + size].byte())
    return torch.cat(parts)


def _decode_plane(reader: _Reader, m: int) -> Tensor:
    number, num_listed = reader.bytes(2).tolist()
    widths = RANKED_WIDTHS[number] if number < len(RANKED_WIDTHS) else ()
    size = sum((1 << width) - 1 for width in widths)
    if number >= len(RANKED_WIDTHS) or num_listed > size + 1:
        raise DamagedMessage(Status.PAYLOAD)
    values = reader.data.new_zeros(256)
    values[:num_listed] = reader.bytes(num_listed)
    rank = torch.zeros(m, dtype=torch.long, device=values.device)
    left = torch.arange(m, device=values.device)
    for width in widths:
        code = torch.zeros_like(left)
        for bit in range(width):
            code |= reader.bits(len(left)).long() << bit
        rank[left] += code
        left = left[code == (1 << width) - 1]
    plane = values[rank]
    if num_listed <= size:
        plane[left] = reader.bytes(len(left))
    return plane


class _Reader:
    """Takes sections off the front of a payload.

    Raises:
        DamagedMessage: a section is cut short, or its unused bits are not 0.
    """

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def bytes(self, count: int) -> Tensor:
        self.at += count
        if self.at > len(self.data):
            raise DamagedMessage(Status.PAYLOAD)
        return self.data[self.at - count : self.at]

    def bits(self, count: int) -> Tensor:
        section = self.bytes((count + 7) // 8)
        bits = (section[:, None] >> torch.arange(8, device=section.device, dtype=torch.uint8) & 1).flatten().bool()
        if bits[count:].any():
            raise DamagedMessage(Status.PAYLOAD)
        return bits[:count]


def _pack(bits: Tensor) -> Tensor:
    """bool [n] -> uint8 [ceil(n / 8)], low bits first."""
    rows = torch.nn.functional.pad(bits.byte(), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
