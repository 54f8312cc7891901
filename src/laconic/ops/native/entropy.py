"""Blocks of entropy-coded messages on the CPU: `reference/entropy.py` in C++, the same bytes."""

from __future__ import annotations

from torch import Tensor

from laconic.ops.native.library import ISA_NUMBERS, kernels


def encode_blocks(
    data: Tensor, itemsize: int, is_rotated: bool, room: Tensor, *, isa: str | None = None
) -> tuple[int, int, int]:
    """`reference.encode_blocks` in C++; `room` has `max_nbytes`, `isa` overrides the instruction set."""
    numel = data.numel() // itemsize
    nbytes, *sums = kernels.entropy_encode(
        ISA_NUMBERS[isa], data.data_ptr(), numel, itemsize, is_rotated, room.data_ptr()
    )
    return nbytes, sums[0], sums[1]


def decode_blocks_(
    out: Tensor, blocks: Tensor, itemsize: int, is_rotated: bool, *, isa: str | None = None
) -> tuple[int, int, int]:
    """`reference.decode_blocks_` in C++; GUARD_NBYTES bytes behind `blocks` may be read."""
    numel = out.numel() // itemsize
    nbytes, *sums = kernels.entropy_decode(
        ISA_NUMBERS[isa], blocks.data_ptr(), blocks.numel(), numel, itemsize, is_rotated, out.data_ptr()
    )
    return nbytes, sums[0], sums[1]
