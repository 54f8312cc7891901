"""One bit per value: the specification."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from torch import Tensor

from laconic.ops.declarations.bits import check_pack_bits, check_select_bits, check_unpack_bits

__all__ = ["INTEGERS", "bit_patterns", "pack_bits", "select_bits", "unpack_bits"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type in which bits are read, by bytes of an element."""


@torch.no_grad()
def pack_bits(x: Tensor) -> Tensor:
    """One bit per value, set where it is not zero; see `laconic.ops.pack_bits`.

    x [...] -> uint8 [ceil(numel / 8)].
    """
    num_codes = check_pack_bits(x)
    each = (x.reshape(-1) != 0).to(torch.uint8)
    eights = torch.nn.functional.pad(each, (0, 8 * num_codes - each.numel())).view(num_codes, 8).int()
    return (eights << torch.arange(8, device=x.device)).sum(-1).to(torch.uint8)


@torch.no_grad()
def unpack_bits(codes: Tensor, length: int, dtype: torch.dtype, zero: float, one: float) -> Tensor:
    """`zero` or `one` for each bit; see `laconic.ops.unpack_bits`.

    codes uint8 [ceil(length / 8)] -> [length].
    """
    check_unpack_bits(codes, length, dtype)
    bits = (codes.unsqueeze(-1) >> torch.arange(8, device=codes.device)) & 1
    values = torch.tensor((zero, one), dtype=dtype, device=codes.device)
    return values[bits.reshape(-1)[:length].long()]


@torch.no_grad()
def select_bits(x: Tensor, codes: Tensor) -> Tensor:
    """`x` where the bit is set, else zero; see `laconic.ops.select_bits`.

    x [...], codes uint8 [ceil(numel / 8)] -> [...].
    """
    check_select_bits(x, codes)
    bits = unpack_bits(codes, x.numel(), torch.bool, 0.0, 1.0).view(x.shape)
    return torch.where(bits, x.contiguous(), torch.zeros((), dtype=x.dtype, device=x.device))


def bit_patterns(zero: float, one: float, dtype: torch.dtype) -> tuple[int, int]:
    """The bits of two numbers rounded to `dtype`, read as integers of `INTEGERS`."""
    return _patterns(struct.pack("dd", zero, one), dtype)  # as bytes: 0.0 == -0.0


@lru_cache(maxsize=256)
def _patterns(pair: bytes, dtype: torch.dtype) -> tuple[int, int]:
    values = torch.tensor(struct.unpack("dd", pair), dtype=dtype, device="cpu").view(INTEGERS[dtype.itemsize])
    zero, one = values.tolist()
    return zero, one
