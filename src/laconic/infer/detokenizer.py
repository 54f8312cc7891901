"""Text of tokens as they come, equal in the end to the tokenizer's own `decode` of all of them.

A tokenizer of the `tokenizers` package decodes in stages, each of which takes the list of strings that the one before
returns. What a later token can still change differs from stage to stage: a run of byte tokens becomes U+FFFD as a whole
if one of them fits no character, the last subword loses its end mark, a stripping stage looks at the end of the text.
So every stage here gives out only what is certain and keeps the rest; no text is decoded twice.

A decoder with a stage that is unknown here keeps that stage's whole input, and its text comes at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

_BYTE = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_UNFINISHED_CONTRACTION = re.compile(r" [ n']*[vr]?$")
_PRIMER = "\0"  # stands before a token whose text amid a sentence is wanted


class DecodingStage(Protocol):
    """A stage of decoding: strings in, strings that no later one can change out."""

    def push(self, element: str) -> Iterable[str]:
        """Take the next string."""

    def flush(self) -> Iterable[str]:
        """Return what was kept, at the end."""
        return ()


class Detokenizer:
    """Turns tokens into text by stages, for one text alone; `name` returns a token's string, None leaves it out."""

    def __init__(self, name: Callable[[int], str | None], stages: Sequence[DecodingStage]) -> None:
        self._name, self._stages = name, stages

    def push(self, token: int) -> str:
        """Take a token and return the text that is certain now."""
        name = self._name(token)
        return "" if name is None else "".join(_push(self._stages, [name]))

    def flush(self) -> str:
        """Return what was kept, at the end."""
        return "".join(_flush(self._stages))


def _push(stages: Iterable[DecodingStage], elements: list[str]) -> list[str]:
    for stage in stages:
        elements = [out for element in elements for out in stage.push(element)]
    return elements


def _flush(stages: Iterable[DecodingStage]) -> list[str]:
    rest: list[str] = []
    for stage in stages:
        rest = [*_push([stage], rest), *stage.flush()]
    return rest


def token_bytes(name: str, stages: Sequence[DecodingStage]) -> bytes:
    """Return the bytes that a token's string adds to a text that has begun."""
    for stage in stages:
        if isinstance(stage, _ByteFallback) and _BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if isinstance(stage, _ByteLevel) and stage is stages[0]:
            return stage.bytes_of(name)
    text = "".join([*_push(stages, [_PRIMER]), *_push(stages, [name]), *_flush(stages)])
    return text.removeprefix(_PRIMER).encode()


def byte_stages() -> list[DecodingStage]:
    """Return the stages of tokens that are characters U+0000 to U+00FF, each for a byte."""
    return [_ByteLevel({chr(number): number for number in range(256)})]


def decoder_stages(state: Any, clean_up: Callable[[str], str] | None) -> list[DecodingStage]:
    """Return the stages of a decoder, as the file of a tokenizer holds it, for one text; None joins tokens with spaces.

    `clean_up` is what transformers' `clean_up_tokenization` does to the whole text; None leaves it.
    """
    stages: list[DecodingStage] = []
    is_one_text = state is None
    for each in _flat(state):
        stages.append(_stage(each, is_one_text))
        is_one_text = is_one_text or each["type"] in ("Fuse", "ByteLevel")
    if state is None:
        stages.append(_Join())
    if clean_up is not None:
        stages.append(_CleanUp(clean_up))
    return stages


def whole_stages(decode: Callable[[list[int]], str]) -> list[DecodingStage]:
    """Return the stages of a tokenizer of which nothing but its `decode` is known; their strings are numbers."""
    return [_Whole(lambda elements: decode([int(element) for element in elements]))]


def keeps_all(stages: Iterable[DecodingStage]) -> bool:
    """Return whether the text comes at the end alone."""
    return any(isinstance(stage, _Whole) for stage in stages)


def _flat(state: Any) -> list[Any]:
    if state is None:
        return []
    return [inner for part in state["decoders"] for inner in _flat(part)] if state["type"] == "Sequence" else [state]


def _stage(state: Any, is_one_text: bool) -> DecodingStage:
    """Return a stage; with `is_one_text`, what it takes are pieces of one string."""
    kind = state["type"]
    if kind == "Fuse":
        return _Each(str)
    literal = state["pattern"].get("String") if kind == "Replace" else None
    if literal and (not is_one_text or len(literal) == 1):
        content = state["content"]
        return _Each(lambda element: element.replace(literal, content))
    if is_one_text and literal:
        return _ReplaceInText(literal, state["content"])
    if is_one_text and kind == "Strip":
        return _StripText(state["content"], state["start"], state["stop"])
    decode = _decode_by(json.dumps(state))
    if is_one_text:
        return _Whole(lambda pieces: decode(["".join(pieces)]))
    match kind:
        case "Replace" | "Strip":
            return _Each(lambda element: decode([element]))
        case "WordPiece" | "Metaspace":
            return _Each(lambda element: decode(["", element]), first=lambda element: decode([element]))
        case "BPEDecoder":
            return _LastDiffers(lambda element: decode([element, ""]), lambda element: decode([element]))
        case "CTC":
            return _Distinct(lambda element: decode([element]))
        case "ByteFallback":
            return _ByteFallback()
        case "ByteLevel":
            return _ByteLevel(_byte_level_alphabet())
    return _Whole(decode)


