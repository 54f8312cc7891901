"""Settings by dotted names such as `model.extra.num_experts`, as messages and tables write them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

__all__ = ["flat_settings", "nearest", "nested_settings", "setting_types"]

_RENAMED = {
    "moe.rows": "moe.dispatch_codec",
    "moe.windows": "moe.overlap_grad_reduce",
    "moe.swap_when": "moe.swap_policy (pays: cost_aware, shorter: always)",
    "moe.balance_coef": "moe.router_aux_loss_coef",
    "moe.z_coef": "moe.router_z_loss_coef",
}
"""Present names of settings, by their former ones."""


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


def setting_types(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and type, without its range, of every field of a dataclass and of the dataclasses in it."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        yield prefix + field.name, hint
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from setting_types(hint, f"{prefix}{field.name}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest a name for the unknown dotted name `name`, as the end of a message.

    A name may be a former one, misspelt, or right but in the wrong table: its own table is searched first, then the
    others.

    Returns:
        `; did you mean X?` for the nearest of the `known` names, `; it is called X now` for a former name, or an empty
        string.
    """
    if (renamed := _RENAMED.get(name.replace("-", "_"))) is not None:
        return f"; it is called {renamed} now"
    names = list(known)
    table, _, leaf = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == table}
    anywhere = {other.rpartition(".")[2]: other for other in names}
    for candidates in (beside, anywhere):
        matches = difflib.get_close_matches(leaf, candidates, n=1, cutoff=0.6)
        if matches:
            return f"; did you mean {candidates[matches[0]]}?"
    return ""
