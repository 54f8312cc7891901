"""Constants, header and checksum of lossless messages, shared by all implementations and `formats/lossless.py`.

docs/formats.md, "Lossless float format", says the same in words.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from laconic.errors import FormatError

MAGIC = b"LCNZ"
VERSION = 1
RANKED_VERSION = 2
"""Of messages with a ranked block or a dtype without windows, which version 1 does not have."""
BLOCK_NUMEL = 4096
HEADER_NBYTES = 64
MAX_DIMS = 8
MAX_FRONT_NBYTES = HEADER_NBYTES + 8 * MAX_DIMS
"""A header with the longest shape."""

CODES = {"raw": 0, "window": 1, "tiered": 2}
TOO_LONG = 255
"""The code of a message that did not fit its capacity."""

WIDTHS = ((), (3,), (2, 2, 3), (3, 2, 2))
"""Bits per tier for bits 0-2 of a block's kind; kind 0 is raw."""
RANKED = 4
"""Bits 0-2 of the kind of a block whose bytes are coded by rank."""
RANKED_WIDTHS = (
    *((), (1,), (2,), (3,), (4,), (5,), (6,), (7,)),
    *((1, 1), (1, 2, 2), (1, 2, 4), (2, 1, 1), (2, 2, 3), (3, 2, 3), (4, 3, 4), (5, 4, 4)),
)
"""Bits per tier of a byte plane's ranks, by the number that the plane begins with."""
ZEROS_LEFT_OUT = 8
PLANE_LEFT_OUT = 16
"""Bits 3 and 4 of a block's kind; bit 5 is byte plane 1."""

DTYPE_NUMBERS = {
    torch.uint8: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.int8: 6,
    torch.bool: 7,
    torch.int16: 8,
    torch.uint16: 9,
    torch.int32: 10,
    torch.uint32: 11,
    torch.int64: 12,
    torch.uint64: 13,
    torch.float64: 14,
    torch.complex32: 15,
    torch.complex64: 16,
    torch.complex128: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2fnuz: 19,
    torch.float8_e8m0fnu: 20,
}
EXPONENT_DTYPES = tuple(dtype for dtype, number in DTYPE_NUMBERS.items() if number < 7)
"""Those of version 1. Sums take them, and coding them is fast."""
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_CODE_NAMES = {number: name for name, number in CODES.items()}


@dataclass(frozen=True)
class WordLayout:
    """How a word is split into an exponent, byte planes and bit planes."""

    nbytes: int
    exponent_shift: int
    exponent_bits: int
    byte_shifts: tuple[int, ...] = ()
    """Each byte plane holds the 8 bits from here on."""
    sign_in_last_byte: bool = False
    """The last byte plane holds 7 bits, and the word's highest bit as its own."""
    bit_shifts: tuple[int, ...] = ()
    exponent_flip: int = 0
    """The exponent is taken exclusive or this, so that small integers of both signs are neighbours."""

    @property
    def has_exponent(self) -> bool:
        """Whether windows code the exponent; blocks of words without one are ranked or raw."""
        return self.exponent_bits > 0


LAYOUTS = {
    torch.bfloat16: WordLayout(2, 7, 8, byte_shifts=(0,), sign_in_last_byte=True),
    torch.float32: WordLayout(4, 23, 8, byte_shifts=(0, 8, 16), sign_in_last_byte=True),
    torch.float16: WordLayout(2, 10, 5, byte_shifts=(0,), bit_shifts=(8, 9, 15)),
    torch.float8_e4m3fn: WordLayout(1, 3, 4, bit_shifts=(0, 1, 2, 7)),
    torch.float8_e5m2: WordLayout(1, 2, 5, bit_shifts=(0, 1, 7)),
    torch.uint8: WordLayout(1, 4, 4, bit_shifts=(0, 1, 2, 3)),
    torch.int8: WordLayout(1, 4, 4, bit_shifts=(0, 1, 2, 3), exponent_flip=8),
}
LAYOUTS |= {
    torch.bool: LAYOUTS[torch.uint8],
    torch.float8_e8m0fnu: LAYOUTS[torch.uint8],
    torch.float8_e4m3fnuz: LAYOUTS[torch.float8_e4m3fn],
    torch.float8_e5m2fnuz: LAYOUTS[torch.float8_e5m2],
    torch.int16: WordLayout(2, 0, 0),
    torch.uint16: WordLayout(2, 0, 0),
    torch.int32: WordLayout(4, 0, 0),
    torch.uint32: WordLayout(4, 0, 0),
    torch.int64: WordLayout(8, 0, 0),
    torch.uint64: WordLayout(8, 0, 0),
    torch.float64: WordLayout(8, 0, 0),
    torch.complex32: LAYOUTS[torch.float16],
    torch.complex64: LAYOUTS[torch.float32],
    torch.complex128: WordLayout(8, 0, 0),
}
"""Of complex numbers: of their parts, which are the words."""


