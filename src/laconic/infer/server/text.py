"""Strings that stop an answer, found in its text as it comes."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Cuts a text, which comes in pieces, before the first stop string to be complete; none of these is empty.

    Of several that end at the same character, the longest counts. The result does not depend on where pieces are cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._passed = 0  # characters of what is held where no stop string may end

    def push(self, piece: str, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that belongs to the answer for certain, and whether a stop string has been found after it.

        With `may_end` false none may be complete in this piece; one may begin in any case.
        """
        text = self._held + piece
        if not may_end:
            self._passed = len(text)
        starts = [(text.find(stop, max(0, self._passed + 1 - len(stop))), stop) for stop in self._stops]
        if found := [(start + len(stop), start) for start, stop in starts if start >= 0]:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        self._passed = max(0, self._passed - len(text) + held)
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return what was held back as the possible beginning of a stop string."""
        rest, self._held = self._held, ""
        return rest


def cut_at(text: str, tag: str) -> tuple[str, str, str | None]:
    """Cut a text at the first `tag`.

    Returns what stands before it for certain, what may be its beginning, and what follows it; None if it is not there.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, "", after
    length = len(text) - _overlap(text, tag)
    return text[:length], text[length:], None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
