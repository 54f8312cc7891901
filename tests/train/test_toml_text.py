"""Reading TOML takes work in proportion to its length, and what would not is refused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from laconic.cli.flags import _toml_value
from laconic.errors import ConfigError, LaconicError
from laconic.train.config.toml import load_config, read_toml
from laconic.train.config.toml_text import MAX_KEY_PARTS, parse_toml
from laconic.train.report.run_reader import _load_run


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that a call runs: seconds without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def read(path: Path, text: str) -> None:
    path.write_text(text)
    with contextlib.suppress(ConfigError):
        load_config(path)


SHAPES: dict[str, Callable[[int], str]] = {
    "a dotted key": lambda n: ".".join(["a"] * n) + " = 1",
    "a dotted key with spaces": lambda n: " . ".join(["a"] * n) + " = 1",
    "a dotted key of quoted parts": lambda n: ".".join(['"a.b"'] * n) + " = 1",
    "a header": lambda n: "[" + ".".join(["a"] * n) + "]",
    "an array's header": lambda n: "[[" + ".".join(["a"] * n) + "]]",
    "a key of an inline table": lambda n: "[model]\nextra = {" + ".".join(["a"] * n) + " = 1}",
    "a field of model.extra": lambda n: "model.extra." + ".".join(["a"] * n) + " = 1",
    "many keys": lambda n: "\n".join(f"key{i} = 1" for i in range(n // 3)),
    "many tables": lambda n: "\n".join(f"[t{i}]" for i in range(n // 3)),
    "many deep keys": lambda n: "\n".join(".".join(["a"] * 30) + f".x{i} = 1" for i in range(n // 30)),
    "many fields": lambda n: "[model.extra]\n" + "\n".join(f"x{i} = 1.5" for i in range(n // 3)),
    "lists": lambda n: "data.paths = [" + ", ".join(["'a.b'"] * n) + "]",
    "lists in lists": lambda n: "x = " + "[" * n + "]" * n,
    "strings with dots": lambda n: 'task = """' + "a." * n + '"""',
    "comments with dots": lambda n: "steps = 5 # " + "a." * n,
    "open strings": lambda n: 'task = "' * n,
    "open long strings": lambda n: "'''\"\"\"" * n,
    "dots": lambda n: "." * n,
}


@pytest.mark.parametrize("name", SHAPES)
def test_twice_the_text_is_twice_the_work(name: str, tmp_path: Path) -> None:
    read(tmp_path / "warm.toml", SHAPES[name](50))  # what is imported or kept at the first use
    few, many = (lines_run(lambda n=n: read(tmp_path / "c.toml", SHAPES[name](n))) for n in (600, 2400))
    # 4 times the text; 16 times the work where it grows by the square. Some thousand lines do not depend on the text.
    assert many < 6 * few + 3000, (few, many)


@pytest.mark.parametrize("parts", [MAX_KEY_PARTS, MAX_KEY_PARTS + 1, 20_000])
def test_every_reader_refuses_keys_of_too_many_parts(parts: int, tmp_path: Path) -> None:
    text = ".".join(["a"] * parts) + " = 1"
    file = tmp_path / "config.toml"
    file.write_text("[model.extra]\n" + text)
    if parts <= MAX_KEY_PARTS:
        assert parse_toml(text)
        assert read_toml(file)
        return
    with pytest.raises(ConfigError, match=r"nested too deeply to be read: a key in line 2 has more than 32 parts"):
        read_toml(file)
    with pytest.raises(ConfigError, match="nested too deeply"):
        _toml_value("{" + text + "}")
    with pytest.raises(LaconicError, match="more than 32 parts"):
        _load_run(tmp_path, "run")
