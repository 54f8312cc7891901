"""What a collective makes of a tensor before it goes on the wire, and of the bytes that arrive.

A codec turns a tensor into a *message*, a flat uint8 tensor, and a message back into values. `Raw` sends the bytes as
they are, `Lossless` shortens floating-point numbers bit for bit (ZipCCL), `Blockwise` sends codes of a few bits and
scales.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats import BlockFormat, BlockTensor

__all__ = ["Blockwise", "Codec", "Raw", "bytes_of"]


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

    def fits(self, message: Tensor) -> bool:
        """Whether `message` holds its values. One that does not is only its header; `fallback` takes its place."""

    @property
    def fallback(self) -> Codec:
        """The codec of tensors whose message does not fit."""

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Write the values into `out`, contiguous [n]. Raises FormatError unless it is an intact message for `out`."""

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Add the values, sent as `dtype`, to `total` fp32 [n]. Raises FormatError as `decode_into` does."""


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [nbytes], in the same memory."""
    return x.view(-1).view(torch.uint8)


def _check_nbytes(name: str, message: Tensor, nbytes: int) -> None:
    if message.numel() != nbytes:
        raise FormatError(
            f"the {name} message has {message.numel()} bytes, but {nbytes} were expected; it was cut or is another's"
        )


class _Whole:
    """What codecs share whose messages always hold their values."""

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
