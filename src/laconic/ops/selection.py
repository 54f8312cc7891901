"""Which implementation of the ops runs on which device, and why: decided once, when `laconic.ops` is imported.

Environment variables for tests and for debugging:

    LACONIC_KERNELS=reference   plain torch on every device
    LACONIC_ISA=portable|avx2|avx512   this instruction set of the C++ kernels; the import fails if the CPU lacks it
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache

from laconic.errors import ConfigError


@dataclass(frozen=True)
class Selection:
    """What runs on one device type."""

    implementation: str
    """"c++", "triton" or "reference"."""
    isa: str
    """Instruction set of the C++ kernels; empty for the others."""
    reason: str
    """Why this one, in words."""


def reference_is_forced() -> bool:
    """Whether LACONIC_KERNELS asks for plain torch.

    Raises:
        ConfigError: the variable has another value than "reference".
    """
    value = os.environ.get("LACONIC_KERNELS", "")
    if value not in ("", "reference"):
        raise ConfigError(f"LACONIC_KERNELS is {value!r}, but it must be 'reference' or not be set")
    return value == "reference"


def forced_isa() -> str | None:
    """The instruction set that LACONIC_ISA asks for, or None.

    Raises:
        ConfigError: it is not the name of an instruction set.
    """
    value = os.environ.get("LACONIC_ISA", "")
    if value not in ("", "portable", "avx2", "avx512"):
        raise ConfigError(f"LACONIC_ISA is {value!r}, but it must be portable, avx2 or avx512, or not be set")
    return value or None


@cache
def warn_once(device: str, reason: str) -> None:
    """Warn that the plain-torch reference runs on `device`, the first time only."""
    logging.getLogger("laconic").warning("quantizing on %s with the slow plain-torch reference: %s", device, reason)
