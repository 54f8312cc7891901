"""TOML in and out of the configuration tree of `laconic.train.config.schema`.

Layers meet as plain mappings, and the dataclasses are built once from the merged result: a rule that spans two fields
is judged on what will run, not on a half-merged tree. Layers, weakest first: defaults, the config.toml of a resumed
run, the file given by `--config`, flags. Relative paths in a file are relative to the working directory, as in flags.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from laconic.errors import ConfigError
from laconic.train.config.schema import TrainConfig
from laconic.train.config.values import shown

__all__ = ["build_config", "dump_config", "field_docs", "load_config", "merge", "nearest", "read_toml", "save_config"]


def load_config(path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The configuration in the TOML file at `path` (None: the defaults) with `overrides` on top.

    `overrides` maps dotted names to values, e.g. ``{"model.hidden_size": 256}``. Raises ConfigError for a file that
    cannot be read, an unknown key (naming the nearest known one), a value of the wrong type, or a broken rule.
    """
    values = {} if path is None else read_toml(path)
    source = None if path is None else os.fspath(path)
    nested: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        *tables, leaf = name.split(".")
        table = nested
        for key in tables:
            table = table.setdefault(key, {})
        table[leaf] = value
    return build_config(merge(values, nested), source)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The TOML file at `path` as nested dicts, its keys and types checked against TrainConfig; raises ConfigError."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {name}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be read") from None
    except ValueError as error:  # also a NUL in the path, a number of thousands of digits
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    return _checked(TrainConfig, values, "", name)


_RENAMED = {
    "moe.rows": "moe.dispatch_codec",
    "moe.windows": "moe.overlap_grad_reduce",
    "moe.swap_when": "moe.swap_policy (pays: cost_aware, shorter: always)",
    "moe.balance_coef": "moe.router_aux_loss_coef",
    "moe.z_coef": "moe.router_z_loss_coef",
}
"""Settings that had another name before."""


def build_config(values: Mapping[str, Any], source: str | None = None) -> TrainConfig:
    """TrainConfig from nested mappings; `source` is the file that messages name. Raises ConfigError."""
    return _build(TrainConfig, _checked(TrainConfig, values, "", source))


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top` over it, table by table; neither argument is changed."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def save_config(config: TrainConfig, path: str | os.PathLike[str]) -> None:
    """Write `config` as TOML so that `load_config(path) == config`; the file appears whole or not at all."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(dump_config(config), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the configuration {target}: {error.strerror}") from None


def dump_config(config: TrainConfig) -> str:
    """`config` as TOML text, each field under its documentation; a field that is None is left out and says so."""
    return "\n".join(_dump(config, "")) + "\n"


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, as one line of text; empty where the source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known dotted name nearest to `name`, or an empty string.

    A name may be an old one, misspelt, or right but in the wrong table: its own table is searched first, then the
    others.
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


def _known_names(cls: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(cls)
    names = []
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        names.append(name)
        if dataclasses.is_dataclass(hints[field.name]):
            names += _known_names(hints[field.name], name + ".")
    return names


def _checked(cls: type, values: Mapping[str, Any], prefix: str, source: str | None) -> dict[str, Any]:
    """`values` with every key known to `cls` and every value of its field's type, tables included."""
    where = f" in {source}" if source else ""
    hints = get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        if key not in fields:
            hint = nearest(name, _known_names(TrainConfig)) or f"; known keys here: {', '.join(sorted(fields))}"
            raise ConfigError(f"unknown key {name}{where}{hint}")
        checked[key] = _converted(value, hints[key], name, source)
    return checked


def _converted(value: Any, hint: Any, name: str, source: str | None) -> Any:
    """`value` as the type `hint` of field `name`; raises ConfigError naming field, value and expected type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return _checked(hint, value, name + ".", source)
    elif get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not NoneType)
        return _converted(value, inner, name, source)
    elif get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
    elif get_origin(hint) is tuple:
        item_type = get_args(hint)[0]
        if isinstance(value, list | tuple) and all(type(item) is item_type for item in value):
            return tuple(value)
    elif get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif hint is float:
        if type(value) in (int, float):
            try:
                return float(value)
            except OverflowError:
                pass  # an integer beyond all floats
    elif type(value) is hint:
        return value
    where = f" in {source}" if source else ""
    raise ConfigError(f"{name}{where} is {shown(value)}, but it must be {_expected(hint)}")


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return 'a list of strings, e.g. ["corpus/"]' if get_args(hint)[0] is str else "a list of integers, e.g. [3, 2]"
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return "a table"
    names = {
        bool: "true or false",
        int: "an integer (without quotes or decimal point)",
        float: "a number",
        str: "a string",
    }
    return names[hint]


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    built = {
        key: _build(hints[key], value) if dataclasses.is_dataclass(hints[key]) else value
        for key, value in values.items()
    }
    return cls(**built)


def _dump(config: Any, prefix: str) -> list[str]:
    """Lines of one table: its own fields first, then the tables inside it, as TOML asks."""
    cls: type = type(config)
    docs = field_docs(cls)
    lines: list[str] = []
    tables: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{prefix}{field.name}]", *_dump(value, f"{prefix}{field.name}.")]
            continue
        comment = [f"# {line}" for line in textwrap.wrap(docs.get(field.name, ""), 98)]
        if value is None:
            lines += [*comment, f"# {field.name}: not set"]
        elif isinstance(value, dict):
            if value:
                nested: dict[str, Any] = {field.name: value}
                for table in reversed(prefix.split(".")[:-1]):
                    nested = {table: nested}
                tables += ["", *comment, _toml(nested, prefix + field.name)]
        else:
            lines += [*comment, _toml({field.name: list(value) if isinstance(value, tuple) else value}, prefix)]
    return lines + tables


def _toml(values: Mapping[str, Any], name: str) -> str:
    try:
        return tomli_w.dumps(values).rstrip("\n")
    except TypeError as error:
        raise ConfigError(f"{name} cannot be written as TOML: {error}") from None
