"""Incremental decoding and stop strings: the same text however the pieces fall."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from laconic.infer.server.text import IncrementalDecoder, StopFinder
from laconic.infer.tokenizer import ByteTokenizer

ODD = "aé€😀\ufffd\u0301\r\n"


def pieces(tokens: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(ByteTokenizer().decode)
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@given(st.text(alphabet=st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=["Cs"]))))
def test_every_character_comes_once_and_whole(text: str) -> None:
    found = pieces(list(text.encode()))
    assert "".join(found) == text
    if "\ufffd" not in text:  # only this one is held back although it is whole
        ends = {len(text[:n].encode()) for n in range(1, len(text) + 1)}
        assert [bool(piece) for piece in found] == [n in ends for n in range(1, len(text.encode()) + 1)] + [False]


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_come_as_they_decode(content: bytes) -> None:
    found = pieces(list(content))
    assert "".join(found) == content.decode(errors="replace")


@given(st.lists(st.sampled_from([0xFF, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0x41, 256]), max_size=40))
def test_held_back_text_is_short(tokens: list[int]) -> None:
    decoder = IncrementalDecoder(ByteTokenizer().decode)
    given_before = ""
    for number, token in enumerate(tokens, 1):
        given_before += decoder.push(token)
        text = ByteTokenizer().decode(tokens[:number])
        assert text.startswith(given_before)
        assert len(text) - len(given_before) <= 4


def test_tokenizers_with_fallback_to_bytes_make_characters() -> None:
    """They decode every byte of an unfinished character as one U+FFFD, and drop the space before the first word."""
    words = {1000: "▁one", 1001: "▁two"}

    def decode(tokens: Sequence[int]) -> str:
        text, run = "", b""
        for token in [*tokens, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
            text += words.get(token, "") if token is not None else ""
        return text.replace("▁", " ").removeprefix(" ")

    decoder = IncrementalDecoder(decode)
    found = [decoder.push(token) for token in [1000, 1001, *"😀é".encode(), 1001]]
    assert found == ["one", " two", "", "", "", "😀", "", "é", " two"]
    assert decoder.flush() == ""


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string to be complete, character by character."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stop_strings_cut_wherever_pieces_end(text: str, stops: list[str], borders: list[int]) -> None:
    finder, found, stopped = StopFinder(stops), "", False
    places = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    for start, end in pairwise(places):
        new, stopped = finder.push(text[start:end])
        found += new
        assert cut(text, stops)[0].startswith(found)
        if stopped:
            break
    found += "" if stopped else finder.flush()
    assert (found, stopped) == cut(text, stops)


def test_text_that_can_be_no_stop_string_is_not_held_back() -> None:
    finder = StopFinder(["END"])
    assert [finder.push(piece) for piece in ["xE", "N", "x", "EE", "ND."]] == [
        ("x", False),
        ("", False),
        ("ENx", False),
        ("E", False),
        ("", True),
    ]
