"""JSON from outside, where whatever is wrong is a ValueError, and numbers that JSON cannot hold."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

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


def read_record(cls: type[T], data: Any, optional: Collection[str] = ()) -> T:
    """Read a dataclass from what `dataclasses.asdict` gave, its values of their types and in their ranges.

    All fields are there, but for the `optional` ones of any table, which have defaults. Names beside
    them are left out where none is missing.

    Raises:
        ValueError: it is something else; the message names the field, its value and the rule.
    """
    from pydantic import TypeAdapter, ValidationError  # late: many commands read none

    try:
        text = json.dumps(data)
        record = TypeAdapter(cls).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_first_error(error)) from None
    except RecursionError:
        raise ValueError("lists and tables are nested too deeply") from None
    except TypeError as error:  # what JSON has not
        raise ValueError(str(error)) from None
    lost = _lost(json.loads(json.dumps(asdict(record))), json.loads(text), optional)  # type: ignore[call-overload]
    if lost is not None:
        raise ValueError(lost)
    return record


def _first_error(error: ValidationError) -> str:
    wrong = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in wrong["loc"] if part != "[key]") or "it"
    if wrong["type"] == "missing":
        return f"{where} is missing"
    if wrong["type"] == "value_error":  # of the class itself
        return ("" if where == "it" else f"{where}: ") + str(wrong["ctx"]["error"])
    rule = re.sub(r"^\w+ should", "it must", wrong["msg"])
    if wrong["type"] == "string_pattern_mismatch" and (names := re.fullmatch(r"\^\((.*)\)\$", wrong["ctx"]["pattern"])):
        rule = f"it must be one of {names[1].replace('|', ', ')}"
    return f"{where} is {short(repr(wrong['input']))}, but {rule}"


def _lost(known: Any, data: Any, optional: Collection[str], where: str = "") -> str | None:
    """Say what was left out of `data` or added to it, with `where` in front."""
    if isinstance(known, dict) and isinstance(data, dict):
        missing = [name for name in known if name not in data]
        if (name := next((name for name in missing if name not in optional), None)) is not None:
            return f"{where}{name} is missing"
        if missing and (name := next((name for name in data if name not in known), None)) is not None:
            return f"{where}{name} is not known here"  # likely one of those that are missing
        pairs = [(name, value, data[name]) for name, value in known.items() if name in data]
    elif isinstance(known, list) and isinstance(data, list):
        pairs = [(number, *pair) for number, pair in enumerate(zip(known, data, strict=True))]
    else:
        return (
            None
            if known == data and known not in (math.inf, -math.inf)
            else f"{where.removesuffix('.')} is {short(repr(data))}, but it must be a finite number that a float holds"
        )
    found = (_lost(ours, theirs, optional, f"{where}{name}.") for name, ours, theirs in pairs)
    return next(filter(None, found), None)


def first_difference(known: Any, data: Any) -> str | None:
    """Name the first field in which two values of JSON differ; None if none does, and "" for the values themselves."""
    if isinstance(known, dict) and isinstance(data, dict):
        pairs = {name: (known.get(name), data.get(name)) for name in {**known, **data}}
        if (only := next((name for name in pairs if (name in known) != (name in data)), None)) is not None:
            return str(only)
    elif isinstance(known, list) and isinstance(data, list) and len(known) == len(data):
        pairs = dict(enumerate(zip(known, data, strict=True)))
    else:
        return None if known == data and isinstance(known, bool) == isinstance(data, bool) else ""
    for name, (ours, theirs) in pairs.items():
        if (inner := first_difference(ours, theirs)) is not None:
            return f"{name}.{inner}".removesuffix(".")
    return None


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
