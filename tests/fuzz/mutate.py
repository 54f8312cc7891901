"""Bytes made worse: what a fuzzer without a coverage-guided engine does to a good input."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["mutated"]

# Where arithmetic on sizes goes wrong.
_NUMBERS = (0, 1, 7, 8, 63, 64, 127, 128, 255, 4095, 4096, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
_LARGE = (2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 1)


def mutated(seeds: Sequence[bytes], dice: random.Random) -> bytes:
    """One of `seeds` after one to six changes, decided by `dice` alone."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        _change(data, dice, seeds)
    return bytes(data)


def _change(data: bytearray, dice: random.Random, seeds: Sequence[bytes]) -> None:
    # Headers are short and decide most: half of all changes are among the first bytes.
    end = len(data) if dice.random() < 0.5 else min(len(data), 128)
    place, kind = dice.randrange(end) if end else 0, dice.randrange(8)
    if kind <= 1 and data:
        data[place] ^= 1 << dice.randrange(8)
    elif kind == 2 and data:
        data[place] = dice.randrange(256)
    elif kind == 3:
        size = dice.choice((1, 2, 4, 8))
        number = dice.choice(_NUMBERS + _LARGE) if dice.random() < 0.7 else len(data) + dice.randrange(-9, 10)
        place -= place % size
        data[place : place + size] = (number % (1 << (8 * size))).to_bytes(size, "little")
    elif kind == 4:
        del data[place : place + dice.choice((1, 4, 8, 1000))]
    elif kind == 5:
        data[place:place] = dice.randbytes(dice.choice((1, 4, 8, 100)))
    elif kind == 6:
        other = dice.choice(seeds)
        data[place:] = other[place : place + dice.randrange(len(other) + 1)]
    else:
        data[place : place + 8] = data[dice.randrange(len(data) + 1) :][:8]
