"""Parses and formats byte counts: "24GB" to a number and back."""

from __future__ import annotations

import re

from laconic.errors import PlanError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}": 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_nbytes(text: str, name: str = "memory") -> int:
    """Bytes of "24GB" (10^9), "24GiB" (2^30), "500M", "123456B".

    Args:
        text: a number and its unit. A number alone is taken where the name says that it counts bytes.
        name: of the flag, for the message.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise PlanError(f"{name} is {text!r}, but it must be a size such as 24GB, 24GiB or 500MB")
    if not match[2] and not name.endswith("nbytes"):
        raise PlanError(f"{name} is {text!r}, but it must have a unit: {match[1]}GB, {match[1]}GiB, or {match[1]}B")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def format_nbytes(nbytes: float) -> str:
    """Return `nbytes` with two decimals and a unit, in powers of 1000: 1.23 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
