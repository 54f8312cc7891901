"""What a collective makes of a tensor before it goes on the wire, and of the bytes that arrive.

A codec turns a tensor into a *message*, a flat uint8 tensor, and a message back into values. `Raw` sends the bytes as
they are, `Lossless` shortens floating-point numbers bit for bit (ZipCCL), `Blockwise` sends codes of a few bits and
scales.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats import BlockFormat, BlockTensor, lossless
from laconic.ops import lossless_encode
from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES, HEADER_NBYTES, TOO_LONG

__all__ = ["Blockwise", "Codec", "Lossless", "Raw", "bytes_of", "setting_of"]


class Codec(Protocol):
    """How values become bytes and bytes become values. Equal codecs have equal names."""

    @property
    def name(self) -> str:
        """What distinguishes this codec from others, with all its settings. Ranks compare it."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the encoded bits."""

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """No message of `numel` elements is longer."""

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int | None:
        """What every message of `numel` elements takes, or None if that depends on the values."""

    def encode(self, x: Tensor) -> Tensor:
        """The message of `x`, contiguous [n], as uint8 [nbytes]; it may share memory with `x`.

        Raises FormatError for a dtype that the codec does not know.
        """

    def cut(self, buffer: Tensor) -> Tensor:
        """The message that `buffer` begins with. Raises FormatError if its length cannot be read."""

    def fits(self, message: Tensor) -> bool:
        """Whether `message` holds its values. One that does not is only its header; `fallback` takes its place."""

    @property
    def fallback(self) -> Codec:
        """The codec of tensors whose message does not fit."""

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Write the values into `out`, contiguous [n]. Raises FormatError unless it is an intact message for `out`."""

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Add the values, sent as `dtype`, to `total` fp32 [n]. Raises FormatError as `decode_into` does."""


def setting_of(codec: Codec | str) -> str:
    """What a caller asked for, as ranks compare it: "auto" and `Lossless()`, whose name is "auto" too, differ."""
    return codec if isinstance(codec, str) else f"{type(codec).__name__}({codec.name})"


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], in the same memory."""
    return x.view(-1).view(torch.uint8)


def _check_nbytes(name: str, message: Tensor, nbytes: int) -> None:
    if message.numel() != nbytes:
        raise FormatError(
            f"the {name} message has {message.numel()} bytes, but {nbytes} were expected; it was cut or is another's"
        )


class _Whole:
    """What codecs share whose messages have a length known beforehand and always hold their values."""

    def cut(self, buffer: Tensor) -> Tensor:
        return buffer

    def fits(self, message: Tensor) -> bool:
        return True

    @property
    def fallback(self) -> Codec:
        return Raw()


@dataclass(frozen=True)
class Raw(_Whole):
    """The values' own bytes; any dtype. Nothing is checked beyond their number."""

    name: str = field(default="raw", init=False)
    lossless: bool = field(default=True, init=False)

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.max_nbytes(numel, dtype)

    def encode(self, x: Tensor) -> Tensor:
        return bytes_of(x)

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        _check_nbytes("raw", message, out.nbytes)
        bytes_of(out).copy_(message)

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        _check_nbytes("raw", message, total.numel() * dtype.itemsize)
        total.add_(message.view(dtype))


_FRONT_NBYTES = HEADER_NBYTES + 8
"""Header and shape of a lossless message of a tensor with one dimension."""
_DTYPE_OFFSET, _CODE_OFFSET, _NBYTES_OFFSET = 5, 6, 16


