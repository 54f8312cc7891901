"""Conversations in the shapes of OpenAI's newer API, /v1/responses, answered as chats: text alone, nothing stored."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.infer.server.bodies import ChatBody, StreamOptions, make_body
from laconic.infer.server.conversation import CACHE_MARKS, Strict
from laconic.infer.server.formats import check_kind
from laconic.infer.server.generation import Generation, Part
from laconic.infer.server.refusals import Refusal
from laconic.infer.server.replies import Reply
from laconic.infer.tokenizer import TextTokenizer

_OF_MESSAGE = {"type", "id", "status", "role", "content", "phase"}
_TEXTS = ("input_text", "output_text", "text")


def _check_input(value: object) -> object:
    """Return messages as chats have them."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_message(item) for item in value]
    raise ValueError("must be a text or a list of messages")


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message" or not item.keys() <= _OF_MESSAGE:
        raise ValueError("must have messages of role and content alone; other items are not served")
    content = item.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict)
            and part.get("type") in _TEXTS
            and isinstance(part.get("text"), str)
            and part.keys() <= {"type", "text", "annotations", "logprobs", *CACHE_MARKS}
            for part in content
        ):
            raise ValueError("must have contents of text alone; other parts are not served")
        content = "".join(part["text"] for part in content)
    return {"role": item.get("role"), "content": content}


class _TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> _TextFormat:
        check_kind(self.type, self.schema_)
        return self


class _Text(Strict):
    format: _TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Strict):
    """Body of /v1/responses; see OpenAI's API reference. None is as if left out.

    Attributes:
        input: a text, or messages, also those of an earlier answer's output.
        instructions: a system message before them.
        text: the format of the answer.
        metadata, store and what follows: are given back, or accepted and not used; no answer is kept.
    """

    model: str
    input: Annotated[list[dict[str, Any]], BeforeValidator(_check_input)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: _Text | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    def to_chat(self) -> ChatBody:
        """Return the same request as one of /v1/chat/completions.

        Raises:
            Refusal: a message breaks a rule (400).
        """
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        values: dict[str, Any] = {"model": self.model, "messages": [*before, *self.input]}
        values |= {"temperature": self.temperature, "top_p": self.top_p, "stream": self.stream}
        values["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and (asked := self.text.format) is not None:
            values["response_format"] = {"type": asked.type}
            if asked.type == "json_schema":
                values["response_format"]["json_schema"] = {"name": asked.name or "answer", "schema": asked.schema_}
        return make_body(ChatBody, values)


class ResponseReply(Reply):
    """Answers of /v1/responses.

    Args:
        model, tokenizer: of Reply.
        body: that is answered.
    """

    prefix = "resp"
    object_whole = "response"
    end = b""

    def __init__(self, model: str, tokenizer: TextTokenizer, body: ResponsesBody) -> None:
        super().__init__(model, tokenizer, False)
        self.differs_in_text_alone = False  # events are numbered
        self._body = body
        self._item = f"msg_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._status = "in_progress"
        self._sequence = 0

    def whole(self, parts: Sequence[Part], generation: Generation) -> dict[str, Any]:
        """Return the whole answer."""
        for part in parts:
            self._take(part)
        return self._response(generation)

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the events before the first part."""
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))
        yield self._event("response.output_item.added", output_index=0, item=self._message([]))
        yield self._event("response.content_part.added", **self._place(), part=_output_text(""))

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events of a part: one, if it has text."""
        self._take(part)
        if part.text:
            yield self._event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])

    def closing(self, generation: Generation, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the events after the last part."""
        text = "".join(self._texts)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_output_text(text))
        yield self._event("response.output_item.done", output_index=0, item=self._message([_output_text(text)]))
        yield self._event(f"response.{self._status}", response=self._response(generation))

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """Return the event that carries a chunk."""
        return f"event: {chunk['type']}\n".encode() + super().frame(chunk)

    def failure(self, refusal: Refusal) -> dict[str, Any]:
        """Return the event of what ended a stream before its end."""
        return self._event("error", code=refusal.code, message=str(refusal), param=refusal.param)

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        raise AssertionError("an answer of /v1/responses has no choices")

    def _take(self, part: Part) -> None:
        self._texts.append(part.text)
        if part.finish_reason is not None:
            self._status = "completed" if part.finish_reason == "stop" else "incomplete"

    def _event(self, kind: str, **values: object) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1} | values

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item, "role": "assistant", "status": self._status, "content": content}

    def _response(self, generation: Generation | None) -> dict[str, Any]:
        """Return the answer as it is now, with numbers of tokens if it has ended."""
        body, cut = self._body, self._status == "incomplete"
        done = [] if generation is None else [self._message([_output_text("".join(self._texts))])]
        asked = None if body.text is None else body.text.format
        text_format = {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "model": self._model,
            "output": done,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": text_format},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else self._tokens(generation),
            "user": body.user,
        }

    def _tokens(self, generation: Generation) -> dict[str, Any]:
        counts = self._usage(generation)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
