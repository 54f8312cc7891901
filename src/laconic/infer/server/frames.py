"""Server-sent events of a streamed answer, as bytes."""

from __future__ import annotations

import json
import uuid

from laconic.infer.server.generation import Part
from laconic.infer.server.replies import Reply

_encode = json.JSONEncoder(separators=(",", ":")).encode


class PartFrames:
    """The events of the parts of a reply.

    Most parts are a piece of text and nothing else, and their events differ in that text alone. So those of a choice
    are cut once from the event of one such part, and only their text is encoded.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._around_text: dict[int, tuple[str, str]] = {}

    def of(self, part: Part) -> bytes:
        """Return the events of a part, those of `reply.chunks(part)`; there may be none."""
        if not self._reply.differs_in_text_alone or part.finish_reason is not None or not part.text:
            return b"".join(self._reply.frame(chunk) for chunk in self._reply.chunks(part))
        if (around := self._around_text.get(part.index)) is None:
            around = self._around_text[part.index] = self._cut(part.index)
        before, after = around
        return f"{before}{_encode(part.text)}{after}".encode()

    def _cut(self, index: int) -> tuple[str, str]:
        mark = uuid.uuid4().hex
        (chunk,) = self._reply.chunks(Part(index, mark, None, 0, None))
        before, _, after = self._reply.frame(chunk).decode().partition(f'"{mark}"')
        return before, after
