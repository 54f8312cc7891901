"""Codecs of collectives: tensor to message before sending, message to values after receiving.

A codec turns a tensor into a *message*, a flat uint8 tensor, and a message back into values. `Raw` sends the bytes as
they are, `Lossless` shortens floating-point numbers bit for bit (ZipCCL), `Blockwise` sends codes of a few bits and
scales.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

from laconic.errors import ConfigError, FormatError
from laconic.formats import BlockFormat, BlockTensor, lossless
from laconic.formats.digest import DIGEST_NBYTES, digest
from laconic.ops import lossless_decode_, lossless_decode_add_, lossless_encode
from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES, HEADER_NBYTES, TOO_LONG, DamagedMessage, Status

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Codec(Protocol):
    """Conversion of values to bytes and back. Equal codecs have equal names."""

    @property
    def name(self) -> str:
        """Name with all settings, by which ranks compare codecs."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back the encoded bits."""

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Upper bound on the length of a message of `numel` elements."""

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int | None:
        """Length of every message of `numel` elements, or None if it depends on the values."""

    def encode(self, x: Tensor) -> Tensor:
        """Encode `x`, contiguous [n], as uint8 [nbytes]; the message may share memory with `x`.

        Raises:
            FormatError: the codec does not know the dtype.
        """

    def cut(self, buffer: Tensor) -> Tensor:
        """View the message that `buffer` begins with.

        Raises:
            FormatError: its length cannot be read.
        """

    def fits(self, message: Tensor) -> bool:
        """Whether `message` holds its values. One that does not is only its header; `fallback` takes its place."""

    @property
    def fallback(self) -> Codec:
        """Codec of tensors whose message does not fit."""

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Write the values into `out`, contiguous [n].

        Raises:
            FormatError: `message` is not an intact message for `out`.
        """

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Add the values, sent as `dtype`, to `total` fp32 [n].

        Raises:
            FormatError: `message` is not an intact message for `total`.
        """


def check_codec(codec: Codec | str) -> None:
    """Refuse a name of a codec in place of one."""
    if isinstance(codec, str) and codec != "auto":
        raise ConfigError(f"codec is {codec!r}, but it must be 'auto' or a codec such as Lossless() or Raw()")


def setting_of(codec: Codec | str) -> str:
    """The caller's codec as ranks compare it: "auto" and `Lossless()`, whose name is "auto" too, differ."""
    return codec if isinstance(codec, str) else f"{type(codec).__name__}({codec.name})"


