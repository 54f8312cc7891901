"""Conversations in the shapes of OpenAI's newer API, /v1/responses, answered as chats; nothing is stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from laconic.infer.server.bodies import AnswerBody, ChatBody, make_body
from laconic.infer.server.conversation import CACHE_MARKS, Strict, Tool, check_kind
from laconic.infer.server.generation import Generation, Part
from laconic.infer.server.replies import ChatReply
from laconic.infer.server.tool_calls import ToolParser
from laconic.infer.server.unserved import NEUTRAL_IN_RESPONSES, Neutral
from laconic.infer.server.wire import Refusal
from laconic.infer.tokenizer import TextTokenizer

_TEXTS = ("input_text", "output_text", "text")
_ITEMS = {  # fields of each, beside type, id and status
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "name", "output"},
}


def _check_input(value: object) -> object:
    """Return messages as chats have them."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        raise ValueError("must be a text or a list of messages, function calls and their outputs")
    messages: list[dict[str, Any]] = []
    for message in map(_message, value):
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":  # of one answer
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    given = {name: value for name, value in item.items() if value is not None and name not in ("type", "id", "status")}
    if not isinstance(kind, str) or kind not in _ITEMS or not given.keys() <= _ITEMS[kind]:
        shown = "; ".join(f"{name} of {', '.join(sorted(fields))}" for name, fields in _ITEMS.items())
        raise ValueError(f"must have items of these types and fields alone: {shown}")
    if kind == "message":
        return {"role": given.get("role"), "content": _text(given.get("content"))}
    if kind == "function_call":
        function = {name: given.get(name) for name in ("name", "arguments")}
        return {"role": "assistant", "tool_calls": [{"id": given.get("call_id"), "function": function}]}
    answered = {"tool_call_id": given.get("call_id"), "name": given.get("name")}
    return {"role": "tool", "content": _text(given.get("output"))} | answered


def _text(content: object) -> object:
    if not isinstance(content, list):
        return content
    if not all(
        isinstance(part, dict)
        and part.get("type") in _TEXTS
        and isinstance(part.get("text"), str)
        and {name for name, value in part.items() if value is not None}
        <= {"type", "text", "annotations", "logprobs", *CACHE_MARKS}
        for part in content
    ):
        raise ValueError("must have contents of text alone; other parts are not served")
    return "".join(part["text"] for part in content)


def _check_tools(value: object) -> object:
    """Return the tools as chats have them."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return value
    return [
        {"type": tool.get("type"), "function": {name: of for name, of in tool.items() if name != "type"}}
        for tool in value
    ]


def _check_tool_choice(value: object) -> object:
    """Return the choice as chats have it."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.keys() == {"type", "name"} and value["type"] == "function":
        return {"type": "function", "function": {"name": value["name"]}}
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'name': NAME}")


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


class ResponsesBody(AnswerBody):
    """Body of /v1/responses.

    `input` may have messages, calls and their outputs, also those of an earlier answer; tools are as in chats, in
    shapes without "function".
    """

    neutral: ClassVar[Neutral] = NEUTRAL_IN_RESPONSES
    input: Annotated[list[dict[str, Any]], BeforeValidator(_check_input)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31)
    text: _Text | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(_check_tools)] = None
    tool_choice: Annotated[Any, BeforeValidator(_check_tool_choice)] = None
    parallel_tool_calls: bool | None = None

    def to_chat(self) -> ChatBody:
        """Return the same request as one of /v1/chat/completions; a message that breaks a rule is a Refusal (400)."""
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        values: dict[str, Any] = {"model": self.model, "messages": [*before, *self.input]}
        values |= {"temperature": self.temperature, "top_p": self.top_p, "stream": self.stream}
        values |= {"max_completion_tokens": self.max_output_tokens, "parallel_tool_calls": self.parallel_tool_calls}
        values |= {"tools": self.tools, "tool_choice": self.tool_choice}
        if self.text is not None and (asked := self.text.format) is not None:
            values["response_format"] = {"type": asked.type}
            if asked.type == "json_schema":
                values["response_format"]["json_schema"] = {"name": asked.name or "answer", "schema": asked.schema_}
        return make_body(ChatBody, values)


