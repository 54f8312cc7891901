"""Files of measured rates: JSON written whole, in the user's cache or at a given path, every value checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from laconic.cache_folder import cache_folder, is_homeless
from laconic.durable import write_whole
from laconic.errors import ConfigError
from laconic.json_text import parse_json

T = TypeVar("T")


def cached_path(variable: str, name: str) -> Path:
    """The file that an environment variable names, or laconic/NAME in $XDG_CACHE_HOME (~/.cache)."""
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen)
    return cache_folder() / name


def save_json(values: Any, path: str | Path) -> None:
    """Write values as JSON, whole or not at all.

    Raises:
        ConfigError: the path is the default, but this user has no home directory.
    """
    path = Path(path)
    if is_homeless(path):
        raise ConfigError(f"cannot write {path}: this user has no home directory; set HOME, or name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=1) + "\n")


def load_json(path: str | Path, noun: str, read: Callable[[Any], T], remedy: str = "run laconic profile again") -> T:
    """Read a file of rates.

    Args:
        path: of the file.
        noun: what errors call it.
        read: turns the JSON values into the result.
        remedy: how such a file is made.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or `read` refuses it.
    """
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{noun} are {str(path)!r}, but it must be a file: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{noun} {path} are not JSON: {error}; {remedy}") from error
    try:
        return read(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_format(data: Any, name: str, version: int, remedy: str = "measure with laconic profile") -> None:
    """Check that `data` is a table of the format `name` in this version; `remedy` is how such a file is made.

    Raises:
        ConfigError: it is another format or version.
    """
    if not isinstance(data, dict) or data.get("format") != name:
        raise ConfigError(f"this is no {name} file; {remedy}")
    if data.get("version") != version:
        raise ConfigError(
            f"version is {data.get('version')!r}, but this laconic reads version {version} of {name}; {remedy}"
        )


def read_table(data: Any, name: str | None, where: str) -> dict[str, Any]:
    """The table `name` of `data`, or `data` itself.

    Raises:
        ConfigError: it is not a table.
    """
    inner = data.get(name) if isinstance(data, dict) and name is not None else None
    value = data if name is None else inner
    if not isinstance(value, dict):
        raise ConfigError(f"{name or where} is {value!r}, but it must be a table; run laconic profile again")
    return value


def read_number(data: Any, name: str, where: str, least: float = 0.0, most: float = math.inf) -> float:
    """The number `name` of `data`, finite and between `least` and `most`.

    Raises:
        ConfigError: it is not such a number.
    """
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most or value == math.inf:
        rule = f"between {least:g} and {most:g}" if most < math.inf else f"finite and at least {least:g}"
        raise ConfigError(f"{where}.{name} is {value!r}, but it must be a number {rule}; run laconic profile again")
    return float(value)


def check_known(found: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Check that all `found` names are `allowed`.

    Raises:
        ConfigError: one is not; the message names it and `where`.
    """
    allowed = list(allowed)
    for name in found:
        if name not in allowed:
            raise ConfigError(f"{where} names {name!r}, but it must be one of {', '.join(allowed)}")
