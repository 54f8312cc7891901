"""Bodies of requests: the fields of OpenAI's API that are served, and their rules."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from laconic.infer.server.refusals import Refusal

__all__ = ["ChatBody", "CompletionBody", "Message", "RequestBody", "parse_body"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
}
"""Fields that are not served, and the values that ask for nothing; clients send them unasked."""


def _check_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if value is not None and not (
        isinstance(stops, list) and len(stops) <= 16 and all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise ValueError("must be a string, or a list of at most 16 strings, none of them empty")
    return stops


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _check_prompt(value: object) -> object:
    prompts = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not (
        isinstance(prompts, list)
        and 1 <= len(prompts) <= 64
        and (all(isinstance(prompt, str) for prompt in prompts) or all(_is_tokens(prompt) for prompt in prompts))
    ):
        raise ValueError("must be a string, a list of token ids, or a list of 1 to 64 of either; no list may be empty")
    return prompts


def _check_content(value: object) -> object:
    if isinstance(value, list) and value:
        if not all(
            isinstance(part, dict)
            and part.keys() == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in value
        ):
            raise ValueError("must be a string or a list of parts of type text; other parts are not served")
        return "".join(part["text"] for part in value)
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """Options of an answer in pieces.

    Attributes:
        include_usage: end with a chunk of numbers of tokens.
        include_obfuscation: is accepted; no padding is sent either way.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(_Strict):
    """A message of a conversation.

    Attributes:
        role: who says it.
        content: the text, or a list of {"type": "text", "text": ...}, which are joined.
        name: of the speaker, for templates that use it.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_check_content)]
    name: str | None = None


class RequestBody(_Strict):
    """Fields that completions and chats share; see OpenAI's API reference. None is as if left out.

    Attributes:
        top_k: beyond OpenAI's API: draw from that many most probable tokens; 0 draws from all.
        user: is accepted and not used.
        return_tokens_as_token_ids: beyond OpenAI's API, as vLLM has it: logprobs name tokens "token_id:7".
    """

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=64)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop)] = None
    user: str | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def names_tokens_by_id(self) -> bool:
        """Whether logprobs name tokens by their ids."""
        return bool(self.return_tokens_as_token_ids)

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the longest answer that the client takes; None if it does not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Value of Sampling.logprobs."""
        return None


class CompletionBody(RequestBody):
    """Body of /v1/completions.

    Attributes:
        prompt: a text, a list of token ids, or a list of either.
        logprobs: how many tokens to report at each position.
    """

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_check_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        """Value of Sampling.logprobs."""
        return self.logprobs


class ChatBody(RequestBody):
    """Body of /v1/chat/completions.

    Attributes:
        messages: of the conversation, at least one.
        max_completion_tokens: the same as max_tokens.
        logprobs: report the logprob of each token.
        top_logprobs: how many tokens to report at each position, with logprobs.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the longest answer that the client takes; None if it does not say."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Value of Sampling.logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", CompletionBody, ChatBody)


def parse_body(kind: type[Body], content: bytes) -> Body:
    """Read the body of a request.

    Raises:
        Refusal: it is not JSON, a field is unknown or missing, breaks its rule, or contradicts another (400).
    """
    try:
        values: Any = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refusal(400, f"the body is {reprlib.repr(values)}, but it must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        if values.get(name) is not None and values[name] not in neutral:
            shown = reprlib.repr(values[name])
            raise Refusal(400, f"{name} is {shown}, but {name} is not served; leave it out", name, "unsupported")
    try:
        body = kind.model_validate({name: value for name, value in values.items() if name not in _NEUTRAL})
    except ValidationError as error:
        raise _refusal(kind, error) from None
    _check_contradictions(body)
    return body


def _refusal(kind: type[BaseModel], error: ValidationError) -> Refusal:
    """Make the first mistake that was found a sentence."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return Refusal(400, f"{name} is missing, but it must be given", name)
    if first["type"] == "extra_forbidden":
        remedy = f"; the fields are {', '.join(sorted(kind.model_fields))}" if len(first["loc"]) == 1 else ""
        return Refusal(400, f"{name} is no field that is served{remedy}", name, "unknown_parameter")
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    rule = rule if rule.startswith("must") else f"must be {rule}"
    return Refusal(400, f"{name} is {reprlib.repr(first['input'])}, but it {rule}", name)


def _check_contradictions(body: CompletionBody | ChatBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options is given, but stream is not true; give both or neither", "stream_options")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise Refusal(400, "top_logprobs is given, but logprobs is not true; give both or neither", "top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise Refusal(
                400,
                f"max_tokens is {body.max_tokens}, but max_completion_tokens is {body.max_completion_tokens}; give one",
                "max_tokens",
            )
