"""Flags over the configuration tree.

Every field of the tree is a flag named by its dotted name, with the merged values as defaults. Rules are checked once,
on the final values, and reported in one way; a flag only has to have the right type. `--flag=false` works for booleans,
and `--model.extra.NAME VALUE` fills a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from laconic.cli.arguments import Parser
from laconic.errors import ConfigError
from laconic.train.config.dotted_names import flat_settings, nearest, nested_settings, setting_types
from laconic.train.config.toml import field_docs, merge
from laconic.train.config.toml_text import TooDeepError, parse_toml

__all__ = ["flags_parser", "option", "parse_flags"]

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_METAVARS = {int: "INT", float: "FLOAT", str: "STR"}
_WHERE_PATHS = ("path", "paths", "dir", "file", "plan", "config", "rates", "tokenizer", "json")


def parse_flags(
    cls: type, args: Sequence[str], defaults: Mapping[str, Any], own: Mapping[str, tuple[type, str]], prog: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse `args` over the dataclass tree `cls` whose values are `defaults` (nested, complete).

    `--help` prints and exits 0.

    Args:
        cls: root of the tree.
        args: of the command.
        defaults: value of every field.
        own: flags of the command that are no fields of the tree: name -> (bool or str, help).
        prog: name of the command in the help.

    Returns:
        Values of the tree, and values of the own flags.

    Raises:
        ConfigError: a flag is not known, or its value does not parse.
    """
    kinds = {name: kind for name, kind in setting_types(cls) if not dataclasses.is_dataclass(kind)}
    kinds |= {name: kind for name, (kind, _) in own.items()}
    tokens, tables = _normalized(args, kinds)
    parsed = vars(flags_parser(cls, defaults, own, prog).parse_args(tokens))
    own_values = {name: parsed.pop(name, False if kind is bool else None) for name, (kind, _) in own.items()}
    return merge(merge(defaults, nested_settings(parsed)), nested_settings(tables)), own_values


def flags_parser(cls: type, defaults: Mapping[str, Any], own: Mapping[str, tuple[type, str]], prog: str) -> Parser:
    """Make the parser of `parse_flags`; what is not given has no attribute in what it returns."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=cls.__doc__,
        argument_default=argparse.SUPPRESS,
        formatter_class=_Formatter,
    )
    for name, (kind, text) in own.items():
        _add_flag(parser, name, kind, text, "")
    _add_section(parser, cls, "", flat_settings(defaults))
    return parser


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
    """Spell `args` as the parser does, and collect the values of table flags by dotted names.

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
        return parse_toml(f"value = {text}")["value"]
    except TooDeepError:
        raise ConfigError(f"{text[:40]}... is nested too deeply to be read") from None
    except ValueError:  # no TOML, or a number of thousands of digits
        return text


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)


def _add_section(parser: Parser, cls: type, prefix: str, defaults: Mapping[str, Any]) -> None:
    """Add a flag for each field of `cls`, and a group of flags for each dataclass in it."""
    group = parser.add_argument_group(prefix.rstrip("."), cls.__doc__) if prefix else parser
    hints, docs = get_type_hints(cls), field_docs(cls)
    inner = []
    for field in dataclasses.fields(cls):
        name, hint, text = prefix + field.name, hints[field.name], docs.get(field.name) or ""
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            inner.append((hint, f"{name}."))
        elif get_origin(hint) is dict:  # filled by _normalized
            group.add_argument(f"--{_spelled(name)}.NAME", dest=f"{name}.NAME", metavar="VALUE", help=_escaped(text))
        else:
            default = defaults.get(name)
            shown = " ".join(map(str, default)) or "none" if isinstance(default, list | tuple) else default
            _add_flag(group, name, hint, text, f" (default: {shown})")
    for hint, further in inner:
        _add_section(parser, hint, further, defaults)


def _add_flag(group: Any, name: str, hint: Any, text: str, default: str) -> None:
    """Add the flag of one field of type `hint`: bool, int, float, str, a Literal, a tuple of one of them, or None."""
    flag, text = f"--{_spelled(name)}", _escaped(" ".join(text.split()) + default)
    options = [one for one in get_args(hint) if one is not type(None)]
    can_be_none = get_origin(hint) in (Union, types.UnionType) and len(options) < len(get_args(hint))
    kind = options[0] if can_be_none else hint
    if kind is bool:
        group.add_argument(flag, dest=name, action="store_true", help=text)
        for spelling in sorted({f"--{_negated(_spelled(name))}", f"--no-{_spelled(name)}"}):
            group.add_argument(spelling, dest=name, action="store_false", help=argparse.SUPPRESS)
    elif get_origin(kind) is tuple:
        element = get_args(kind)[0]
        metavar = "PATH" if name.endswith(_WHERE_PATHS) else _METAVARS[element]
        group.add_argument(flag, dest=name, nargs="*", type=element, metavar=metavar, help=text)
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        of_type = _or_none(type(choices[0])) if can_be_none else type(choices[0])
        listed = "{" + ",".join(map(str, choices)) + "}"
        allowed = (*choices, None) if can_be_none else choices
        group.add_argument(flag, dest=name, type=of_type, choices=allowed, metavar=listed, help=text)
    else:
        metavar = "PATH" if kind is str and name.endswith(_WHERE_PATHS) else _METAVARS[kind]
        group.add_argument(flag, dest=name, type=_or_none(kind) if can_be_none else kind, metavar=metavar, help=text)


def _or_none(kind: type) -> Callable[[str], Any]:
    """Make a parser of `kind` that reads "None", as the help writes it, as None."""

    def parse(text: str) -> Any:
        return None if text == "None" else kind(text)

    parse.__name__ = kind.__name__
    return parse


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
