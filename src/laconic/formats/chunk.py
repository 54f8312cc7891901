"""A chunk of a tensor's bytes as one message, and back: of the lossless format, or entropy-coded with code "best".

A message of the lossless format has its chunk in its own dtype where that has an exponent code. Otherwise it is uint8
in *planes*: first the first byte of every element, then the second, and so on, so that bytes of one meaning stand
together (the high bytes of integers, or of a difference, are mostly zeros). Which of the two it is shows in its dtype.
Entropy-coded messages always have planes.

The difference of two versions of a tensor is their exclusive or. Where nothing changed there is no message at all.
"""

from __future__ import annotations

import zlib
from typing import Literal

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats.lossless import checksum_of, decode_into, read_header
from laconic.formats.safetensors_header import Element
from laconic.ops import lossless_encode
from laconic.ops.entropy import entropy_decode_, entropy_encode, is_entropy_coded

Code = Literal["auto", "tiered", "window", "raw", "best"]
_ROTATED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes whose highest byte is fullest of exponent when the sign is moved to the other end."""
_HEAD_NBYTES = 1 << 16
"""Of a difference, to see in which layout it is shorter."""
_PIECE_NUMEL, _NUM_PIECES = 1 << 12, 16
"""Of a chunk, to see whether its scale changes."""


def encode_chunk(data: Tensor, element: Element, code: Code, base: Tensor | None) -> tuple[Tensor | None, int, int]:
    """The message, uint8 [any], of `data`, uint8 [n], minus `base`; and the two numbers of the checksum of `data`.

    The message is None when `data` equals `base`.
    """
    if code != "best":
        data = _aligned(data)
    if base is not None:
        changed = difference(data, base)
        sums = checksum_of(data)
        if not changed.any():
            return None, *sums
        layout = _best_layout(changed, element, code)[1]
        if code == "best":
            return _best(changed, element, layout)[0], *sums
        return _message(_laid_out(changed, element, layout), code), *sums
    if code == "best":
        return _best(data, element, element.coded)
    message = _message(_laid_out(data, element, element.coded), code)
    if element.coded == torch.uint8 and element.itemsize > 1:
        return message, *checksum_of(data)
    header = read_header(message)
    return message, header.sum, header.weighted_sum


def difference_pays(data: Tensor, base: Tensor, element: Element, code: Code) -> bool:
    """Whether `data`, uint8 [n], minus `base` takes fewer bytes than `data`."""
    changed = difference(data, base)
    if not changed.any():
        return True
    nbytes, layout = _best_layout(changed, element, code)
    if code == "best":
        return len(_best(changed, element, layout)[0]) < len(_best(data, element, element.coded)[0])
    return nbytes < len(_message(_laid_out(data, element, element.coded), code))


def decode_chunk(message: Tensor, element: Element, out: Tensor, where: str) -> tuple[int, int] | None:
    """Write the values in `message`, uint8 on the CPU, to `out`, uint8 [n] on any device; errors begin with `where`.

    Nothing larger than `out` is allocated; an entropy-coded message is decoded on the CPU. Return the two numbers of
    the values' checksum where the message has them, else None.
    """
    if is_entropy_coded(message):
        here = out if out.is_cpu else torch.empty_like(out, device="cpu")
        sums = entropy_decode_(here, message, element.itemsize, element.coded in _ROTATED)
        if here is not out:
            out.copy_(here)
        return sums
    message = message.to(out.device)
    header = read_header(message)
    expected = (len(out) // header.dtype.itemsize,)
    if header.dtype not in (element.coded, torch.uint8) or tuple(header.shape) != expected:
        raise FormatError(
            f"{where}: a message holds {header.dtype} of shape {list(header.shape)}, but {element.coded} of "
            f"{len(out):,} bytes belongs there"
        )
    if header.nbytes != len(message):
        raise FormatError(f"{where}: a message has {header.nbytes:,} bytes, but the index gives it {len(message):,}")
    if header.dtype == element.coded and not (element.coded == torch.uint8 and element.itemsize > 1):
        decode_into(message, out.view(element.coded))
        return header.sum, header.weighted_sum
    planes = torch.empty_like(out)
    decode_into(message, planes)
    out.view(-1, element.itemsize).copy_(planes.view(element.itemsize, -1).t())
    return None


def difference(one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """Exclusive or of two uint8 tensors of one length, written to `out` if given."""
    result = torch.empty_like(one) if out is None else out
    num_wide = len(one) // 8 * 8
    if all(tensor.data_ptr() % 8 == 0 for tensor in (one, other, result)):
        wide = (tensor[:num_wide].view(torch.int64) for tensor in (one, other))
        torch.bitwise_xor(*wide, out=result[:num_wide].view(torch.int64))
    else:
        num_wide = 0
    torch.bitwise_xor(one[num_wide:], other[num_wide:], out=result[num_wide:])
    return result


def _best_layout(changed: Tensor, element: Element, code: Code) -> tuple[int, torch.dtype]:
    """Bytes and layout of the shortest message for the beginning of a difference."""
    sample = changed[:_HEAD_NBYTES]
    layouts = [element.coded] + [torch.uint8] * (element.itemsize > 1 and element.coded != torch.uint8)
    sizes = [len(_message(_laid_out(sample, element, layout), code)) for layout in layouts]
    return min(zip(sizes, layouts, strict=True), key=lambda pair: pair[0])


def _best(data: Tensor, element: Element, layout: torch.dtype) -> tuple[Tensor, int, int]:
    """An entropy-coded message, or a tiered one of `layout` where that is shorter; and the checksum of `data`.

    Tiers are chosen for each 4096 elements, a Huffman code for many more of them. So they are tried where there are
    few, or where they win on a sample of the chunk: there the scale changes within it.
    """
    message, *sums = entropy_encode(data, element.itemsize, element.coded in _ROTATED)
    sample = _sample(data, _PIECE_NUMEL * element.itemsize)
    if len(sample) < len(data):
        coded = entropy_encode(sample, element.itemsize, element.coded in _ROTATED)[0]
        if len(coded) <= len(_message(_laid_out(sample, element, layout), "tiered")):
            return message, sums[0], sums[1]
    tiered = _message(_laid_out(_aligned(data), element, layout), "tiered")
    return min(message, tiered, key=len), sums[0], sums[1]


def _sample(data: Tensor, piece: int) -> Tensor:
    """One piece of `piece` bytes from each of equal parts of `data`, or all of it if it has no more pieces than parts.

    Where in its part a piece lies is hashed: at a fixed distance pieces could all meet the same phase of a scale that
    comes back every so many rows.
    """
    num_pieces = -(-len(data) // piece)
    if num_pieces <= _NUM_PIECES:
        return data
    taken = []
    for part in range(_NUM_PIECES):
        first, stop = num_pieces * part // _NUM_PIECES, num_pieces * (part + 1) // _NUM_PIECES
        start = piece * (first + zlib.crc32(bytes([part])) % (stop - first))
        taken.append(data[start : start + piece])
    return torch.cat(taken)


def _aligned(data: Tensor) -> Tensor:
    """`data`, copied if need be to where its elements can be read: older safetensors files need not align theirs."""
    return data.clone() if data.data_ptr() % 16 else data


def _message(x: Tensor, code: Code) -> Tensor:
    """As `encode`, but without a copy of its own: messages are written and dropped at once."""
    message = lossless_encode(x, code="tiered" if code in ("auto", "best") else code)
    return message[: int(message[16:24].view(torch.int64))]


def _laid_out(data: Tensor, element: Element, layout: torch.dtype) -> Tensor:
    if layout == torch.uint8 and element.itemsize > 1:
        return data.view(-1, element.itemsize).t().reshape(-1)
    return data.view(layout)
