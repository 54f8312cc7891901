"""What a fuzzer needs to know of a parser."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from laconic.errors import CheckpointError, FormatError

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A parser under test."""

    run: Callable[[bytes], object]
    """Returns something true where it got past the outermost checks, so that a run can say whether it got deep."""
    seeds: Callable[[], list[bytes]]
    reseal: Callable[[bytes], bytes] = lambda data: data
    """Makes the outer checksum fit again, so that what is behind it is reached."""
    change: Callable[[bytes, random.Random], bytes] | None = None
    """Changes a seed in its own grammar, so that changes get behind the outermost parser."""
    refusals: tuple[type[Exception], ...] = (FormatError, CheckpointError)
    """What it may raise."""
