"""TOML from outside: read in time in proportion to its length, and whatever is wrong with it is a ValueError."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_KEY_PARTS = 32
"""Parts of a dotted key: Python's reader takes time by their square, and what writes out tables recurs for each."""
_PART = r"""(?:(?<![\w+-])[\w+-]++|"[^"\n]*+"|'[^'\n]*+')"""
# Strings and comments count, too: none that anybody writes has so many parts between dots.
_LONG_KEY = re.compile(rf"{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}")


class TooDeepError(ValueError):
    """Tables are nested deeper than any configuration has them."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document, as `tomllib.loads` does.

    Raises:
        TooDeepError: a key has more than 32 parts, or lists and tables are nested deeper than Python's parser goes.
        ValueError: it is no TOML, or a number has thousands of digits.
    """
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise TooDeepError(f"a key in line {line} has more than {MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeepError("lists and tables are nested too deeply") from None
