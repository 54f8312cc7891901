"""Files that somebody has changed, cut short or taken from elsewhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

__all__ = ["damaged_texts", "damaged_values"]

_FOREIGN: tuple[Any, ...] = (None, True, -1, 0.5, 2**70, float("nan"), float("inf"), "?", [], [[]], {}, {"?": 1})


def damaged_values(value: Any, per_list: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield, with words for it, copies of a JSON value in which one part is missing or is something else.

    `per_list`: parts of a list or table that are damaged inside, at most.
    """
    for other in _FOREIGN:
        yield f"= {other!r}", other
    places: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    for number, place in enumerate(places):
        without = copy.copy(value)
        del without[place]
        yield f"without {place!r}", without
        if number < per_list or isinstance(value, dict):
            for words, part in damaged_values(value[place], per_list):
                yield (
                    f"[{place!r}] {words}",
                    {**value, place: part}
                    if isinstance(value, dict)
                    else [
                        *value[:place],
                        part,
                        *value[place + 1 :],
                    ],
                )


def damaged_texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts of damaged values, and texts that are no JSON."""
    text = json.dumps(value)
    yield "empty", ""
    yield "cut", text[: len(text) // 2]
    yield "twice", text + text
    yield "zeros", "\0" * len(text)
    yield "nested", "[" * 100_000
    for words, other in damaged_values(value):
        yield words, json.dumps(other)
