"""Flags over the configuration tree, parsed by tyro.

tyro gets a mirror of the dataclasses: the same fields, types, groups and help, the merged values as defaults, but no
rules, so that rules are checked once, on the final values, and reported in one way. This module adds what tyro lacks:
the message for a misspelt flag names the nearest known one, `--flag=false` works for booleans, and
`--model.extra.NAME VALUE` fills a table.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, get_origin, get_type_hints

from laconic.errors import ConfigError
from laconic.train.config.dotted_names import nearest, nested_settings, setting_types
from laconic.train.config.toml import field_docs, merge

__all__ = ["option", "parse_flags"]

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def parse_flags(
    cls: type, args: Sequence[str], defaults: Mapping[str, Any], own: Mapping[str, tuple[type, str]], prog: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse `args` over the dataclass tree `cls` whose values are `defaults` (nested, complete).

    `--help` prints and exits 0; a value that does not parse prints what was expected and exits 2.

    Args:
        cls: root of the tree.
        args: of the command.
        defaults: value of every field.
        own: flags of the command that are no fields of the tree: name -> (bool or str, help).
        prog: name of the command in the help.

    Returns:
        Values of the tree, and values of the own flags.

    Raises:
        ConfigError: a flag is not known.
    """
    import tyro

    kinds = {name: kind for name, kind in setting_types(cls) if not dataclasses.is_dataclass(kind)}
    kinds |= {name: kind for name, (kind, _) in own.items()}
    tokens, tables = _normalized(args, kinds)
    own_fields: list[tuple[str, Any, Any]] = [
        (
            name,
            Annotated[bool if kind is bool else (str | None), tyro.conf.arg(help=text)],
            dataclasses.field(default=False if kind is bool else None),
        )
        for name, (kind, text) in own.items()
    ]
    mirror = _mirror(cls, defaults, own_fields=own_fields)
    parsed: Any = tyro.cli(mirror, args=tokens, prog=prog, description=cls.__doc__)
    values = _values(parsed)
    own_values = {name: values.pop(name) for name in own}
    return merge(values, nested_settings(tables)), own_values


def option(args: Sequence[str], name: str) -> str | None:
    """Find the last value of `--name VALUE` or `--name=VALUE` in `args`, before they are parsed; None if absent."""
    found = None
    for index, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag.replace("_", "-") == f"--{name}":
            found = value if equals else args[index + 1] if index + 1 < len(args) else None
    return found


def _negated(name: str) -> str:
    head, _, leaf = name.rpartition(".")
    return f"{head}.no-{leaf}" if head else f"no-{leaf}"


def _normalized(args: Sequence[str], kinds: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Spell `args` as tyro does, and collect the values of table flags by dotted names.

    Raises:
        ConfigError: a flag is not known.
    """
    hyphened = {name.replace("_", "-"): kind for name, kind in kinds.items()}
    booleans = {name for name, kind in hyphened.items() if kind is bool}
    negatives = {spelling: name for name in booleans for spelling in (_negated(name), f"no-{name}")}
    table_names = [name for name, kind in kinds.items() if get_origin(kind) is dict]
    tokens: list[str] = []
    tables: dict[str, Any] = {}
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("--") or arg == "--help":
            tokens.append(arg)
            continue
        given, equals, value = arg[2:].partition("=")
        table = next((name for name in table_names if given.replace("-", "_").startswith(name + ".")), None)
        name = given.replace("_", "-")
        if table is not None:
            if not equals:
                value = next(rest, "")
            if not value:
                raise ConfigError(f"--{given} needs a value, e.g. --{given} 1")
            tables[f"{table}.{given[len(table) + 1 :]}"] = _toml_value(value)
        elif name in negatives and not equals:
            tokens.append("--" + _negated(negatives[name]))
        elif name in booleans and equals:
            if value.lower() not in _TRUE + _FALSE:
                raise ConfigError(f"--{given} is {value!r}, but it must be true or false")
            tokens.append("--" + (name if value.lower() in _TRUE else _negated(name)))
        elif name in hyphened and get_origin(hyphened[name]) is not dict:
            tokens.append(f"--{name}{equals}{value}")
        elif name in hyphened:
            raise ConfigError(f"--{given} is a table; give its fields one by one, e.g. --{given}.NAME VALUE")
        else:
            shown = [*hyphened, *(_negated(known) for known in booleans)]
            hint = nearest(name, shown).replace("did you mean ", "did you mean --")
            raise ConfigError(f"unknown flag --{given}{hint or '; --help lists the known ones'}")
    return tokens, tables


def _toml_value(text: str) -> Any:
    """Parse `text` as a TOML value (number, true, list, quoted string); anything else is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise ConfigError(f"{text[:40]}... is nested too deeply to be read") from None
    except ValueError:  # no TOML, or a number of thousands of digits
        return text


def _mirror(
    cls: type, values: Mapping[str, Any], prefix: str = "", own_fields: Sequence[tuple[str, Any, Any]] = ()
) -> type:
    """Make a dataclass like `cls`, with `values` as defaults and without its rules."""
    import tyro

    annotated: Any = Annotated  # type checkers want literal types inside it; ours come from the fields
    hints = get_type_hints(cls)
    docs = field_docs(cls)
    fields: list[tuple[str, Any, Any]] = [*own_fields]
    for field in dataclasses.fields(cls):
        hint, value, text = hints[field.name], values[field.name], docs.get(field.name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            mirror = _mirror(hint, value, f"{prefix}{field.name}.")
            fields.append((field.name, mirror, dataclasses.field(default_factory=mirror)))
        elif get_origin(hint) is dict:
            # Shown in the help, filled by _normalized: tyro has no type for a table of anything.
            text = f"Given as --{prefix}{field.name}.NAME VALUE. {text}"
            table = annotated[Any, tyro.conf.arg(help=text), tyro.conf.Fixed]
            fields.append((field.name, table, dataclasses.field(default_factory=partial(dict, value))))
        else:
            default = tuple(value) if isinstance(value, list) else value  # dataclasses refuse lists
            fields.append((field.name, annotated[hint, tyro.conf.arg(help=text)], dataclasses.field(default=default)))
    made = dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
    made.__doc__ = cls.__doc__
    return made


def _values(parsed: Any) -> dict[str, Any]:
    return {
        field.name: _values(value) if dataclasses.is_dataclass(value := getattr(parsed, field.name)) else value
        for field in dataclasses.fields(parsed)
    }
