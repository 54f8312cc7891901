"""TOML from outside: read in time in proportion to its length, and whatever is wrong with it is a ValueError."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_KEY_PARTS = 32
"""Parts of a dotted key: Python's reader takes time by their square, and what writes out tables recurs for each."""
# Strings and comments whole, as dots in them separate nothing.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''.*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'|#[^\n]*|[\w+-]+|[ \t]+|.", re.DOTALL
)


class TooDeepError(ValueError):
    """Tables are nested deeper than any configuration has them."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document, as `tomllib.loads` does.

    Raises:
        TooDeepError: a key has more than 32 parts, or lists and tables are nested deeper than Python's parser goes.
        ValueError: it is no TOML, or a number has thousands of digits.
    """
    if text.count(".") >= MAX_KEY_PARTS:
        _check_keys(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeepError("lists and tables are nested too deeply") from None


def _check_keys(text: str) -> None:
    parts, is_open = 0, False
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token == ".":
            is_open = parts > 0
        elif token[0] not in " \t":
            is_part = token[0] in "\"'_-+" or token[0].isalnum()
            parts = (parts + 1 if is_open else 1) if is_part else 0
            is_open = False
            if parts > MAX_KEY_PARTS:
                line = text.count("\n", 0, found.start()) + 1
                raise TooDeepError(f"a key in line {line} has more than {MAX_KEY_PARTS} parts")
