"""Whatever is wrong with JSON from outside is a ValueError."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.json_text import parse_json, read_record

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False)


@settings(max_examples=50)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_values_come_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        b"\xff",
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
        "1" + "0" * 400,
        "-1" + "0" * 5000,
        "[1e400]",
        '[{"a": 1, "a": 1}]',
    ],
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@dataclass(frozen=True)
class Part:
    seconds: float
    source: str = "none"
    lost: float = 0.0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds is {self.seconds}, but it must not be negative")


@dataclass(frozen=True)
class Whole:
    parts: list[Part]
    name: str = field(default="")


PART = {"seconds": 1.0, "source": "a", "lost": 0.5}


@pytest.mark.parametrize("part", [PART, PART | {"more": 1}, {"seconds": 1.0, "lost": 0.5}])
def test_a_record_may_lack_what_is_optional_and_have_other_names(part: dict[str, Any]) -> None:
    found = read_record(Whole, {"parts": [part], "name": "", "further": 2}, optional=("source",))
    assert found == Whole([Part(1.0, part.get("source", "none"), 0.5)])


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"seconds": 1.0, "source": "a"}, "parts.0.lost is missing"),
        ({"seconds": 1.0, "sauce": "a", "lost": 0.5}, "parts.0.sauce is not known here"),
        (PART | {"lost": float("nan")}, "parts.0.lost is nan, but it must be a finite number that a float holds"),
        (PART | {"lost": float("inf")}, "parts.0.lost is inf, but it must be a finite number that a float holds"),
        (PART | {"seconds": -1.0}, "parts.0: seconds is -1.0, but it must not be negative"),
        (PART | {"source": {1}}, "Object of type set is not JSON serializable"),
    ],
)
def test_a_wrong_record_is_refused_by_its_field(part: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        read_record(Whole, {"parts": [part], "name": ""}, optional=("source",))


def test_whole_numbers_cost_no_calls() -> None:
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        parse_json(b"[" + b"7, " * 1000 + b"7]")
    finally:
        sys.setprofile(None)
    assert len(calls) < 50