class Status(IntEnum):
    """What the decoding ops found, in the order in which they look. Values may be used after SOUND only."""

    SOUND = 0
    TRUNCATED = 1
    NOT_A_MESSAGE = 2
    VERSION = 3
    FIELD = 4
    LENGTH = 5
    HEADER_SUM = 6
    TOO_LONG = 7
    MISMATCH = 8
    DIRECTORY = 9
    PAYLOAD = 10
    CHECKSUM = 11
    TRAILING = 12


_SENTENCES = {
    Status.TRUNCATED: "the message is shorter than its header",
    Status.NOT_A_MESSAGE: "the message does not begin with LCNZ; it was not written by lossless_encode",
    Status.VERSION: f"the message has another version than {VERSION} or {RANKED_VERSION}; decode it with the release"
    " that wrote it",
    Status.FIELD: "a field of the header has a value that does not exist",
    Status.LENGTH: "the lengths in the header and the message's own do not agree",
    Status.HEADER_SUM: "header_sum does not fit the header and the block lists; they were damaged",
    Status.TOO_LONG: "the values did not fit the encoder's capacity_nbytes and are not there; encode with a larger one",
    Status.MISMATCH: "the message holds another dtype or number of elements than the tensor it is decoded into",
    Status.DIRECTORY: "the list of a block's length, kind, base and nest has an entry that no encoder writes",
    Status.PAYLOAD: "a block's payload has another length than its codes need, or bits that no encoder writes",
    Status.CHECKSUM: "the decoded values do not have the checksum of the original; the message was damaged",
    Status.TRAILING: "the bytes between the end of the message and its capacity are not all zero; it was damaged",
}


class DamagedMessage(FormatError):
    """The bytes are no message that an encoder wrote; `status` is the `Status` that the decoding ops give them."""

    def __init__(self, status: Status | int, text: str = "") -> None:
        self.status = Status(status)
        super().__init__(text or _SENTENCES[self.status])


