"""Routes as text."""

from __future__ import annotations

import pytest

from laconic.cost.moe.routes import Route, Step
from laconic.cost.moe.routes_text import parts_of, routes_text
from laconic.errors import ConfigError

EXPERTS = Step("experts", 4e-3)
SLOW = Route("slow", (Step("dispatch", 3e-3, "ep", "all_to_all", 3e6), EXPERTS, Step("order", 1e-3)))
FAST = Route(
    "fast",
    (Step("dispatch", 2e-3, "ep", "all_to_all", 2e6), EXPERTS, Step("gather", 1e-3, "mp", "all_gather", 1e6)),
    overlapped_seconds=2.5e-3,
    degree=4,
)


def test_parts_add_up() -> None:
    assert parts_of(FAST) == {
        "all-to-all": 2e-3,
        "other collectives": 1e-3,
        "experts": 4e-3,
        "within the rank": 0.0,
        "unexplained": 0.0,
        "overlapped": -2.5e-3,
    }
    for route in (SLOW, FAST):
        assert sum(parts_of(route).values()) == pytest.approx(route.seconds)


def test_the_table_begins_with_the_fastest_and_says_why() -> None:
    text = routes_text([SLOW, FAST], "a layer")
    assert text.startswith("a layer\n\nroute")
    lines = text.splitlines()
    assert lines[4].split() == [
        "fast", "4", "2", "ms", "1", "ms", "4", "ms", "-", "-2.5", "ms", "4.5", "ms", "3.00", "MB", "1.00x",
    ]  # fmt: skip
    assert lines[5].startswith("slow")
    assert lines[5].endswith("1.78x")
    assert lines[-1] == "choice: fast: 3.5 ms less than slow, mostly because 2.5 ms more is overlapped"


def test_reasons_name_the_part_that_gains_most() -> None:
    whole = Route("whole", FAST.steps)
    cheaper = Route("cheaper", (Step("dispatch", 1e-3, "ep", "all_to_all"), *FAST.steps[1:]))
    assert routes_text([whole, cheaper]).endswith("mostly because of 1 ms less for all-to-all")
    assert routes_text([whole]).endswith("choice: whole: there is no other")
    assert routes_text([whole, Route("twin", whole.steps)]).endswith("choice: whole: none is faster")
    with pytest.raises(ConfigError, match="routes are empty"):
        routes_text([])
