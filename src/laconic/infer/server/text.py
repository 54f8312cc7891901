"""Text of tokens as they come: never part of a character, and nothing of a string that stops the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["IncrementalDecoder", "StopFinder"]

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the longest run of U+FFFD that further bytes can turn into a character


class IncrementalDecoder:
    """Turns tokens into text, piece by piece.

    Characters of several bytes may lie across tokens, and a tokenizer decodes an unfinished one as U+FFFD. Such an end
    of the text is held back until it is a character or cannot become one. Tokens are decoded together with those of the
    piece before, since many tokenizers decode the first token of a text differently.

    Args:
        decode: returns the text of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._tokens: list[int] = []
        self._given = 0  # characters of the text of _before + _tokens

    def push(self, token: int) -> str:
        """Take a token and return the text that is certain now."""
        self._tokens.append(token)
        text = self._decode(self._before + self._tokens)
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _LONGEST_CHARACTER)
        new = text[self._given : len(text) - unfinished]
        self._given += len(new)
        if not unfinished:
            self._before, self._tokens = self._tokens, []
            self._given = len(self._decode(self._before))
        return new

    def flush(self) -> str:
        """Return what was held back."""
        rest = self._decode(self._before + self._tokens)[self._given :]
        self._given += len(rest)
        return rest


class StopFinder:
    """Cuts a text, which comes in pieces, before the first stop string to be complete.

    Of several that end at the same character, the longest counts. The result does not depend on where pieces are cut.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take a piece of text.

        Returns:
            The text that belongs to the answer for certain, and whether a stop string has been found after it.
        """
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return what was held back as the possible beginning of a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
