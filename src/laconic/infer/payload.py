"""Codings of the values in messages between workers: raw, lossless or int8, and which of them a message takes.

Lossless coding is that of collectives (laconic.collectives.codec, docs/formats.md), int8 a block format along each row:
what becomes of a row does not depend on the rows it travels with. Each message's header states its coding, so the two
directions, and the messages of one direction, may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from laconic.collectives.codec import Lossless
from laconic.collectives.policy.selector import prepare, prepared_rates
from laconic.cost.comm.seconds import send_pays
from laconic.errors import FormatError
from laconic.formats import BlockFormat, BlockTensor
from laconic.formats.lossless import read_header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PayloadCoding = Literal["auto", "raw", "lossless", "int8"]
"""How values travel. "auto" is raw or lossless, per message, by measured rates; never int8, which changes values."""

RAW, LOSSLESS, INT8 = 0, 1, 2
"""Codings, as headers state them."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of values that can travel."""

INT8_FORMAT = BlockFormat("int8", 128, torch.float32)
"""Blocks of 128 values of a row share a float32 scale: 8.25 bits per value where rows are a multiple of 128 wide.

With a the block's largest magnitude, a value is off by at most a / 254 (half a level, in float32 arithmetic) and by the
rounding to its own dtype. A block that holds NaN or infinity arrives as NaN.
"""

_CODEC = Lossless("tiered")


@dataclass(frozen=True)
class Coder:
    """Encodes the values of messages; `coding_of` chooses RAW, LOSSLESS or INT8 for a number of values and a dtype."""

    coding_of: Callable[[int, torch.dtype], int] = field(default=lambda numel, dtype: RAW)

    def encode(self, values: Tensor) -> tuple[int, Tensor]:
        """Encode values [m, M]; returns the coding and uint8 [nbytes], which may share memory with them.

        Values of a dtype that cannot travel are a FormatError.
        """
        if values.dtype not in DTYPES:
            raise FormatError(f"hidden states are {values.dtype}, but {', '.join(map(str, DTYPES))} can travel")
        values = values.contiguous()
        coding = self.coding_of(values.numel(), values.dtype) if values.numel() else RAW
        if coding == LOSSLESS:
            return LOSSLESS, _CODEC.encode(values)
        if coding == INT8:
            packed = INT8_FORMAT.quantize(values)
            # Scales come first: their length keeps what follows aligned as they are.
            return INT8, torch.cat([bytes_of(packed.scales), bytes_of(packed.codes)])
        return RAW, bytes_of(values)


def coder_of(payload: str) -> Coder:
    """Return the coder of a fixed coding."""
    codings = {"raw": RAW, "lossless": LOSSLESS, "int8": INT8}
    return Coder(lambda numel, dtype: codings[payload])


def prepared_coder(payload: str, join_group: Callable[[], ProcessGroup]) -> Coder:
    """Return the coder of any setting; with "auto", all workers call this together, and it joins them in a group.

    "auto" then takes the rates of links and codecs that collectives take: the file of `laconic profile`, or what the
    ranks measure here in a few tenths of a second. A message is lossless where encoding, sending and decoding one after
    the other is predicted to be faster than sending it raw, with the margins of laconic.cost.comm.seconds.
    A ConfigError if some rank's file of rates cannot be used.
    """
    if payload != "auto":
        return coder_of(payload)
    group = join_group()
    prepare(group)
    agreed = prepared_rates(group)
    if agreed is None:  # a group of one rank
        return Coder()
    shape, rates = agreed

    def coding_of(numel: int, dtype: torch.dtype) -> int:
        name = str(dtype).removeprefix("torch.")
        return LOSSLESS if send_pays(numel, name, "tiered", shape, rates) else RAW

    return Coder(coding_of)


def num_bytes_fit(coding: int, nbytes: int, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether a message of this coding can have `nbytes` for values of this shape and dtype."""
    numel = shape[0] * shape[1]
    if coding == INT8:
        return numel > 0 and nbytes == INT8_FORMAT.nbytes(shape)
    if coding == LOSSLESS:
        return 0 < nbytes <= _CODEC.max_nbytes(numel, dtype)
    return coding == RAW and nbytes == numel * dtype.itemsize


def decode_values(coding: int, message: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Decode what `Coder.encode` made; raw values are a view of `message`, and a damaged one is a FormatError."""
    if coding == RAW:
        return message.view(dtype).view(shape)
    if coding == LOSSLESS:
        # The header of the link says any shape; that of the code cannot say more than its bytes hold.
        header = read_header(message)
        if header.code == "too long" or math.prod(header.shape) != math.prod(shape):
            raise FormatError(f"a message of shape {header.shape}, {header.code}, came for rows of shape {shape}")
        values = torch.empty(shape, dtype=dtype, device="cpu")
        _CODEC.decode_into(message, values)
        return values
    m, width = shape
    num_scales = -(-width // INT8_FORMAT.block_size)
    scales, codes = message.split([4 * m * num_scales, m * width])
    packed = BlockTensor(
        codes.view(m, width), scales.view(torch.float32).view(m, num_scales), INT8_FORMAT, torch.Size(shape), dtype
    )
    return packed.dequantize()


@dataclass(frozen=True)
class LinkTraffic:
    """Messages that have passed in one direction.

    Attributes:
        messages: number of messages with rows or sums.
        coded: how many of them were lossless or int8.
        raw_nbytes: bytes of headers and bodies if all had been raw.
        sent_nbytes: bytes of headers and bodies as they were.
    """

    messages: int = 0
    coded: int = 0
    raw_nbytes: int = 0
    sent_nbytes: int = 0

    def __add__(self, other: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(
            self.messages + other.messages,
            self.coded + other.coded,
            self.raw_nbytes + other.raw_nbytes,
            self.sent_nbytes + other.sent_nbytes,
        )

    def __str__(self) -> str:
        if self.messages == 0:
            return "no messages"
        shown = f"{self.sent_nbytes / 2**20:.2f} MiB in {self.messages} messages"
        return shown + (
            f", {self.coded} of them coded ({self.raw_nbytes / 2**20:.2f} MiB raw)" if self.coded else ", all raw"
        )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as uint8 [nbytes], a view if they lie side by side."""
    return tensor.contiguous().view(-1).view(torch.uint8)
