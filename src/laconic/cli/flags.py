"""Flags made from settings: every field of a configuration is a flag named by its dotted name.

Rules are checked once, on the merged values, and reported in one way; a flag only has to have the right type.
`--flag=false` works for booleans, `--model.extra.NAME VALUE` fills a table, and `--lora r=16 alpha=32` sets fields of a
section.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic.cli.arguments import Parser, flag_hint
from laconic.errors import ConfigError
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.settings import Setting, settings
from laconic.train.config.toml_text import TooDeepError, parse_toml

_PAIR = re.compile(r"[a-z][\w-]*=")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_METAVARS = {int: "INT", float: "FLOAT", str: "STR"}


def parse_flags(cls: type, args: Sequence[str], own: Sequence[Setting], prog: str) -> dict[str, Any]:
    """Parse `args` of a command over the section `cls`.

    Returns:
        What was given, by dotted name; "help" is the flag for it.

    Raises:
        ConfigError: a flag is not known, or its value does not parse.
    """
    tokens, entries = _normalized(args, [*own, *settings(cls)], prog)
    return vars(flags_parser(cls, {}, own, prog).parse_args(tokens)) | entries


def flags_parser(cls: type, defaults: Mapping[str, Any], own: Sequence[Setting], prog: str) -> Parser:
    """Make the parser of `parse_flags`, whose help shows `defaults`; what is not given it leaves out."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=cls.__doc__,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8),
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    for one in own:
        _add_flag(parser, one, one.text)
    values, groups = flat_settings(defaults), {"": parser}
    for one in sorted(settings(cls), key=lambda one: "." in one.name):  # the root's own first
        group = groups[one.name.rpartition(".")[0]]
        if one.is_section:
            groups[one.name] = parser.add_argument_group(one.name, one.kind.__doc__)  # type: ignore[assignment]
        elif one.kind is dict:  # filled by _normalized
            flag = f"--{_spelled(one.name)}.NAME"
            group.add_argument(flag, dest=f"{one.name}.NAME", metavar="VALUE", help=_escaped(one.text))
        else:
            value = values.get(one.name)
            shown = " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else value
            _add_flag(group, one, f"{one.text} (default: {shown})")
    return parser


def _negated(name: str) -> str:
    head, _, leaf = name.rpartition(".")
    return f"{head}.no-{leaf}" if head else f"no-{leaf}"


def _normalized(args: Sequence[str], known: Sequence[Setting], prog: str) -> tuple[list[str], dict[str, Any]]:
    """Spell `args` as the parser does, and collect the values of free tables by dotted names."""
    by_name = {_spelled(one.name): one for one in known} | {"help": Setting("help", bool)}
    booleans = [name for name, one in by_name.items() if one.kind is bool]
    negatives = {spelling: name for name in booleans for spelling in (_negated(name), f"no-{name}")}
    tables = [one.name for one in known if one.kind is dict]
    tokens: list[str] = []
    entries: dict[str, Any] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            tokens.append(arg)
            continue
        given, equals, value = arg[2:].partition("=")
        name = _spelled(given)
        table = next((table for table in tables if given.replace("-", "_").startswith(table + ".")), None)
        one = by_name.get(name)
        if table is not None:
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value:
                raise ConfigError(f"--{given} needs a value, e.g. --{given} 1")
            entries[f"{table}.{given[len(table) + 1 :]}"] = _toml_value(value)
        elif name in negatives:
            if equals:
                raise ConfigError(f"--{given} takes no value; give --{negatives[name]}=true or =false")
            tokens.append("--" + _negated(negatives[name]))
        elif one is None:
            shown = [name for name, one in by_name.items() if not one.is_section and one.kind is not dict]
            hint = flag_hint(name, [*shown, *map(_negated, booleans)], map(_spelled, tables))
            raise ConfigError(f"unknown flag --{given}{hint or f'; {prog} --help lists the known ones'}")
        elif one.is_section and not equals and rest and _PAIR.match(rest[0]):
            pairs = [rest.pop(0) for _ in range(sum(1 for _ in itertools.takewhile(_PAIR.match, rest)))]
            rest = [flag for pair in pairs for flag in _flags_of(name, pair, by_name)] + rest
        elif one.kind is dict or one.is_section:
            leaf = "NAME" if one.kind is dict else _spelled(settings(one.kind)[0].name)
            raise ConfigError(f"--{given} is a table; give its fields one by one, e.g. --{given}.{leaf} VALUE")
        elif one.kind is bool and equals:
            if value.lower() not in _TRUE + _FALSE:
                raise ConfigError(f"--{given} is {value!r}, but it must be true or false")
            tokens.append("--" + (name if value.lower() in _TRUE else _negated(name)))
        else:
            tokens.append(f"--{name}{equals}{value}")
    return tokens, entries


def _flags_of(section: str, pair: str, by_name: Mapping[str, Setting]) -> list[str]:
    """The flag that sets a field of `section` as `pair` ("r=16") says; commas separate the values of a list."""
    name, _, value = pair.partition("=")
    one = by_name.get(_spelled(f"{section}.{name}"))
    if one is not None and one.is_list:
        return [f"--{section}.{name}", *value.split(",")]
    return [f"--{section}.{name}={value}"]


def _toml_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except TooDeepError:
        raise ConfigError(f"{text[:40]}... is nested too deeply to be read") from None
    except ValueError:  # no TOML, or a number of thousands of digits
        return text


def _add_flag(group: Any, one: Setting, text: str) -> None:
    flag, text = f"--{_spelled(one.name)}", _escaped(text)
    if one.kind is bool:
        group.add_argument(flag, dest=one.name, action="store_true", help=text)
        for spelling in sorted({f"--{_negated(_spelled(one.name))}", f"--no-{_spelled(one.name)}"}):
            group.add_argument(spelling, dest=one.name, action="store_false", help=argparse.SUPPRESS)
        return
    options: dict[str, Any] = {"type": _or_none(one.kind) if one.can_be_none else one.kind}
    options["metavar"] = "PATH" if one.is_path else _METAVARS[one.kind]
    if one.choices:
        options["choices"] = (*one.choices, None) if one.can_be_none else one.choices
        options["metavar"] = "{" + ",".join(map(str, one.choices)) + "}"
    if one.is_list:
        options["nargs"] = "+"
    group.add_argument(flag, dest=one.name, help=text, **options)


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
