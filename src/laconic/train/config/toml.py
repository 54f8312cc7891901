"""Reads TOML files into the configuration tree of `laconic.train.config.schema`, and writes them.

Layers are merged as plain mappings, and the dataclasses are built once from the result: names and types are checked in
each file, ranges and rules in the merged values. Layers, weakest first: defaults, the config.toml of a resumed run, the
file given by `--config`, flags. Relative paths in a file are relative to the working directory, as in flags.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from laconic.durable import write_whole
from laconic.errors import ConfigError
from laconic.train.config.dotted_names import nested_settings
from laconic.train.config.schema import TrainConfig
from laconic.train.config.settings import field_docs, settings
from laconic.train.config.toml_text import TooDeepError, parse_toml
from laconic.train.config.values import RULES, refusal

_TREE = TypeAdapter(TrainConfig)


def load_config(path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Load the configuration in a TOML file, with `overrides` on top.

    Args:
        path: of the file; None for the defaults.
        overrides: values by dotted names, such as ``{"model.hidden_size": 256}``.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the message names the nearest known one), a value has
            the wrong type, or a rule is broken.
    """
    values = {} if path is None else read_toml(path)
    source = None if path is None else os.fspath(path)
    return build_config(merge(values, nested_settings(overrides or {})), source)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the TOML file at `path` as nested dicts, its keys and types checked against TrainConfig."""
    name = os.fspath(path)
    try:
        values = parse_toml(Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {name}: {error.strerror}") from None
    except TooDeepError as error:
        raise ConfigError(f"{name} is nested too deeply to be read: {error}") from None
    except ValueError as error:  # also a NUL in the path, a number of thousands of digits
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    try:
        _TREE.validate_python(values)
    except ValidationError as error:  # rules are checked when all layers are merged
        wrong = [one for one in error.errors() if one["type"] not in RULES]
        if wrong:
            raise refusal(wrong, TrainConfig, name) from None
    return values


def build_config(values: Mapping[str, Any], source: str | None = None) -> TrainConfig:
    """Build TrainConfig from nested mappings; `source` is the file that messages name.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or a rule is broken.
    """
    try:
        return _TREE.validate_python(dict(values))
    except ValidationError as error:
        raise refusal(error.errors(), TrainConfig, source) from None


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `top` over it, table by table; neither argument is changed."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def save_config(config: TrainConfig, path: str | os.PathLike[str]) -> None:
    """Write `config` as TOML so that `load_config(path) == config`; the file appears whole or not at all."""
    try:
        write_whole(Path(path), dump_config(config))
    except OSError as error:
        raise ConfigError(f"cannot write the configuration {path}: {error.strerror}") from None


def dump_config(config: TrainConfig) -> str:
    """Return `config` as TOML text, each field below its documentation; for a field that is None, a comment says so.

    Raises:
        ConfigError: a value cannot be written as TOML.
    """
    return "\n".join(_dump(config, "")) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configuration files: type, range, default and documentation of every field."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_TREE.json_schema()}
    sections = {one.kind.__name__: one.kind for one in settings(TrainConfig) if one.is_section}
    for name, table in [(TrainConfig.__name__, schema), *schema["$defs"].items()]:
        docs = field_docs(sections.get(name, TrainConfig))
        table["description"] = " ".join(table["description"].split())
        table.pop("title", None)
        for name, field in table["properties"].items():
            field.pop("title", None)
            if name in docs:
                field["description"] = docs[name]
            table["properties"][name] = ordered = dict(sorted(field.items()))
            ordered.setdefault("default", {})  # a table that is left out is one without any keys
    return schema


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
