"""JSON from outside, where whatever is wrong is a ValueError, and numbers that JSON cannot hold."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

_LONG_NUMBER = re.compile("[0-9]{309}")  # whole numbers of fewer digits are floats, too


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document, as `json.loads` does.

    Raises:
        ValueError: it is no JSON, no UTF-8, has a name twice in a table, holds a number that no float can hold, or
            lists and tables are nested deeper than Python's parser goes, for which `json.loads` has an error of another
            family.
    """
    if not isinstance(text, str):
        text = text.decode("utf-8-sig")
    # A call for each whole number would take ten times as long as all the rest
    integer = _integer if _LONG_NUMBER.search(text) else None
    try:
        return json.loads(text, object_pairs_hook=unique_names, parse_int=integer, parse_float=_real)
    except RecursionError:
        raise ValueError("lists and tables are nested too deeply") from None


def _integer(text: str) -> int:
    number = int(text)
    if abs(number) > sys.float_info.max:  # the first computation with it would raise OverflowError
        raise ValueError(f"{text[:9]}... is a whole number of {len(text)} digits")
    return number


def _real(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:9]} is a number that no float can hold")
    return number


def json_number(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads`, which would otherwise keep the last of two equal names.

    Raises:
        ValueError: two names are equal.
    """
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{short(name)!r} comes twice")
        table[name] = value
    return table


def short(value: object) -> str:
    """A value in a message: its text, or the beginning of a long one."""
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
