"""Answers in the shapes of OpenAI's API: whole, or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from laconic.infer.sampling import ChosenToken
from laconic.infer.server.generation import Generation, Part
from laconic.infer.server.tool_calls import CallDelta, ToolParser
from laconic.infer.server.wire import Refusal
from laconic.infer.tokenizer import TextTokenizer

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Reply(ABC):
    """Shapes that all answers share; as_token_ids names tokens in logprobs by ids, which no two share, not texts.

    Attributes:
        end: bytes behind the last event of a stream.
    """

    prefix = ""
    object_whole = ""
    object_chunk = ""
    end = b"data: [DONE]\n\n"

    def __init__(self, model: str, tokenizer: TextTokenizer, with_logprobs: bool, as_token_ids: bool = False) -> None:
        self._as_token_ids, self._with_logprobs = as_token_ids, with_logprobs
        self._model, self._tokenizer = model, tokenizer
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._differs_in_text_alone = not with_logprobs
        """Whether the chunk of a part with nothing but text, amid a choice, differs from its others in that alone."""
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, parts: Sequence[Part], generation: Generation) -> dict[str, Any]:
        """Return the whole answer."""
        by_choice: dict[int, list[Part]] = {}
        for part in parts:
            by_choice.setdefault(part.index, []).append(part)
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return self._head(self.object_whole) | {"choices": choices, "usage": self._usage(generation)}

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first part."""
        return iter(())

    @abstractmethod
    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part."""

    def closing(self, generation: Generation, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks after the last part: numbers of tokens, for clients that ask for them."""
        if with_usage:
            yield self._head(self.object_chunk) | {"choices": [], "usage": self._usage(generation)}

    def events(self, part: Part) -> bytes:
        """Return the events of a part, those of its chunks; there may be none.

        Most parts are a piece of text and nothing else, and their events differ in that text alone. So those of a
        choice are cut once from the event of one such part, and only their text is encoded.
        """
        if not self._differs_in_text_alone or part.finish_reason is not None or not part.text:
            return b"".join(map(self.frame, self.chunks(part)))
        if (around := self._around_text.get(part.index)) is None:
            mark = uuid.uuid4().hex
            (chunk,) = self.chunks(Part(part.index, mark, None, 0, None))
            before, _, after = self.frame(chunk).partition(f'"{mark}"'.encode())
            around = self._around_text[part.index] = before, after
        before, after = around
        return before + _encode(part.text).encode() + after

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """Return the event that carries a chunk."""
        return f"data: {_encode(chunk)}\n\n".encode()

    def failure(self, refusal: Refusal) -> dict[str, Any]:
        """Return the chunk of what ended a stream before its end."""
        return refusal.body()

    @abstractmethod
    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Return a whole choice."""

    def _chunk(self, **choice: object) -> dict[str, Any]:
        return self._head(self.object_chunk) | {"choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, generation: Generation) -> dict[str, int]:
        prompt, completion = generation.prompt_tokens, generation.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _token_text(self, token: int) -> str:
        """Return the text of a token amid others; the vocabulary's name for it if it is part of a character."""
        if self._as_token_ids:
            return _id_text(token)
        try:
            return self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            return self._tokenizer.token_name(token)


class CompletionReply(Reply):
    """Answers of /v1/completions.

    `prompts` are the text of the prompt of each choice, with which it begins; None does not repeat them. `only_prompts`
    leaves out what was generated: the prompt was asked for and nothing else.
    """

    prefix = "cmpl"
    object_whole = object_chunk = "text_completion"

    def __init__(
        self,
        model: str,
        tokenizer: TextTokenizer,
        with_logprobs: bool,
        as_token_ids: bool = False,
        prompts: Sequence[str] | None = None,
        only_prompts: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, with_logprobs, as_token_ids)
        self._unsent = dict(enumerate(prompts or ()))
        self._lengths = {index: len(prompt) for index, prompt in self._unsent.items()}
        self._only_prompts = only_prompts
        self._differs_in_text_alone &= prompts is None

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part: one, or none if there is nothing to tell."""
        choice = self._choice(part.index, [part])
        if choice["text"] or part.finish_reason or (self._with_logprobs and part.token):
            yield self._chunk(**choice)

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        text = "" if self._only_prompts else "".join(part.text for part in parts)
        return {
            "index": index,
            "text": self._unsent.pop(index, "") + text,
            "logprobs": self._logprobs(parts) if self._with_logprobs else None,
            "finish_reason": "length" if self._only_prompts else parts[-1].finish_reason,
        }

    def _usage(self, generation: Generation) -> dict[str, int]:
        found = super()._usage(generation)
        return found | {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]} if self._only_prompts else found

    def _logprobs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return logprobs of the prompt, which come with a choice's first token, and of the answer."""
        made: list[tuple[ChosenToken, int]] = []
        for part in parts:
            length = self._lengths.get(part.index, 0)
            if part.token is None:
                continue
            made += zip(part.token.prompt, self._offsets(part.token.prompt, length), strict=True)
            if not self._only_prompts:
                made.append((part.token, length + part.offset))
        return {
            "tokens": [self._token_text(token.token) for token, _ in made],
            "token_logprobs": [_finite(token.logprob) for token, _ in made],
            "top_logprobs": [None if token.logprob is None else self._top(token) for token, _ in made],
            "text_offset": [offset for _, offset in made],
        }

    def _offsets(self, prompt: Sequence[ChosenToken], length: int) -> list[int]:
        """Return where the tokens of a prompt begin in its text, which has `length` characters."""
        detokenizer, offsets, offset = self._tokenizer.detokenizer(), [], 0
        for token in prompt:
            offsets.append(min(offset, length))
            offset += len(detokenizer.push(token.token))
        return offsets

    def _top(self, token: ChosenToken) -> dict[str, float | None]:
        """Return the most probable tokens, and the token itself if it is none, as in OpenAI's API.

        Keys are their texts; where several share one, all but the first are by their ids. The token's text is its key.
        """
        owners = {self._token_text(token.token): token.token}
        found: dict[str, float | None] = {}
        top: dict[int, float | None] = dict(token.top)
        top.setdefault(token.token, token.logprob)
        for each, logprob in top.items():
            text = self._token_text(each)
            found[text if owners.setdefault(text, each) == each else _id_text(each)] = _finite(logprob)
        return found


