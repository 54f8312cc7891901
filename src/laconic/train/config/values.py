"""Sections of the configuration: dataclasses whose values pydantic checks, and messages for values it refuses."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time
from typing import Any, NoReturn, TypeVar, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from laconic.errors import ConfigError
from laconic.train.config.dotted_names import nearest
from laconic.train.config.settings import settings

MAX_INT = 2**63 - 1
_MAX_ERRORS = 4
_TEXT = "be UTF-8 text without NULs"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_INT64 = "fit into 64 bits"

RULES = {
    "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "finite_number": "be finite",
    "int_parsing_size": _INT64,
    "too_long": "have at most {max_length} numbers",
    "string_pattern_mismatch": _TEXT,
    "string_too_short": "not be empty",
    "string_unicode": _TEXT,
    "value_error": "",  # a rule of several fields, which brings its own message
}
"""Rule that a value of the right type broke, by pydantic's name of the error."""
_TYPES = {
    "bool_type": "be true or false",
    "int_type": "be an integer (without quotes or decimal point)",
    "float_type": "be a number",
    "string_type": "be a string",
    "literal_error": "be {expected}",
    "dict_type": "be a table",
    "dataclass_type": "be a table",
}
_PREFIXES: dict[type, str] = {}
"""Prefix of a section's fields in messages, such as "model."."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def section(prefix: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass that checks its values and raises ConfigError for a wrong one.

    Rules of several fields are checked in the class's `__post_init__`, which calls `refuse`.

    Args:
        prefix: name of the section's table, with a dot at the end.
    """

    def make(cls: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", allow_inf_nan=False)
        made: Any = dataclass(cls, frozen=True, kw_only=True, config=config)
        _PREFIXES[made] = prefix
        init = made.__init__

        @functools.wraps(init)
        def checked(self: T, **values: Any) -> None:
            try:
                init(self, **values)
            except ValidationError as error:
                raise refusal(error.errors(), made) from None

        made.__init__ = checked
        return cls

    return make


def refuse(section: object, name: str, rule: str) -> NoReturn:
    """Refuse the value of a field.

    Args:
        section: the object that has the field.
        name: dotted name of the field in `section`.
        rule: what the value must do, as the message says it after "but it must".

    Raises:
        ConfigError: always.
    """
    value = functools.reduce(getattr, name.split("."), section)
    if type(value) in _PREFIXES:  # a whole section: what is set in it
        refuse_unused(value, (), rule)
    raise ConfigError(_message(_PREFIXES[type(section)] + name, value, rule))


def refuse_unused(section: object, names: Iterable[str], rule: str) -> None:
    """Refuse the first field of `names`, or of all if there are none, that has not its default, as `rule` asks.

    Raises:
        ConfigError: there is one.
    """
    fields: dict[str, dataclasses.Field[Any]] = vars(type(section))["__dataclass_fields__"]
    for name in names or fields:
        described = fields[name]
        made = described.default_factory
        usual = described.default if made is dataclasses.MISSING else made()
        if getattr(section, name) != usual:
            refuse(section, name, f"{rule}; its default is {usual!r}")


def check_table(table: object, name: str) -> None:
    """Check that the values of the free table `name` can be written into config.toml."""
    if isinstance(table, str) and _NO_TEXT.search(table):
        raise ConfigError(_message(name, table, _TEXT))
    if isinstance(table, int) and not -MAX_INT - 1 <= table <= MAX_INT:
        raise ConfigError(_message(name, table, _INT64))
    if isinstance(table, Mapping):
        for key, value in table.items():
            check_table(key, name)
            check_table(value, f"{name}.{key}")
    elif isinstance(table, list | tuple):
        for value in table:
            check_table(value, name)
    elif isinstance(table, date | time):
        raise ConfigError(_message(name, str(table), "be a number, text, true or false, a list or a table"))


def refusal(errors: Iterable[ErrorDetails], cls: type, source: str | None = None) -> ConfigError:
    """Turn what pydantic found wrong into a ConfigError in laconic's words, with the first few of the errors."""
    found = list(errors)
    messages = [_wording(error, cls, source) for error in found[:_MAX_ERRORS]]  # each compares with all known names
    more = [f"and {len(found) - _MAX_ERRORS} more"] if len(found) > _MAX_ERRORS else []
    return ConfigError("; ".join(messages + more))


def _wording(error: ErrorDetails, cls: type, source: str | None) -> str:
    kind, limits = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(limits["error"])
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]]
    name = _PREFIXES[cls] + "".join(parts).removeprefix(".")
    where = f" in {source}" if source and kind not in RULES else ""
    if kind == "unexpected_keyword_argument":
        all_here = settings(cls, _PREFIXES[cls])
        known = [one.name for one in all_here]
        tables = [one.name for one in all_here if one.kind is dict]
        beside = [
            other.rpartition(".") for other in sorted(known) if other.rpartition(".")[0] == name.rpartition(".")[0]
        ]
        here = ", ".join(leaf for *_, leaf in beside)
        return f"unknown key {name}{where}{nearest(name, known, tables) or f'; known keys here: {here}'}"
    rule = (RULES | _TYPES).get("int_parsing_size" if limits.get("le") == MAX_INT else kind)
    words = {key: str(limit).removesuffix(".0") for key, limit in limits.items()}
    return _message(name + where, error["input"], rule.format(**words) if rule else error["msg"])


def _message(name: str, value: object, rule: str) -> str:
    """Say what the value is and what it must be; a long value is shortened."""
    try:
        shown = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # a number of thousands of digits, tables in tables
        return f"{name} is of type {type(value).__name__}, too large to show, but it must {rule}"
    if len(shown) > 200:
        shown = f"{shown[:100]}... ({len(shown):,} characters)"
    return f"{name} is {shown}, but it must {rule}"