class ResponseReply(ChatReply):
    """Answers of /v1/responses."""

    prefix = "resp"
    end = b""

    def __init__(
        self,
        model: str,
        tokenizer: TextTokenizer,
        body: ResponsesBody,
        make_parser: Callable[[], ToolParser] | None,
    ) -> None:
        super().__init__(model, tokenizer, False, False, make_parser, body.parallel_tool_calls is False)
        self._differs_in_text_alone = False  # events are numbered
        self._body = body
        self._items: list[dict[str, Any]] = []  # of the output; the last is open, and what it has is in _pieces
        self._pieces: list[str] = []
        self._status = "in_progress"
        self._sequence = 0

    def whole(self, parts: Sequence[Part], generation: Generation) -> dict[str, Any]:
        """Return the whole answer: what the last event of a stream has."""
        for part in parts:
            for _ in self.chunks(part):
                pass
        *_, last = self.closing(generation, False)
        whole: dict[str, Any] = last["response"]
        return whole

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the events before the first part."""
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events of a part: of its text and calls, if it has any."""
        if part.finish_reason is not None:
            self._status = "completed" if part.finish_reason == "stop" else "incomplete"
        for found in self._found(part):
            kind = "message" if isinstance(found, str) else "function_call"
            begins = isinstance(found, dict) and "id" in found
            if begins or not self._items or self._items[-1]["type"] != kind:
                yield from self._end_item("completed")
                yield from self._begin_item(None if isinstance(found, str) else found)
            if isinstance(found, str):
                self._pieces.append(found)
                yield self._event("response.output_text.delta", **self._place(), delta=found, logprobs=[])
            elif arguments := found["function"]["arguments"]:
                self._pieces.append(arguments)
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)

    def closing(self, generation: Generation, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the events after the last part."""
        if not self._items:
            yield from self._begin_item(None)
        yield from self._end_item(self._status)
        yield self._event(f"response.{self._status}", response=self._response(generation))

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """Return the event that carries a chunk."""
        return f"event: {chunk['type']}\n".encode() + super().frame(chunk)

    def failure(self, refusal: Refusal) -> dict[str, Any]:
        """Return the event of what ended a stream before its end."""
        return self._event("error", code=refusal.code, message=str(refusal), param=refusal.param)

    def _event(self, kind: str, **values: object) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1} | values

    def _begin_item(self, call: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        if call is not None:
            item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], "arguments": ""}
            item["name"] = call["function"]["name"]
        self._items.append(item | {"status": "in_progress"})
        self._pieces = []
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if call is None:
            yield self._event("response.content_part.added", **self._place(), part=_output_text(""))

    def _end_item(self, status: str) -> Iterator[dict[str, Any]]:
        """End the item that is open, if there is one."""
        if not self._items:
            return
        item, text = self._items[-1], "".join(self._pieces)
        if item["type"] == "message":
            item = item | {"content": [_output_text(text)]}
            yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=_output_text(text))
        else:
            item = item | {"arguments": text}
            done = "response.function_call_arguments.done"
            yield self._event(done, **self._place(), name=item["name"], arguments=text)
        self._items[-1] = item | {"status": status}
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if self._items[-1]["type"] == "message" else {})

    def _response(self, generation: Generation | None) -> dict[str, Any]:
        """Return the answer as it is now, with numbers of tokens if it has ended."""
        body, cut = self._body, self._status == "incomplete"
        choice = body.tool_choice or "auto"
        asked = None if body.text is None else body.text.format
        text_format = {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "model": self._model,
            "output": self._items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": text_format},
            "tool_choice": choice if isinstance(choice, str) else {"type": "function"} | choice["function"],
            "tools": [{"type": tool.type} | tool.function.model_dump() for tool in body.tools or ()],
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