class ChatReply(Reply):
    """Answers of /v1/chat/completions; `make_parser` is of calls of tools; with `one_call` the first is given alone."""

    prefix = "chatcmpl"
    object_whole, object_chunk = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: TextTokenizer,
        with_logprobs: bool,
        as_token_ids: bool = False,
        make_parser: Callable[[], ToolParser] | None = None,
        one_call: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, with_logprobs, as_token_ids)
        self._make_parser, self._one_call = make_parser, one_call
        self._parsers: dict[int, ToolParser] = {}
        self._callers: set[int] = set()
        self._differs_in_text_alone &= make_parser is None

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first part: the role of each choice's message."""
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(index=index, delta=delta, logprobs=None, finish_reason=None)

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part: its text and calls, if it has any, and the end of the choice."""
        logprobs = self._logprobs([part]) if self._with_logprobs and part.token else None
        found = self._found(part)
        deltas = [{"content": each} if isinstance(each, str) else {"tool_calls": [each]} for each in found]
        for delta in deltas or ([{"content": ""}] if logprobs else []):
            yield self._chunk(index=part.index, delta=delta, logprobs=logprobs, finish_reason=None)
            logprobs = None
        if part.finish_reason:
            yield self._chunk(index=part.index, delta={}, logprobs=None, finish_reason=self._finish_reason(part))

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        found = [each for part in parts for each in self._found(part)]
        text = "".join(each for each in found if isinstance(each, str))
        calls: dict[int, dict[str, Any]] = {}
        for each in found:
            if isinstance(each, dict) and (call := calls.setdefault(each.pop("index"), each)) is not each:
                call["function"]["arguments"] += each["function"]["arguments"]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls.values())}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(parts) if self._with_logprobs else None,
            "finish_reason": self._finish_reason(parts[-1]),
        }

    def _found(self, part: Part) -> list[str | dict[str, Any]]:
        """Return what a part adds: texts and calls' deltas, in the shape of a stream."""
        if self._make_parser is None:
            return [part.text] if part.text else []
        if (parser := self._parsers.get(part.index)) is None:
            parser = self._parsers[part.index] = self._make_parser()
        text, token = part.text, None if part.token is None else part.token.token
        if (
            token is not None
            and part.finish_reason != "stop"  # a token at which the client has the answer stop is no part of it
            and parser.marker == self._tokenizer.token_name(token)
            and self._tokenizer.is_special(token)
        ):
            text += parser.marker
        found = [*parser.push(text), *(parser.flush() if part.finish_reason else ())]
        wanted = [each for each in found if isinstance(each, str) or each.index == 0 or not self._one_call]
        return [each if isinstance(each, str) else self._call(part.index, parser, each) for each in wanted]

    def _call(self, index: int, parser: ToolParser, delta: CallDelta) -> dict[str, Any]:
        self._callers.add(index)
        function = {"arguments": delta.arguments}
        if delta.name is None:
            return {"index": delta.index, "function": function}
        name = uuid.uuid4().hex
        name = name[:9] if parser.nine_letter_ids else f"call_{name[:24]}"
        return {"index": delta.index, "id": name, "type": "function", "function": {"name": delta.name} | function}

    def _finish_reason(self, part: Part) -> str | None:
        return "tool_calls" if part.finish_reason == "stop" and part.index in self._callers else part.finish_reason

    def _logprobs(self, parts: Sequence[Part]) -> dict[str, Any]:
        tokens = [part.token for part in parts if part.token is not None]
        return {"content": [self._entry_with_top(token) for token in tokens], "refusal": None}

    def _entry_with_top(self, token: ChosenToken) -> dict[str, Any]:
        top = [self._entry(each, logprob) for each, logprob in token.top]
        return self._entry(token.token, token.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _id_text(token: int) -> str:
    return f"token_id:{token}"


def _finite(logprob: float | None) -> float | None:
    """Return the logprob, or -9999 (as in OpenAI's API) for less: JSON has no -inf."""
    return None if logprob is None else max(logprob, -9999.0)
