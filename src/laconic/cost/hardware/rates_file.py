"""Files of measured rates: JSON written whole, in the user's cache or at a given path, every value checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from laconic.cache_folder import cache_folder, is_homeless
from laconic.durable import write_whole
from laconic.errors import ConfigError
from laconic.json_text import parse_json, read_record

T = TypeVar("T")

_OPTIONAL = ("device", "layout", "hosts", "source")
"""Fields that a file may leave out: where and how it was measured."""


def cached_path(variable: str, name: str) -> Path:
    """The file that an environment variable names, or laconic/NAME in $XDG_CACHE_HOME (~/.cache)."""
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen)
    return cache_folder() / name


def save_json(values: Any, path: str | Path) -> None:
    """Write values as JSON, whole or not at all."""
    path = Path(path)
    if is_homeless(path):
        raise ConfigError(f"cannot write {path}: this user has no home directory; set HOME, or name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=1) + "\n")


def load_json(path: str | Path, noun: str, read: Callable[[Any], T], remedy: str) -> T:
    """Read a file of rates.

    Args:
        noun: what errors call it.
        read: turns the JSON values into the result.
        remedy: how such a file is made.
    """
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{noun} are {str(path)!r}, but it must be a file: {error}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{noun} {path} are not JSON: {error}; {remedy}") from error
    try:
        return read(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_format(data: Any, name: str, version: int, remedy: str = "measure with laconic profile") -> dict[str, Any]:
    """The values beside format and version of a table of the format `name` in this version."""
    if not isinstance(data, dict) or data.get("format") != name:
        raise ConfigError(f"this is no {name} file; {remedy}")
    if data.get("version") != version:
        raise ConfigError(
            f"version is {data.get('version')!r}, but this laconic reads version {version} of {name}; {remedy}"
        )
    return {key: value for key, value in data.items() if key not in ("format", "version")}


def read_rates(cls: type[T], data: Any, name: str, version: int, remedy: str = "measure with laconic profile") -> T:
    """Read rates of a format and version from JSON values."""
    values, known = check_format(data, name, version, remedy), [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if (other := next((name for name in values if name not in known), None)) is not None:
        raise ConfigError(f"{other} is not known here; {remedy}")
    try:
        return read_record(cls, values, _OPTIONAL)
    except ValueError as error:
        raise ConfigError(f"{error}; {remedy}") from None
