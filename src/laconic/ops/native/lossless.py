"""Lossless messages on the CPU: `reference/lossless.py` in C++, the same bytes and the same status."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.ops import huge_pages
from laconic.ops.declarations.lossless import check_lossless_decode_, check_lossless_decode_add_, check_lossless_encode
from laconic.ops.lossless import CODES, DTYPE_NUMBERS, words_of
from laconic.ops.native.library import ISA_NUMBERS, kernels

__all__ = ["lossless_decode_", "lossless_decode_add_", "lossless_encode"]


def lossless_encode(x: Tensor, code: str, capacity_nbytes: int | None, *, isa: str | None = None) -> Tensor:
    """`reference.lossless_encode` in C++, the same message; `isa` overrides the instruction set."""
    message = huge_pages.empty([check_lossless_encode(x, code, capacity_nbytes)], torch.uint8)
    words = words_of(x).contiguous()
    kernels.lossless_encode(
        ISA_NUMBERS[isa], torch.get_num_threads(),
        words.data_ptr(), DTYPE_NUMBERS[x.dtype], CODES[code], words.numel(), list(words.shape),
        message.data_ptr(), message.numel(), capacity_nbytes is not None,
    )  # fmt: skip
    return message


def lossless_decode_(out: Tensor, message: Tensor, *, isa: str | None = None) -> Tensor:
    """`reference.lossless_decode_` in C++, the same status; `isa` overrides the instruction set."""
    check_lossless_decode_(out, message)
    return _decode(out, message, False, isa)


def lossless_decode_add_(total: Tensor, message: Tensor, *, isa: str | None = None) -> Tensor:
    """`reference.lossless_decode_add_` in C++, the same bits and status; `isa` overrides the instruction set.

    Values are added block by block while they are in the cache, before the checksum over all of them is known. So
    after a status that is not 0 some of them are in the total.
    """
    check_lossless_decode_add_(total, message)
    return _decode(total, message, True, isa)


def _decode(out: Tensor, message: Tensor, adds: bool, isa: str | None) -> Tensor:
    status = kernels.lossless_decode(
        ISA_NUMBERS[isa],
        torch.get_num_threads(),
        message.data_ptr(),
        message.numel(),
        words_of(out).numel(),
        adds,
        DTYPE_NUMBERS[out.dtype],
        out.data_ptr(),
    )
    return torch.tensor(status, dtype=torch.int32, device="cpu")
