"""Entropy-coded messages: bytes of a tensor in about as few bits as their values' frequencies allow, for files.

docs/formats.md, "Entropy-coded messages". On the CPU only, in C++ or the plain reference; no op of torch's, so that no
compiler and no device has to know it.
"""

from __future__ import annotations

import struct
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.ops import native, self_check
from laconic.ops.lossless import DamagedMessage, Status
from laconic.ops.reference import entropy as reference
from laconic.ops.selection import warn_once

_MAGIC, _VERSION = b"LCNB", 1
_HEADER = struct.Struct("<4s4B3Q")  # magic, version, itemsize, is_rotated, 0; numel, sum, weighted_sum
_GUARD_NBYTES = 8
"""Zeros at the end of a message, so that a decoder may read a whole word of 64 bits wherever a stream is."""
MAX_ELEMENTS_PER_BYTE = 64
"""Messages that would be shorter are filled up with zeros: what bytes ask for in memory is bounded by them."""


def is_entropy_coded(message: Tensor) -> bool:
    """Whether uint8 [any] begins as an entropy-coded message."""
    return bytes(message[:4].tolist()) == _MAGIC


def max_nbytes(numel: int, itemsize: int) -> int:
    """Upper bound in bytes on a message of `numel` words, whatever the values."""
    num_blocks = -(-numel // reference.BLOCK_NUMEL)
    return _HEADER.size + _GUARD_NBYTES + numel * itemsize + numel // 8 + (itemsize + 3) * num_blocks


def entropy_encode(data: Tensor, itemsize: int, is_rotated: bool) -> tuple[Tensor, int, int]:
    """Encode words.

    Args:
        data: uint8 [n * itemsize], contiguous, on the CPU: the bytes of n words.
        itemsize: bytes of a word: 1, 2, 4 or 8.
        is_rotated: whether the highest bit of each word is moved to its low end, so that an exponent of 8 bits behind a
            sign is the highest byte; for 2 and 4 bytes.

    Returns:
        The message, uint8 [any], and the two numbers of the checksum of `data`.
    """
    numel = data.numel() // itemsize
    message = torch.empty(max_nbytes(numel, itemsize), dtype=torch.uint8, device="cpu")
    used, *sums = _implementation().encode_blocks(data, itemsize, is_rotated, message[_HEADER.size :])
    end = _HEADER.size + used
    nbytes = max(end + _GUARD_NBYTES, -(-numel // MAX_ELEMENTS_PER_BYTE))
    header = _HEADER.pack(_MAGIC, _VERSION, itemsize, is_rotated, 0, numel, *sums)
    message[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    message[end:nbytes] = 0
    return message[:nbytes], sums[0], sums[1]


def entropy_decode_(out: Tensor, message: Tensor, itemsize: int, is_rotated: bool) -> tuple[int, int]:
    """Write the words of a message to `out`.

    Args:
        out: uint8 [n * itemsize], contiguous, on the CPU.
        message: uint8 [any], contiguous, on the CPU; any bytes.
        itemsize, is_rotated: as in `entropy_encode`.

    Returns:
        The two numbers of the checksum of `out`.

    Raises:
        DamagedMessage: the bytes are not a whole, undamaged message of such words; `out` is then undefined.
    """
    if message.numel() < _HEADER.size + _GUARD_NBYTES:
        raise DamagedMessage(Status.TRUNCATED)
    magic, version, *kind, reserved, numel, total, weighted = _HEADER.unpack(bytes(message[: _HEADER.size].tolist()))
    if magic != _MAGIC:
        raise DamagedMessage(
            Status.NOT_A_MESSAGE, f"magic is {magic!r}, but an entropy-coded message begins with {_MAGIC!r}"
        )
    if version != _VERSION:
        raise DamagedMessage(
            Status.VERSION,
            f"version of an entropy-coded message is {version}, but this release reads version {_VERSION}; decode with "
            "the release that wrote it",
        )
    if reserved:
        raise DamagedMessage(Status.FIELD, f"byte 7 holds {reserved}, but it must be 0")
    if (*kind, numel * itemsize) != (itemsize, is_rotated, out.numel()):
        raise DamagedMessage(
            Status.MISMATCH,
            f"the message holds {numel} words of {kind[0]} bytes, rotated: {kind[1]}, but {out.numel() // itemsize} of "
            f"{itemsize}, rotated: {int(is_rotated)}, belong there",
        )
    blocks = message[_HEADER.size : message.numel() - _GUARD_NBYTES]
    used, *sums = _implementation().decode_blocks_(out, blocks, itemsize, is_rotated)
    if numel and not used:
        raise DamagedMessage(Status.PAYLOAD)
    if sums != [total, weighted]:
        raise DamagedMessage(Status.CHECKSUM)
    end = _HEADER.size + used
    nbytes = max(end + _GUARD_NBYTES, -(-numel // MAX_ELEMENTS_PER_BYTE))
    if message.numel() != nbytes or message[end:].any():
        raise DamagedMessage(
            Status.TRAILING,
            f"the message has {message.numel()} bytes, but its blocks end at {end} and {nbytes - end} zeros belong"
            " behind them; it was damaged",
        )
    return total, weighted


@cache
def _implementation() -> ModuleType:
    """The C++ kernels, held against the reference once; or the reference, where they were not built.

    Raises:
        KernelError: the kernels give other bytes.
    """
    if native.SELECTION.implementation != "c++":
        warn_once("cpu", native.SELECTION.reason)
        return reference
    from laconic.ops.native import entropy as kernels

    if self_check.IS_ON:
        wrong = [
            kind for kind in ((1, False), (2, False), (2, True), (4, True), (8, False)) if not _agree(kernels, *kind)
        ]
        if wrong:
            raise KernelError(
                f"the kernel of entropy-coded messages gives other bytes than the reference for (itemsize, is_rotated) "
                f"{wrong}; its result was not used. Set LACONIC_KERNELS=reference to run plain torch, and report what "
                "`laconic doctor` says"
            )
    return kernels


def _agree(kernels: ModuleType, itemsize: int, is_rotated: bool) -> bool:
    """Whether the kernels give the reference's bytes for a small example, with zeros left out, and take them back."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(2000, generator=generator, dtype=torch.float32, device="cpu")
    data = normal.mul_(4).to(torch.int8).view(torch.uint8)
    found, expected = (torch.zeros(max_nbytes(2000, 1), dtype=torch.uint8, device="cpu") for _ in range(2))
    results = [x.encode_blocks(data, itemsize, is_rotated, y) for x, y in ((kernels, found), (reference, expected))]
    back = torch.zeros_like(data)
    kernels.decode_blocks_(back, found, itemsize, is_rotated)
    return results[0] == results[1] and found.equal(expected) and back.equal(data)