@dataclass(frozen=True)
class Lossless:
    """The lossless float format (docs/formats.md; ZipCCL): bit for bit, checked against damage; any dtype.

    Types that the format does not know travel as bytes, uncoded and checked.

    Raises FormatError when built with an unknown code or a capacity that no message fits.
    """

    code: str = "auto"
    """"tiered", "window", "raw" (checked, but not shorter), or "auto": tiered."""
    capacity_bits: float | None = None
    """None: messages as long as they need to be. A number: all messages take so many bits per element and 72 bytes, so
    that no length has to be known beforehand; where values do not fit they travel a second time, raw."""

    def __post_init__(self) -> None:
        if self.code not in ("auto", "tiered", "window", "raw"):
            raise FormatError(f"code is {self.code!r}, but it must be auto, tiered, window or raw")
        if self.capacity_bits is not None and not self.capacity_bits > 0:
            raise FormatError(
                f"capacity_bits is {self.capacity_bits!r}, but it must be above 0; about 11.5 suits bfloat16"
            )

    @property
    def name(self) -> str:
        capacity = "" if self.capacity_bits is None else f"-{self.capacity_bits:g}-bits"
        return self.code + capacity

    @property
    def lossless(self) -> bool:
        return True

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        known = _known(dtype)
        return lossless.max_nbytes(numel * dtype.itemsize // known.itemsize, known)

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int | None:
        if self.capacity_bits is None:
            return None
        return min(_FRONT_NBYTES + math.ceil(numel * self.capacity_bits / 8), self.max_nbytes(numel, dtype))

    def encode(self, x: Tensor) -> Tensor:
        known = _known(x.dtype)
        code = "raw" if known != x.dtype else "tiered" if self.code == "auto" else self.code
        message = lossless_encode(x.view(known), code=code, capacity_nbytes=self.capacity_nbytes(x.numel(), x.dtype))
        # Sent and forgotten: a slice of the longest message will do.
        return message if self.capacity_bits is not None else self.cut(message)

    def cut(self, buffer: Tensor) -> Tensor:
        if self.capacity_bits is not None:
            return buffer
        nbytes = int(buffer[_NBYTES_OFFSET : _NBYTES_OFFSET + 8].clone().view(torch.int64))
        if not _FRONT_NBYTES <= nbytes <= buffer.numel():
            raise FormatError(
                f"the message's header says {nbytes} bytes, but from {_FRONT_NBYTES} to {buffer.numel()} are possible;"
                " it was damaged"
            )
        return buffer[:nbytes]

    def fits(self, message: Tensor) -> bool:
        return self.capacity_bits is None or int(message[_CODE_OFFSET]) != TOO_LONG

    @property
    def fallback(self) -> Codec:
        return Lossless("raw")

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        lossless.decode_into(message, out.view(_known(out.dtype)))

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        if int(message[_DTYPE_OFFSET]) != DTYPE_NUMBERS[dtype]:
            raise FormatError(f"the message does not hold {dtype}, which is expected; it was damaged or is another's")
        lossless.decode_add(message, total)


def _known(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a message takes it: only those that are coded fast enough for a wire are."""
    return dtype if dtype in EXPONENT_DTYPES else torch.uint8


_BLOCKWISE_MAGIC = b"LCNQ"
_BLOCKWISE_HEADER = struct.Struct("<4sBBBBHHIQ8s")
_BLOCKWISE_VERSION = 1
_DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Blockwise(_Whole):
    """Codes of 4 to 8 bits and one scale per block: smaller, and not the same values afterwards.

    A message, little-endian: magic "LCNQ", u8 version, u8 dtype of the values, u8 dtype of the scales (0 float32,
    1 bfloat16, 2 float16), u8 0, u16 block size, u16 0, u32 0, u64 numel, 8 bytes name of the code; then scales, then
    codes, both as in docs/formats.md.
    """

    format: BlockFormat

    @property
    def name(self) -> str:
        scale = str(self.format.scale_dtype).removeprefix("torch.")
        return f"{self.format.code}-b{self.format.block_size}-{scale}"

    @property
    def lossless(self) -> bool:
        return False

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return _BLOCKWISE_HEADER.size + self.format.nbytes((numel,))

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.max_nbytes(numel, dtype)

    def encode(self, x: Tensor) -> Tensor:
        message = torch.empty(self.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        header = torch.frombuffer(bytearray(self._header(x.numel(), x.dtype)), dtype=torch.uint8)
        message[: header.numel()] = header
        quantized = self.format.quantize(x)
        scales, codes = self._parts(message, x.numel())
        scales.copy_(bytes_of(quantized.scales))
        codes.copy_(quantized.codes)
        return message

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        out.copy_(self._values(message, out.numel(), out.dtype))

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        total.add_(self._values(message, total.numel(), dtype))

    def _values(self, message: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        _check_nbytes(self.name, message, self.max_nbytes(numel, dtype))
        found = bytes(message[: _BLOCKWISE_HEADER.size].cpu().numpy())
        expected = self._header(numel, dtype)
        if found != expected:
            raise FormatError(
                f"the message's header is {found.hex()}, but {self.name} of {numel} {dtype} begins with"
                f" {expected.hex()}; it was damaged or is another's"
            )
        scales, codes = self._parts(message, numel)
        # The scales are copied: a view of bytes as numbers needs an aligned start.
        scales = scales.clone().view(self.format.scale_dtype)
        return BlockTensor(codes, scales, self.format, torch.Size((numel,)), dtype).dequantize()

    def _header(self, numel: int, dtype: torch.dtype) -> bytes:
        if dtype not in _DTYPE_NUMBERS:
            raise FormatError(
                f"the tensor is {dtype}, but {self.name} takes float32, bfloat16 and float16; use Raw() or Lossless()"
            )
        dtypes = _DTYPE_NUMBERS[dtype], _DTYPE_NUMBERS[self.format.scale_dtype]
        return _BLOCKWISE_HEADER.pack(
            _BLOCKWISE_MAGIC,
            _BLOCKWISE_VERSION,
            *dtypes,
            0,
            self.format.block_size,
            0,
            0,
            numel,
            self.format.code.encode(),
        )

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        scales_nbytes = -(-numel // self.format.block_size) * self.format.scale_dtype.itemsize
        body = message[_BLOCKWISE_HEADER.size :]
        return body[:scales_nbytes], body[scales_nbytes:]
