"""Tables as text."""

import pytest

from laconic.text_columns import columns


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    text = columns(["", "bytes", "note"], [["a", "12", ""], ["bcd", "3,456,789", "kept"]])
    assert text.splitlines() == [
        "         bytes  note",
        "--------------------",
        "a           12",
        "bcd  3,456,789  kept",
    ]


def test_columns_are_aligned_as_asked() -> None:
    rows = [["1", "2"]]
    assert columns(["aa", "bb"], rows, left=(), rule=False) == "aa  bb\n 1   2"
    assert columns(["aa", "bb"], rows, left="all", rule=False) == "aa  bb\n1   2"
    assert columns(["aa", "bb"], [], left=(1,)) == "aa  bb\n------"


def test_a_row_of_another_length_is_no_row() -> None:
    with pytest.raises(ValueError, match="zip"):
        columns(["a", "b"], [["1"]])