def bytes_of(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, uint8 [nbytes]."""
    return x.view(-1).view(torch.uint8)


def _check_nbytes(name: str, message: Tensor, nbytes: int) -> None:
    if message.numel() != nbytes:
        raise FormatError(
            f"the {name} message has {message.numel()} bytes, but {nbytes} were expected; it was cut or is another's"
        )


class _Whole:
    """Base of codecs whose messages have a length known beforehand and always hold their values."""

    def cut(self, buffer: Tensor) -> Tensor:
        """The whole buffer, since its length is known beforehand."""
        return buffer

    def fits(self, message: Tensor) -> bool:
        """True: these messages always hold their values."""
        return True

    @property
    def fallback(self) -> Codec:
        """The codec itself; it is never needed."""
        return Raw()


@dataclass(frozen=True)
class Raw(_Whole):
    """The values' own bytes; any dtype. Only their number is checked."""

    name: str = field(default="raw", init=False)
    lossless: bool = field(default=True, init=False)

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the values themselves."""
        return numel * dtype.itemsize

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the values themselves."""
        return self.max_nbytes(numel, dtype)

    def encode(self, x: Tensor) -> Tensor:
        """View the tensor as bytes; nothing is copied."""
        return bytes_of(x)

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Copy the bytes into `out`.

        Raises:
            FormatError: their number is not that of `out`.
        """
        _check_nbytes("raw", message, out.nbytes)
        bytes_of(out).copy_(message)

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Add the bytes, taken as `dtype`, to `total`.

        Raises:
            FormatError: their number is not that of `total` in `dtype`.
        """
        _check_nbytes("raw", message, total.numel() * dtype.itemsize)
        total.add_(message.view(dtype))


_FRONT_NBYTES = HEADER_NBYTES + 8
"""Header and shape of a lossless message of a tensor with one dimension."""
_DTYPE_OFFSET, _CODE_OFFSET, _NBYTES_OFFSET = 5, 6, 16


@dataclass(frozen=True)
class Lossless:
    """The lossless float format (docs/formats.md; ZipCCL): bit for bit, checked against damage; any dtype.

    Types that the format does not know are sent as bytes, uncoded and checked.

    Raises:
        FormatError: the code is unknown, or no message fits the capacity.
    """

    code: str = "auto"
    """"tiered", "window", "raw" (checked, but not shorter), or "auto": tiered."""
    capacity_bits: float | None = None
    """None: messages as long as they need to be. A number: all messages take so many bits per element and 72 bytes, so
    that no length has to be known beforehand, and the host need not wait for the device where a call starts; values
    that do not fit are sent a second time, raw."""

    def __post_init__(self) -> None:
        if self.code not in ("auto", "tiered", "window", "raw"):
            raise FormatError(f"code is {self.code!r}, but it must be auto, tiered, window or raw")
        if self.capacity_bits is not None and not self.capacity_bits > 0:
            raise FormatError(
                f"capacity_bits is {self.capacity_bits!r}, but it must be above 0; about 11.5 suits bfloat16"
            )

    @property
    def name(self) -> str:
        """Code, and capacity if there is one."""
        capacity = "" if self.capacity_bits is None else f"-{self.capacity_bits:g}-bits"
        return self.code + capacity

    @property
    def lossless(self) -> bool:
        """True: every bit is restored."""
        return True

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Length of the message of incompressible values."""
        known = _known(dtype)
        return lossless.max_nbytes(numel * dtype.itemsize // known.itemsize, known)

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int | None:
        """Length of every message if there is a capacity, else None."""
        if self.capacity_bits is None:
            return None
        return min(_FRONT_NBYTES + math.ceil(numel * self.capacity_bits / 8), self.max_nbytes(numel, dtype))

    def encode(self, x: Tensor) -> Tensor:
        """Encode `x` with the format's header and checksum; with a capacity, one too long is only its header."""
        known = _known(x.dtype)
        code = "raw" if known != x.dtype else "tiered" if self.code == "auto" else self.code
        message = lossless_encode(x.view(known), code=code, capacity_nbytes=self.capacity_nbytes(x.numel(), x.dtype))
        # The message is only sent: a slice of the longest one suffices.
        return message if self.capacity_bits is not None else self.cut(message)

    def cut(self, buffer: Tensor) -> Tensor:
        """View the message that `buffer` begins with, by the length in its header; with a capacity it fills the buffer.

        Raises:
            FormatError: the length is impossible.
        """
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
        """Whether `message` holds its values; always without a capacity."""
        return self.capacity_bits is None or int(message[_CODE_OFFSET]) != TOO_LONG

    @property
    def fallback(self) -> Codec:
        """The values' bytes with header and checksum, sent where values do not fit."""
        return Lossless("raw")

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Decode into `out`, bit for bit.

        Raises:
            FormatError: the message is damaged, or not one for `out`.
        """
        lossless.decode_into(message, out.view(_known(out.dtype)))

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Decode and add to `total` in one pass.

        Raises:
            FormatError: the message is damaged, holds another dtype, or is not one for `total`.
        """
        lossless.decode_add(message, total, dtype)

    # --- without reading: what the host learns later ---

    def too_long(self, message: Tensor) -> Tensor:
        """Whether a message that this rank has made does not hold its values, with a capacity: 0-d bool."""
        return message[_CODE_OFFSET] == TOO_LONG

    def decode_unread(self, message: Tensor, out: Tensor) -> Tensor:
        """As `decode_into`, but what is wrong becomes a number for `status_fits`: 0-d int32 on the device."""
        return lossless_decode_(out.view(_known(out.dtype)), message)

    def add_unread(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
        """As `decode_add`, but what is wrong becomes a number for `status_fits`: 0-d int32 on the device."""
        is_other = message[_DTYPE_OFFSET] != DTYPE_NUMBERS[dtype]
        status = lossless_decode_add_(total, message)
        return torch.where((status == Status.SOUND) & is_other, int(Status.MISMATCH), status)

    @staticmethod
    def status_fits(status: int) -> bool:
        """Whether a message that was decoded held its values; if not, `fallback` takes its place.

        Raises:
            FormatError: the message is damaged, or not the one that was expected.
        """
        if status not in (Status.SOUND, Status.TOO_LONG):
            raise DamagedMessage(status)
        return status == Status.SOUND


@dataclass(frozen=True)
class Auto(Lossless):
    """As the codec "auto", with a capacity: the cost model decides for each message whether and how it is coded.

    Coded messages have the length that `capacity_bits` gives them, so that on CUDA the host waits for them late and
    once; for raw ones it does not wait. The model takes codes with the ratio that was measured, and no message goes
    around a ring.

    Raises:
        FormatError: there is no capacity, or no message fits it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code != "auto" or self.capacity_bits is None:
            raise FormatError(
                f"Auto has code {self.code!r} and capacity_bits {self.capacity_bits}, but it chooses the code itself"
                " and needs a capacity; write Auto(capacity_bits=11.5), or the string 'auto' for none"
            )


def is_auto(codec: Codec | str) -> TypeIs[str | Auto]:
    """Whether the cost model decides what travels."""
    return isinstance(codec, str | Auto)


def is_unread(codec: Codec) -> TypeGuard[Lossless]:
    """Whether messages can be sent and decoded without a number that the host reads from the device."""
    return isinstance(codec, Lossless) and codec.capacity_bits is not None


def _known(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a message takes it: itself if it is coded fast enough for a network, else that of bytes."""
    return dtype if dtype in EXPONENT_DTYPES else torch.uint8


_BLOCKWISE_MAGIC = b"LCNQ"
_BLOCKWISE_HEADER = struct.Struct("<4sBBBBHHIQ8s")
_BLOCKWISE_VERSION = 1
_DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Blockwise(_Whole):
    """Codes of 2 to 8 bits and scales per block: smaller, and not the same values afterwards.

    A message, little-endian: magic "LCNQ", u8 version, u8 dtype of the values, u8 dtype of the scales (0 float32,
    1 bfloat16, 2 float16), u8 0, u16 block size, u16 0, u32 0, u64 numel, 8 bytes name of the code; then scales, then
    codes, both as in docs/formats.md. With a checksum 8 bytes follow, the `laconic.formats.digest` of scales and codes.
    """

    format: BlockFormat
    checksum: bool = False
    """Whether a message whose scales or codes have changed on their way is refused; headers are always compared."""

    @property
    def name(self) -> str:
        """Name of the block format: code, block size, dtype of scales; whether messages are checked."""
        scale = str(self.format.scale_dtype).removeprefix("torch.")
        return f"{self.format.code}-b{self.format.block_size}-{scale}{'-checked' if self.checksum else ''}"

    @property
    def lossless(self) -> bool:
        """False: values are rounded to the levels of the code."""
        return False

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Length of every message: header, scales and codes, and the checksum if there is one."""
        return _BLOCKWISE_HEADER.size + self.format.nbytes((numel,)) + self._trailer_nbytes

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Length of every message, as `max_nbytes`."""
        return self.max_nbytes(numel, dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Quantize `x` and put the header in front.

        Raises:
            FormatError: the dtype is not float32, bfloat16 or float16.
        """
        message = torch.empty(self.max_nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
        header = torch.frombuffer(bytearray(self._header(x.numel(), x.dtype)), dtype=torch.uint8)
        message[: header.numel()] = header
        quantized = self.format.quantize(x)
        scales, codes = self._parts(message, x.numel())
        scales.copy_(bytes_of(quantized.scales))
        codes.copy_(quantized.codes)
        if self.checksum:
            message[-DIGEST_NBYTES:] = bytes_of(self._sum(message))
        return message

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        """Dequantize into `out`.

        Raises:
            FormatError: length, header or checksum are not those of a message for `out`.
        """
        out.copy_(self._values(message, out.numel(), out.dtype))

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        """Dequantize to `dtype` and add to `total`.

        Raises:
            FormatError: length, header or checksum are not those of a message for `total` in `dtype`.
        """
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
        if self.checksum and not torch.equal(bytes_of(self._sum(message)), message[-DIGEST_NBYTES:]):
            raise FormatError(
                f"scales or codes of a {self.name} message of {numel} {dtype} do not have the checksum behind them; "
                "the message was damaged on its way"
            )
        scales, codes = self._parts(message, numel)
        # The scales are copied: a view of bytes as numbers needs an aligned start.
        scales = scales.clone().view(self.format.scale_dtype)
        return BlockTensor(codes, scales, self.format, torch.Size((numel,)), dtype).dequantize()

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse values that have no codes, with a FormatError; of a call, on all ranks alike."""
        if dtype not in _DTYPE_NUMBERS:
            raise FormatError(
                f"the tensor is {dtype}, but {self.name} takes float32, bfloat16 and float16; use Raw() or Lossless()"
            )

    def _header(self, numel: int, dtype: torch.dtype) -> bytes:
        self.check_dtype(dtype)
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
        scales_nbytes = self.format.nbytes((numel,)) - -(-numel * self.format.bits // 8)
        body = self._body(message)
        return body[:scales_nbytes], body[scales_nbytes:]

    @property
    def _trailer_nbytes(self) -> int:
        return DIGEST_NBYTES if self.checksum else 0

    def _body(self, message: Tensor) -> Tensor:
        """Scales and codes of a message."""
        return message[_BLOCKWISE_HEADER.size : message.numel() - self._trailer_nbytes]

    def _sum(self, message: Tensor) -> Tensor:
        """The checksum of a message's scales and codes, int64 [1]."""
        return digest(self._body(message)).view(1)
