"""Stop strings: the same text however the pieces fall."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from laconic.infer.server.text import StopFinder


def cut(text: str, stops: Sequence[str], least: int = 0) -> tuple[str, bool]:
    """The text before the first stop string to be complete behind `least`, character by character."""
    for end in range(least + 1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
    st.integers(0, 3),
)
def test_stop_strings_cut_wherever_pieces_end(text: str, stops: list[str], borders: list[int], free: int) -> None:
    """In the first `free` pieces none may be complete."""
    finder, found, stopped = StopFinder(stops), "", False
    places = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    least = places[min(free, len(places) - 1)]
    for number, (start, end) in enumerate(pairwise(places)):
        new, stopped = finder.push(text[start:end], number >= free)
        found += new
        assert cut(text, stops, least)[0].startswith(found)
        if stopped:
            break
    found += "" if stopped else finder.flush()
    assert (found, stopped) == cut(text, stops, least)


def test_text_that_can_be_no_stop_string_is_not_held_back() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ["xE", "N", "x", "EE", "ND."]] == [
        ("x", False),
        ("", False),
        ("ENx", False),
        ("E", False),
        ("", True),
    ]
