"""Lossless messages: a tensor, bit for bit, in fewer bytes, under a header with its dtype, shape and checksums.

The bytes are those of docs/formats.md, "Lossless float format"; the ops behind it are `laconic.ops.lossless_*`. Nothing
here trusts a message: every read is bounded by the bytes that are there, and every allocation by what the receiver
expects or, without an expectation, by eight elements per byte of payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.errors import FormatError
from laconic.ops import huge_pages, lossless_decode_, lossless_decode_add_, lossless_encode
from laconic.ops.lossless import (
    MAX_FRONT_NBYTES,
    DamagedMessage,
    Header,
    Status,
    front_checksum,
    max_nbytes,
    parse_header,
)

__all__ = [
    "Checksum",
    "Expect",
    "Header",
    "check_has_bytes",
    "checksum_of",
    "decode",
    "decode_add",
    "decode_into",
    "encode",
    "max_nbytes",
    "read_header",
]


@dataclass(frozen=True)
class Expect:
    """What a receiver accepts: anything else is refused before memory is allocated for it."""

    dtype: torch.dtype
    shape: torch.Size | tuple[int, ...]


def encode(x: Tensor, code: str = "auto", *, capacity_nbytes: int | None = None, out: Tensor | None = None) -> Tensor:
    """Encode a tensor into one message.

    Args:
        x: up to 8 dimensions (complex: 7), any strides; any floating-point, complex, integer or bool dtype of a byte
            or more. bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, uint8 and int8 are coded fastest.
        code: "tiered" (fewest bits), "window" (fewest instructions, ZipCCL's 3-bit code), "raw", or "auto": tiered.
            With every code blocks that would not get shorter are stored as they are, and so is the whole message.
        capacity_nbytes: None for a message that is exactly as long as it needs to be. A number for one of that size
            whatever the values are; then no sizes have to be exchanged, and on CUDA the host waits for nothing, not
            even for the length. float64, complex128 and integers of 16 bits and more are coded in plain torch, for
            which it waits in any case. A message that does not fit has a header only; decoding it says so.
        out: uint8 [at least the message's length] on x's device, contiguous, to be written at its beginning; not
            together with capacity_nbytes. `max_nbytes` is always enough. None for a new tensor.

    Returns:
        uint8 [nbytes] or [capacity_nbytes] on x's device, with `out` its first bytes; equal values give equal bytes
        everywhere.

    Raises:
        FormatError: an argument is outside of these values, or the message is longer than `out`, which then keeps its
            values.
    """
    check_has_bytes(x)
    if out is not None:
        _check_message_buffer(out, x.device, capacity_nbytes)
    message = lossless_encode(x, code="tiered" if code == "auto" else code, capacity_nbytes=capacity_nbytes)
    if capacity_nbytes is not None:
        return message
    nbytes = int(message[16:24].view(torch.int64))
    if out is None:
        return huge_pages.cut(message, nbytes)  # a slice would keep the longest message's memory alive
    if out.numel() < nbytes:
        raise FormatError(f"out has {out.numel()} bytes, but the message has {nbytes}; max_nbytes is always enough")
    return out[:nbytes].copy_(message[:nbytes])


def decode(buffer: Tensor, expect: Tensor | Expect | None = None, *, out: Tensor | None = None) -> Tensor:
    """Decode one message.

    On CUDA the host waits twice: for the header, and for what decoding has found.

    Args:
        buffer: uint8 [nbytes], exactly one message with the zeros up to its capacity.
        expect: a tensor or an `Expect` whose dtype and shape the message must have; nothing larger is ever allocated.
            Without it at most 8 elements are, per byte of the buffer.
        out: the message's dtype and shape, contiguous, on the buffer's device, to be written. None for a new tensor.

    Returns:
        The tensor that was encoded, contiguous, on the buffer's device: its dtype, shape and every bit; `out` if given.

    Raises:
        FormatError: the bytes are not one whole, undamaged message, or not the expected one; or `out` does not fit it
            or overlaps it. A message whose header or payload is damaged leaves `out` undefined.
    """
    if out is not None:
        check_has_bytes(out, "out")
    header = _parse(buffer)
    try:
        _check_wanted(header, expect, out)
    except FormatError:
        _check_front(buffer, header)  # a damaged header is called that
        raise
    if out is None:
        out = huge_pages.empty(header.shape, header.dtype, buffer.device)
    elif _overlap(buffer, out):
        raise FormatError("out and the message overlap in memory, but decoding overwrites out; give memory of its own")
    number = int(lossless_decode_(out, buffer))  # which has the checksum of the header, too
    if number != Status.SOUND:
        raise DamagedMessage(number)
    return out


def decode_into(buffer: Tensor, out: Tensor) -> None:
    """Decode one message into `out`: the message's dtype and number of elements, contiguous, any shape.

    On CUDA the host waits once. After an error, as of `decode`, `out` is undefined.
    """
    check_has_bytes(out, "out")
    _check_bytes(buffer)
    _check_decoded(buffer, lossless_decode_(out, buffer), out.numel(), out.dtype)


def decode_add(buffer: Tensor, total: Tensor, dtype: torch.dtype | None = None) -> None:
    """Decode one message and add its values to `total` in fp32, in one pass: total[i] = fp32(total[i] + fp32(value i)).

    On CUDA the host waits once. `total` is contiguous float32 with the message's number of elements, in any shape, and
    undefined after an error. Another dtype than `dtype` is refused, if that is given.
    """
    check_has_bytes(total, "total")
    _check_bytes(buffer)
    _check_decoded(buffer, lossless_decode_add_(total, buffer), total.numel(), dtype)


def read_header(buffer: Tensor) -> Header:
    """The header of the message in uint8 [nbytes], after checking all of it but the payload: lengths, and its checksum.

    On CUDA the host waits twice: for the header, and for the lists behind it. The error names the field.
    """
    header = _parse(buffer)
    _check_front(buffer, header)
    return header


def check_has_bytes(x: object, field: str = "x") -> None:
    """Check that `x` is a tensor with bytes in memory; the FormatError names `field` and the remedy."""
    if not isinstance(x, Tensor):
        kind = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
        raise FormatError(f"{field} is a {kind}, but it must be a torch.Tensor; torch.as_tensor makes one of arrays")
    if isinstance(x, DTensor):
        raise FormatError(f"{field} is a DTensor, which lies on several ranks; give its .to_local() or .full_tensor()")
    if x.is_meta:
        raise FormatError(f"{field} is on the meta device and has no values; load or initialize it first")
    if x.is_quantized:
        raise FormatError(f"{field} is a quantized tensor; encode its .int_repr() and keep its scales beside it")
    if x.is_nested or x.layout != torch.strided:
        remedy = "its parts, of .unbind()," if x.is_nested else "its .to_dense(), or its indices and values,"
        layout = "nested" if x.is_nested else str(x.layout)
        raise FormatError(f"{field} has layout {layout}, but it must be strided; encode {remedy} instead")


def _check_message_buffer(out: Tensor, device: torch.device, capacity_nbytes: int | None) -> None:
    check_has_bytes(out, "out")
    if capacity_nbytes is not None:
        raise FormatError(f"capacity_nbytes is {capacity_nbytes}, but with out it must be None; give one of the two")
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device != device:
        raise FormatError(
            f"out is {out.dtype} with shape {tuple(out.shape)} and strides {out.stride()} on {out.device}, but it must"
            f" be contiguous uint8 [nbytes] on {device}"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share a byte."""
    first, second = sorted(((a.data_ptr(), a.nbytes), (b.data_ptr(), b.nbytes)))
    return a.device == b.device and min(first[1], second[1]) > 0 and first[0] + first[1] > second[0]


def _check_wanted(header: Header, expect: Tensor | Expect | None, out: Tensor | None) -> None:
    if header.code == "too long":  # its shape is not vouched for by anything that is there
        raise DamagedMessage(Status.TOO_LONG)
    if expect is not None and (header.dtype, header.shape) != (expect.dtype, tuple(expect.shape)):
        raise DamagedMessage(
            Status.MISMATCH,
            f"the message holds {header.dtype} {header.shape}, but {expect.dtype} {tuple(expect.shape)} is expected;"
            " sender and receiver must mean the same tensor",
        )
    if out is not None and (out.dtype, tuple(out.shape)) != (header.dtype, header.shape):
        raise FormatError(
            f"out is {out.dtype} {tuple(out.shape)}, but the message holds {header.dtype} {header.shape};"
            " give a tensor of that dtype and shape, or none"
        )


def _check_decoded(buffer: Tensor, status: Tensor, numel: int, dtype: torch.dtype | None) -> None:
    """Check what an op found in a message; the header's own errors, which name fields, come before its number."""
    front = buffer[:MAX_FRONT_NBYTES]
    if front.is_cpu:
        there, number = bytes(front.tolist()), int(status)
    else:  # in one copy
        both = bytes(torch.cat((front, status.view(1).view(torch.uint8))).tolist())
        there, number = both[:-4], int.from_bytes(both[-4:], "little")
    header = _header_of(there, buffer)
    found = header.numel // (1 + header.dtype.is_complex)
    if found != numel or dtype not in (None, header.dtype):
        wanted = f"{numel} elements" + (f" of {dtype}" if dtype is not None else "")
        raise DamagedMessage(
            Status.MISMATCH,
            f"the message holds {found} elements of {header.dtype}, but it is decoded into {wanted};"
            " sender and receiver must mean the same tensor",
        )
    if number != Status.SOUND:
        raise DamagedMessage(number)


def _check_bytes(buffer: Tensor) -> None:
    check_has_bytes(buffer, "the message")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise FormatError(
            f"the message is {buffer.dtype} with shape {tuple(buffer.shape)} and strides {buffer.stride()}, but it must"
            " be contiguous uint8 [nbytes]; view its bytes as torch.uint8"
        )


def _parse(buffer: Tensor) -> Header:
    _check_bytes(buffer)
    return _header_of(bytes(buffer[:MAX_FRONT_NBYTES].tolist()), buffer)


def _header_of(front: bytes, buffer: Tensor) -> Header:
    header = parse_header(front, buffer.numel())
    if header.capacity_nbytes != buffer.numel():
        raise DamagedMessage(
            Status.LENGTH,
            f"capacity is {header.capacity_nbytes}, but the message has {buffer.numel()} bytes; pass just one message",
        )
    return header


def _check_front(buffer: Tensor, header: Header) -> None:
    """Check that a header that has been parsed is the one that was written."""
    if front_checksum(buffer[: header.payload_offset].cpu()) != header.header_sum:
        raise DamagedMessage(Status.HEADER_SUM)


_MASK = (1 << 64) - 1


def checksum_of(data: Tensor) -> tuple[int, int]:
    """sum and weighted_sum (docs/formats.md) of uint8 data."""
    if not data.numel():
        return 0, 0
    header = read_header(encode(data, "raw"))
    return header.sum, header.weighted_sum


class Checksum:
    """The checksum of bytes that are added piece by piece; all pieces but the last have a multiple of 4 bytes."""

    def __init__(self) -> None:
        self._sum = self._weighted_sum = self._num_words = 0

    def add(self, sum_: int, weighted_sum: int, nbytes: int) -> None:
        """Add a piece of `nbytes` whose own checksum is known."""
        self._weighted_sum = (self._weighted_sum + weighted_sum + self._num_words * sum_) & _MASK
        self._sum = (self._sum + sum_) & _MASK
        self._num_words += nbytes // 4

    def add_bytes(self, data: Tensor) -> None:
        """Add a piece, uint8."""
        self.add(*checksum_of(data), data.numel())

    def __str__(self) -> str:
        return f"{self._sum:016x}{self._weighted_sum:016x}"
