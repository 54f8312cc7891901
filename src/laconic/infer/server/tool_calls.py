"""Calls of tools, found in the text of an answer as it comes.

How a model writes a call depends on its family. The names of the formats are vLLM's:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several times; Hermes, Qwen
    llama3_json  {"name": ..., "parameters": {...}} as the whole answer, several joined by ";"; Llama 3
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]NAME{...}; Mistral

What looks like a call and is none stays part of the text: nothing of an answer is lost.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from laconic.infer.server.text import cut_at
from laconic.json_text import parse_json

_TOOL_CALLS = "[TOOL_CALLS]"


def read_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none, or would change or fail where it is written again."""
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no half of a character
    except ValueError:
        return None
    return value


@dataclass(frozen=True)
class CallDelta:
    """What a piece of text adds to the call `index` of an answer.

    `name` is that of its function in its first delta, None later; `arguments` are JSON, to append.
    """

    index: int
    name: str | None
    arguments: str


Found = Iterator[str | CallDelta]


class ToolParser(ABC):
    """Parts the text of one answer into text and calls. One object for each answer.

    `push` and `flush` together give the same for a text, wherever it is cut.

    Attributes:
        marker: a special token, if a format has one, that is to be in the text though others are not.
        nine_letter_ids: whether the family's chat templates take no other ids of calls.
    """

    marker: str | None = None
    nine_letter_ids = False

    def __init__(self) -> None:
        self._count = 0

    @abstractmethod
    def push(self, text: str) -> Found:
        """Take a piece of text."""

    @abstractmethod
    def flush(self) -> Found:
        """Take the end."""

    def _call(self, call: tuple[str, str]) -> CallDelta:
        self._count += 1
        return CallDelta(self._count - 1, *call)


class _Collecting(ToolParser):
    """Keeps a text from where it can be calls, and reads it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = ""
        self._is_text = False

    def push(self, text: str) -> Found:
        if self._is_text:
            yield text
            return
        self._kept += text
        if not self._may_be_calls(self._kept):
            self._is_text = True
            yield self._kept

    def flush(self) -> Found:
        if self._is_text:
            return
        calls = self._read(self._kept)
        if calls:
            yield from map(self._call, calls)
        elif self._kept:
            yield self._kept

    @abstractmethod
    def _may_be_calls(self, text: str) -> bool:
        """Return whether a text can begin calls."""

    @abstractmethod
    def _read(self, text: str) -> list[tuple[str, str]]:
        """Return the calls of a text, as names and arguments; empty if it is anything else."""


class _HermesCalls(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self._kept, self._space = "", ""
        self._is_inside = False

    def push(self, text: str) -> Found:
        rest: str | None = self._kept + text
        while rest is not None:
            before, self._kept, rest = cut_at(rest, "</tool_call>" if self._is_inside else "<tool_call>")
            if not self._is_inside:
                yield from self._text(before)
            elif rest is None:
                self._kept = before + self._kept
            else:
                yield from self._end(before, "</tool_call>")
            if rest is not None:
                self._is_inside = not self._is_inside

    def flush(self) -> Found:
        if self._is_inside:
            yield from self._end(self._kept, "")  # some models leave the last tag out
        else:
            yield from self._text(self._kept)
        if self._space and not self._count:
            yield self._space

    def _text(self, text: str) -> Found:
        """Give text, without the space around calls."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            yield kept

    def _end(self, inside: str, tag: str) -> Found:
        call = _read_call(read_json(inside))
        if call is None:
            yield from self._text(f"<tool_call>{inside}{tag}")
        else:
            self._space = ""
            yield self._call(call)


class _LlamaCalls(_Collecting):
    def _may_be_calls(self, text: str) -> bool:
        text = text.lstrip()
        return text.startswith("{") or _PYTHON_TAG.startswith(text[: len(_PYTHON_TAG)])

    def _read(self, text: str) -> list[tuple[str, str]]:
        calls, rest = [], text.strip().removeprefix(_PYTHON_TAG)
        while rest := rest.lstrip("; \n\t"):
            try:
                _, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            if (call := _read_call(read_json(rest[:end]))) is None:
                return []
            calls.append(call)
            rest = rest[end:]
        return calls


_PYTHON_TAG = "<|python_tag|>"


class _MistralCalls(ToolParser):
    marker = _TOOL_CALLS
    nine_letter_ids = True

    def __init__(self) -> None:
        super().__init__()
        self._kept = ""
        self._is_inside = False

    def push(self, text: str) -> Found:
        self._kept += text
        if not self._is_inside:
            before, self._kept, rest = cut_at(self._kept, _TOOL_CALLS)
            if before:
                yield before
            if rest is not None:
                self._is_inside, self._kept = True, rest

    def flush(self) -> Found:
        calls = self._read() if self._is_inside else []
        if calls:
            yield from map(self._call, calls)
        elif rest := _TOOL_CALLS * self._is_inside + self._kept:
            yield rest

    def _read(self) -> list[tuple[str, str]]:
        if self._kept.lstrip().startswith("["):
            return _read_list(self._kept)
        found = []
        for each in self._kept.split(_TOOL_CALLS):
            name, brace, arguments = each.replace("[ARGS]", "").partition("{")
            if not isinstance(read_json(brace + arguments), dict) or not name.strip():
                return []
            found.append((name.strip(), (brace + arguments).strip()))
        return found


class NamedCall(ToolParser):
    """An answer that is the arguments of the function `name`, as a grammar has made it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name: str | None = name

    def push(self, text: str) -> Found:
        if text:
            yield CallDelta(0, self._name, text)
            self._name = None

    def flush(self) -> Found:
        return iter(())


class RequiredCalls(_Collecting):
    """An answer that is a list of calls, as a grammar has made it."""

    def _may_be_calls(self, text: str) -> bool:
        return True

    def _read(self, text: str) -> list[tuple[str, str]]:
        return _read_list(text)


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": _HermesCalls,
    "llama3_json": _LlamaCalls,
    "mistral": _MistralCalls,
}
"""Parsers of formats, by their names."""


def _read_list(text: str) -> list[tuple[str, str]]:
    """Return the calls of a list in JSON; none if it is anything else."""
    listed = read_json(text)
    calls = [_read_call(each) for each in listed] if isinstance(listed, list) else []
    return [] if None in calls else [call for call in calls if call is not None]


def _read_call(value: Any) -> tuple[str, str] | None:
    """Return name and arguments of a call; None if it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and isinstance(read_json(arguments), dict):
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
