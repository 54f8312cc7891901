"""Settings by dotted names such as `model.extra.num_experts`, as messages and tables write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `table` and the tables in it to values by dotted names; an empty table leaves no name."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, Mapping)
        flat |= flat_settings(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def nested_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Build the nested tables that hold the values of `flat`, whose keys are dotted names."""
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, leaf = name.split(".")
        table = tables
        for key in outer:
            table = table.setdefault(key, {})
        table[leaf] = value
    return tables


def nearest(name: str, known: Iterable[str], tables: Iterable[str] = ()) -> str:
    """Suggest a name for the unknown dotted name `name`, as the end of a message.

    A name may be right but in the wrong table; misspelt, shortened or an abbreviation, in its own table
    or in another; or an entry of a table with free names.

    Returns:
        `; did you mean X?` for the nearest of the `known` names, or an empty string.
    """
    names = list(known)
    table, _, leaf = name.rpartition(".")
    anywhere = {other.rpartition(".")[2]: other for other in reversed(names)}
    beside = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == table}
    found = _close(leaf, beside, 0.8) or anywhere.get(leaf) or _alike(leaf, beside)
    if found is None:
        free = next((one for one in tables if one.rpartition(".")[0] == table and table), None)
        found = _alike(leaf, anywhere) if free is None else f"{free}.{leaf.replace('-', '_')}"
    return "" if found is None else f"; did you mean {found}?"


def _close(leaf: str, candidates: Mapping[str, str], cutoff: float) -> str | None:
    longer = [name for name in candidates if len(name) > 1]  # one letter is close to any short word
    matches = difflib.get_close_matches(leaf, longer, n=1, cutoff=cutoff)
    return candidates[matches[0]] if matches else None


def _alike(leaf: str, candidates: Mapping[str, str]) -> str | None:
    """The candidate that `leaf` is a misspelling, the initials ("lr") or a part ("layers") of, if any."""
    if (found := _close(leaf, candidates, 0.6)) is not None:
        return found
    words = set(re.split("[-_]", leaf))
    for candidate, name in candidates.items():
        parts = re.split("[-_]", candidate)
        if len(parts) > 1 and len(leaf) > 1 and (leaf == "".join(part[:1] for part in parts) or words <= set(parts)):
            return name
    return None