@cache
def _decode_by(state: str) -> Callable[[list[str]], str]:
    """Return the `decode` of a stage alone, by the package itself."""
    from tokenizers import Tokenizer

    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    made = Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": json.loads(state), "model": model} | nothing)
    )
    decode: Callable[[list[str]], str] = made.decoder.decode
    return decode


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Characters that stand for bytes: printable ones of Latin-1 for themselves, U+0100 and on for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class _Each(DecodingStage):
    """One string for each, whatever stands around it, but for the first."""

    def __init__(self, function: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        self._function, self._first = function, first

    def push(self, element: str) -> Iterable[str]:
        function, self._first = self._first or self._function, None
        return (function(element),)


class _LastDiffers(DecodingStage):
    """One string for each, another for the last: the last is kept until it is none."""

    def __init__(self, function: Callable[[str], str], last: Callable[[str], str]) -> None:
        self._function, self._last = function, last
        self._kept: str | None = None

    def push(self, element: str) -> Iterable[str]:
        kept, self._kept = self._kept, element
        return () if kept is None else (self._function(kept),)

    def flush(self) -> Iterable[str]:
        return () if self._kept is None else (self._last(self._kept),)


class _Distinct(DecodingStage):
    """One string for each that differs from the one before, unless it is empty."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function
        self._before: str | None = None

    def push(self, element: str) -> Iterable[str]:
        if element == self._before:
            return ()
        self._before = element
        text = self._function(element)
        return (text,) if text else ()


class _ByteFallback(DecodingStage):
    """A run of byte tokens is a text, or as many U+FFFD: it is kept to its end."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, element: str) -> Iterable[str]:
        if _BYTE.fullmatch(element):
            self._run.append(int(element[3:5], 16))
            return ()
        return (*self.flush(), element) if self._run else (element,)

    def flush(self) -> Iterable[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return ()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


class _ByteLevel(DecodingStage):
    """Characters stand for bytes; a string with another character stands for itself."""

    def __init__(self, alphabet: dict[str, int]) -> None:
        self._alphabet = alphabet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def bytes_of(self, element: str) -> bytes:
        try:
            return bytes([self._alphabet[character] for character in element])
        except KeyError:
            return element.encode()

    def push(self, element: str) -> Iterable[str]:
        return (self._decoder.decode(self.bytes_of(element)),)

    def flush(self) -> Iterable[str]:
        return (self._decoder.decode(b"", final=True),)


class _Join(DecodingStage):
    """Strings with a space between."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, element: str) -> Iterable[str]:
        separator, self._separator = self._separator, " "
        return (separator + element,)


class _ReplaceInText(DecodingStage):
    """A string replaced throughout a text; what may be its beginning is kept."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._kept = ""

    def push(self, element: str) -> Iterable[str]:
        *before, last = (self._kept + element).split(self._pattern)
        beginnings = range(min(len(last), len(self._pattern) - 1), 0, -1)
        length = next((n for n in beginnings if last.endswith(self._pattern[:n])), 0)
        self._kept = last[len(last) - length :]
        return (self._content.join([*before, last[: len(last) - length]]),)

    def flush(self) -> Iterable[str]:
        return (self._kept,)


class _StripText(DecodingStage):
    """A character cut from both ends of a text, so many times at most; those at the end are kept."""

    def __init__(self, character: str, start: int, stop: int) -> None:
        self._character, self._start, self._stop = character, start, stop
        self._kept = ""

    def push(self, element: str) -> Iterable[str]:
        text = self._kept + element
        while self._start and text:
            if not text.startswith(self._character):
                self._start = 0
                break
            text, self._start = text[1:], self._start - 1
        length = min(self._stop, len(text) - len(text.rstrip(self._character)))
        self._kept = text[len(text) - length :]
        return (text[: len(text) - length],)


class _CleanUp(DecodingStage):
    """transformers' clean-up of English: takes the space before marks and contractions.

    All that it replaces begins with a space and has no other character than those of the pattern before its last, so
    an end of a text that could begin such a string is kept.
    """

    def __init__(self, clean_up: Callable[[str], str]) -> None:
        self._clean_up = clean_up
        self._kept = ""

    def push(self, element: str) -> Iterable[str]:
        text = self._kept + element
        unfinished = _UNFINISHED_CONTRACTION.search(text)
        end = len(text) if unfinished is None else unfinished.start()
        self._kept = text[end:]
        return (self._clean_up(text[:end]),)

    def flush(self) -> Iterable[str]:
        return (self._clean_up(self._kept),)


class _Whole(DecodingStage):
    """Everything is kept to the end."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._elements: list[str] = []

    def push(self, element: str) -> Iterable[str]:
        self._elements.append(element)
        return ()

    def flush(self) -> Iterable[str]:
        return (self._decode(self._elements),)