@dataclass(frozen=True)
class Header:
    """The front of a message. Sizes in bytes; sums modulo 2**64."""

    dtype: torch.dtype
    code: str
    """ "raw", "window", "tiered"; "too long" where the values did not fit the capacity and are not there."""
    shape: tuple[int, ...]
    nbytes: int
    """Up to and without the zeros at the end."""
    capacity_nbytes: int
    """With the zeros at the end."""
    sum: int
    weighted_sum: int
    header_sum: int
    numel: int
    """Words: elements, or the parts of complex ones."""
    version: int = VERSION

    @property
    def num_blocks(self) -> int:
        """Blocks with an entry in the lists: none in a raw message."""
        return -(-self.numel // BLOCK_NUMEL) if self.code in ("window", "tiered") else 0

    @property
    def directory_offset(self) -> int:
        """First byte of the lists of lengths, kinds, bases and nests."""
        return HEADER_NBYTES + 8 * (len(self.shape) + self.dtype.is_complex)

    @property
    def payload_offset(self) -> int:
        """First byte of the payloads, behind the lists."""
        return self.directory_offset + 5 * self.num_blocks


def max_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Upper bound in bytes on a message of `numel` elements, whatever the values and the shape.

    64 for the header, 64 for a shape of 8 dimensions, the original, and 5 per block so that an encoder can write blocks
    before it knows whether all of them together pay.

    Raises:
        FormatError: the dtype has no layout.
    """
    numel *= 1 + dtype.is_complex
    if dtype not in LAYOUTS:
        raise FormatError(f"dtype is {dtype}, but it must be one of {dtype_names()}; view other types as uint8")
    return MAX_FRONT_NBYTES + numel * LAYOUTS[dtype].nbytes + 5 * ((numel + BLOCK_NUMEL - 1) // BLOCK_NUMEL)


def words_of(x: Tensor) -> Tensor:
    """The tensor whose words a message holds: `x`, or the parts [..., 2] of complex numbers. Shares the memory."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def dtype_names() -> str:
    """The element types that a message can hold, for errors."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in LAYOUTS)


def parse_header(front: bytes, available_nbytes: int) -> Header:
    """Read and check the header and shape at the front of a message.

    The checks bound every later read: afterwards payload_offset <= nbytes <= capacity_nbytes <= available_nbytes, and
    numel is at most 8 per byte of payload, the densest that blocks can be. The caller compares `front_checksum`.

    Args:
        front: the message's first 128 bytes, or all of it.
        available_nbytes: how many bytes are there; a message may be followed by bytes that are not its own.

    Raises:
        DamagedMessage: a field is not valid; the message names it.
    """
    # 1. The fixed part.
    if len(front) < HEADER_NBYTES:
        raise DamagedMessage(
            Status.TRUNCATED, f"the message has {len(front)} bytes, but its header alone takes {HEADER_NBYTES}"
        )
    magic, version, dtype, code, num_dims, *counts = struct.unpack_from("<4s4B7Q", front)
    numel, nbytes, capacity_nbytes, total, weighted, header_sum, reserved = counts
    if magic != MAGIC:
        raise DamagedMessage(Status.NOT_A_MESSAGE, f"magic is {magic!r}, but a lossless message begins with {MAGIC!r}")
    if version not in (VERSION, RANKED_VERSION):
        raise DamagedMessage(
            Status.VERSION,
            f"version is {version}, but this release reads versions {VERSION} and {RANKED_VERSION}; decode with the "
            "release that wrote it",
        )
    most = (len(EXPONENT_DTYPES) if version == VERSION else len(_DTYPES)) - 1
    if dtype > most:
        raise DamagedMessage(Status.FIELD, f"dtype is {dtype}, but it must be at most {most} in version {version}")
    if code != TOO_LONG and code not in _CODE_NAMES:
        raise DamagedMessage(Status.FIELD, f"code is {code}, but it must be 0, 1, 2 or {TOO_LONG}")
    if num_dims > MAX_DIMS:
        raise DamagedMessage(Status.FIELD, f"num_dims is {num_dims}, but it must be at most {MAX_DIMS}")
    if reserved:
        raise DamagedMessage(Status.FIELD, f"bytes 56 to 63 hold {reserved}, but they must be 0")

    # 2. Lengths, before anything is read that they promise.
    if not nbytes <= capacity_nbytes <= available_nbytes:
        raise DamagedMessage(
            Status.LENGTH,
            f"nbytes is {nbytes} and capacity {capacity_nbytes}, but they must ascend to at most the {available_nbytes}"
            " bytes that are there; the message was cut short or damaged",
        )
    name = _CODE_NAMES.get(code, "too long")
    front_nbytes = HEADER_NBYTES + 8 * num_dims
    if name == "raw":
        fits = nbytes == front_nbytes + numel * LAYOUTS[_DTYPES[dtype]].nbytes
    elif name == "too long":
        fits = nbytes == front_nbytes
    else:
        payload_nbytes = nbytes - front_nbytes - 5 * -(-numel // BLOCK_NUMEL)
        fits = 0 < numel <= 8 * payload_nbytes
    if not fits:
        raise DamagedMessage(
            Status.LENGTH, f"nbytes is {nbytes}, but that cannot hold {numel} elements with code {name!r}"
        )

    # 3. The shape.
    shape = struct.unpack_from(f"<{num_dims}Q", front, HEADER_NBYTES)
    if math.prod(shape) != numel or math.prod(max(size, 1) for size in shape) >= 1 << 63:
        raise DamagedMessage(
            Status.FIELD, f"shape is {shape}, but its product must be numel, {numel}, and without zeros below 2**63"
        )
    if _DTYPES[dtype].is_complex:
        if shape[-1:] != (2,):
            raise DamagedMessage(Status.FIELD, f"shape is {shape}, but that of complex numbers ends with 2 parts")
        shape = shape[:-1]
    return Header(_DTYPES[dtype], name, shape, nbytes, capacity_nbytes, total, weighted, header_sum, numel, version)


def checksum(data: Tensor) -> tuple[Tensor, Tensor]:
    """sum and weighted_sum of bytes: uint8 [n] -> two int64 0-d tensors, to be read modulo 2**64.

    The bytes are little-endian u32 words w_j, the last one filled up with zeros; the sums are those of w_j and of
    (j + 1) * w_j.
    """
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32).long() & 0xFFFFFFFF
    return words.sum(), (words * torch.arange(1, words.numel() + 1, device=data.device)).sum()


def front_checksum(front: Tensor) -> int:
    """header_sum: of uint8 [payload_offset], the header, shape and lists, whatever header_sum they hold."""
    front = front.clone()
    front[48:56] = 0
    total, weighted = (int(value) for value in checksum(front))
    return (total + (weighted << 20)) & 0xFFFFFFFFFFFFFFFF
