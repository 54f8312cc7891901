"""Every setting with every kind of value that somebody may give it: a valid configuration, or one clear refusal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laconic.cli.train import resolve
from laconic.errors import ConfigError, LaconicError
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import build_config, dump_config, load_config, read_toml


def fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every setting."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from fields(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hint


FIELDS = dict(fields(TrainConfig))
DEEP: Any = []
for _ in range(3000):
    DEEP = [DEEP]

numbers = st.sampled_from(
    [
        *(math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -0.0, 1.5, 0, 1, -1, 2**31, 2**63, 2**64),
        *(-(2**63), 10**30, -(10**30), 10**400, True, False),
    ]
)
strings = st.sampled_from(["", "nan", "\ud800", "a\udcffb", "a\0b", "\n", "x" * 100_000, "None", "../..", "\u202e"])
things = st.sampled_from([None, [], {}, (), [None], ["\ud800"], [10**30], {"a": {"b": math.nan}}, DEEP, object(), b"x"])
hostile = numbers | strings | things | st.text(max_size=20) | st.floats() | st.integers()


def nested(name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@settings(max_examples=600)
@given(name=st.sampled_from(sorted(FIELDS)), value=hostile)
@example(name="optimizer.weight_decay", value=math.inf)
@example(name="seed", value=10**30)
@example(name="run_dir", value="runs/\udcff")
@example(name="rank_timeout_seconds", value=math.inf)
@example(name="optimizer.eps", value=math.inf)
def test_a_setting_is_valid_or_refused_by_name(name: str, value: Any) -> None:
    try:
        config = build_config(nested(name, value))
    except ConfigError as error:
        message = str(error)
    else:
        # What is accepted is a run's: it can be written down, and is the same when it is read.
        check_valid(config)
        return
    # Some rules are those of another field, which names this one.
    assert name in message or name.rpartition(".")[2] in message
    assert len(message) < 1000
    message.encode()  # no lone surrogate, which a log could not hold


def check_valid(config: TrainConfig) -> None:
    text = dump_config(config)
    text.encode()
    for field, hint in FIELDS.items():
        value: Any = config
        for key in field.split("."):
            value = getattr(value, key)
        if hint is float:
            assert math.isfinite(value), field
        if hint is int:
            assert abs(value) < 2**63, field


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(set(FIELDS) - {"model.extra"})),
    value=strings | numbers.map(str),
)
def test_a_flag_is_valid_or_refused(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    try:
        config, _ = resolve([f"{flag}={value}"])
    except (LaconicError, SystemExit):
        pass  # with one of these tyro has said what it expected
    else:
        check_valid(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("x = " + "{a = " * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("seed = " + "9" * 30, "seed is 9+, but it must fit into 64 bits"),
        ('run_dir = "\\u0000"', "run_dir is .*, but it must be UTF-8 text without NULs"),
        ("[optimizer]\nweight_decay = inf", "optimizer.weight_decay is inf, but it must be finite"),
        ("[model.extra]\na = " + "9" * 30, "model.extra.a is 9+, but it must fit into 64 bits"),
    ],
)
def test_a_file_of_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.toml")


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    for name in ("seed", "steps", "optimizer.eps", "model.family", "model.extra"):
        with pytest.raises(ConfigError, match="of type int, too large to show"):
            build_config(nested(name, {"a": 10**5000} if name == "model.extra" else 10**5000))


def test_a_flag_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        resolve(["--model.extra.x", "[" * 3000])


def test_a_file_that_is_not_one_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("a\0b"), Path("x" * 5000), tmp_path / "absent" / "\udcff"):
        with pytest.raises(ConfigError):
            read_toml(path)
