"""Answers in the shapes of OpenAI's API: whole, or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from laconic.infer.sampling import ChosenToken
from laconic.infer.server.generation import Generation, Part
from laconic.infer.tokenizer import TextTokenizer

__all__ = ["ChatReply", "CompletionReply", "Reply"]


class Reply(ABC):
    """Shapes that completions and chats share.

    Args:
        model: name of the model.
        tokenizer: of the model, for logprobs.
        with_logprobs: report them.
        as_token_ids: name tokens in logprobs by their ids, which no two share, and not by their texts.

    Attributes:
        with_logprobs: the same.
    """

    prefix = ""
    object_whole = ""
    object_chunk = ""

    def __init__(self, model: str, tokenizer: TextTokenizer, with_logprobs: bool, as_token_ids: bool = False) -> None:
        self._as_token_ids = as_token_ids
        self._model, self._tokenizer, self.with_logprobs = model, tokenizer, with_logprobs
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, parts: Sequence[Part], generation: Generation) -> dict[str, Any]:
        """Return the whole answer."""
        by_choice: dict[int, list[Part]] = {}
        for part in parts:
            by_choice.setdefault(part.index, []).append(part)
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return self._head(self.object_whole) | {"choices": choices, "usage": usage(generation)}

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first part."""
        return iter(())

    @abstractmethod
    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part."""

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """Return the chunk after the last part, for clients that ask for numbers of tokens."""
        return self._head(self.object_chunk) | {"choices": [], "usage": usage(generation)}

    @abstractmethod
    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Return a whole choice."""

    def _chunk(self, **choice: object) -> dict[str, Any]:
        return self._head(self.object_chunk) | {"choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _token_text(self, token: int) -> str:
        """Return the text of a token amid others; the vocabulary's name for it if it is part of a character."""
        if self._as_token_ids:
            return _id_text(token)
        try:
            return self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            return self._tokenizer.token_name(token)


class CompletionReply(Reply):
    """Answers of /v1/completions."""

    prefix = "cmpl"
    object_whole = object_chunk = "text_completion"

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part: one, or none if there is nothing to tell."""
        if part.text or part.finish_reason or (self.with_logprobs and part.token):
            yield self._chunk(**self._choice(part.index, [part]))

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(part.text for part in parts),
            "logprobs": self._logprobs(parts) if self.with_logprobs else None,
            "finish_reason": parts[-1].finish_reason,
        }

    def _logprobs(self, parts: Sequence[Part]) -> dict[str, Any]:
        made = [(part, part.token) for part in parts if part.token is not None]
        return {
            "tokens": [self._token_text(token.token) for _, token in made],
            "token_logprobs": [_finite(token.logprob) for _, token in made],
            "top_logprobs": [self._top(token) for _, token in made],
            "text_offset": [part.offset for part, _ in made],
        }

    def _top(self, token: ChosenToken) -> dict[str, float | None]:
        """Return the most probable tokens by their texts; where several share one, all but the first by their ids.

        The token that was chosen comes first, so that its text is its key.
        """
        owners = {self._token_text(token.token): token.token}
        found: dict[str, float | None] = {}
        for each, logprob in token.top:
            text = self._token_text(each)
            found[text if owners.setdefault(text, each) == each else _id_text(each)] = _finite(logprob)
        return found


class ChatReply(Reply):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    object_whole, object_chunk = "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first part: the role of each choice's message."""
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(index=index, delta=delta, logprobs=None, finish_reason=None)

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part: its text, if it has any, and the end of the choice."""
        if part.text or (self.with_logprobs and part.token):
            logprobs = self._logprobs([part]) if self.with_logprobs else None
            yield self._chunk(index=part.index, delta={"content": part.text}, logprobs=logprobs, finish_reason=None)
        if part.finish_reason:
            yield self._chunk(index=part.index, delta={}, logprobs=None, finish_reason=part.finish_reason)

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(parts) if self.with_logprobs else None,
            "finish_reason": parts[-1].finish_reason,
        }

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


def usage(generation: Generation) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
