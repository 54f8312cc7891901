"""Settings by dotted names, as messages and tables name them: `model.extra.num_experts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flat_settings"]


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of `table` and of the tables in it; those without any value have no name."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, Mapping)
        flat |= flat_settings(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
