"""Server-sent events of a streamed answer, as bytes."""

from __future__ import annotations

import json
import uuid
from typing import Any

from laconic.infer.server.generation import Part
from laconic.infer.server.replies import Reply

__all__ = ["PartFrames", "frame"]

_encode = json.JSONEncoder(separators=(",", ":")).encode


def frame(value: dict[str, Any]) -> bytes:
    """Return the event that carries a chunk of an answer, or an error."""
    return f"data: {_encode(value)}\n\n".encode()


class PartFrames:
    """The events of an answer's parts.

    Most parts are a piece of text and nothing else, and their events differ in that text alone. So those of a choice
    are cut once from the event of one such part, and only their text is encoded.

    Args:
        reply: of the answer.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._around_text: dict[int, tuple[str, str]] = {}

    def of(self, part: Part) -> bytes:
        """Return the events of a part, those of `reply.chunks(part)`; there may be none."""
        if self._reply.with_logprobs or part.finish_reason is not None or not part.text:
            return b"".join(frame(chunk) for chunk in self._reply.chunks(part))
        if (around := self._around_text.get(part.index)) is None:
            around = self._around_text[part.index] = self._cut(part.index)
        before, after = around
        return f"{before}{_encode(part.text)}{after}".encode()

    def _cut(self, index: int) -> tuple[str, str]:
        mark = uuid.uuid4().hex
        (chunk,) = self._reply.chunks(Part(index, mark, None, 0, None))
        before, _, after = frame(chunk).decode().partition(f'"{mark}"')
        return before, after
