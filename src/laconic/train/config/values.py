"""Rules for values of settings: what a field must hold, and what none can."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from laconic.errors import ConfigError

__all__ = ["MAX_COUNT", "check_values", "require", "shown"]

MAX_COUNT = 2**31 - 1
"""Most processes, sequences, tokens or entries of a dimension that a setting may ask for."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise ConfigError, naming field and value, unless `condition` holds; `rule` says what the value must do."""
    if not condition:
        raise ConfigError(f"{name} is {shown(value)}, but it must {rule}")


def shown(value: object) -> str:
    """`value` for a message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, tables in tables
        return f"of type {type(value).__name__}, too large to show"
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} characters)"


def check_values(section: object, prefix: str = "") -> None:
    """Raise ConfigError for a field of the dataclass `section` with a value that no setting can have.

    That is a number that is NaN, infinite or beyond 64 bits, and text with a NUL or with bytes that are not UTF-8,
    neither of which can be the name of a file and be written into config.toml. `prefix` stands before names of fields.
    """
    assert dataclasses.is_dataclass(section)
    for field in dataclasses.fields(section):
        _check(getattr(section, field.name), prefix + field.name)


def _check(value: object, name: str, in_table: bool = False) -> None:
    if isinstance(value, str):
        require(_is_text(value), name, value, "be UTF-8 text without NULs")
    elif isinstance(value, float) and not in_table:  # a table is for others to judge, and may mean infinity
        require(math.isfinite(value), name, value, "be finite")
    elif isinstance(value, int):
        require(-(2**63) <= value < 2**63, name, value, "fit into 64 bits")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check(key, name, True)
            _check(inner, f"{name}.{key}", True)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, name, in_table)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
