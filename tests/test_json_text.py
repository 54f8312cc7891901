"""Whatever is wrong with JSON from outside is a ValueError."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.json_text import parse_json

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


def test_whole_numbers_cost_no_calls() -> None:
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        parse_json(b"[" + b"7, " * 1000 + b"7]")
    finally:
        sys.setprofile(None)
    assert len(calls) < 50
