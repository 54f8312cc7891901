"""Bodies of requests: the fields of OpenAI's API that are served, and their rules."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from laconic.infer.server.refusals import Refusal

__all__ = ["ChatBody", "CompletionBody", "DetokenizeBody", "Message", "RequestBody", "TokenizeBody", "parse_body"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
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


def _check_bias(value: object) -> object:
    if value is not None and not (
        isinstance(value, dict)
        and all(token.isascii() and token.isdecimal() and len(token) <= 18 for token in value)
        and all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values())
    ):
        raise ValueError("must be an object of numbers from -100 to 100 by ids of tokens")
    return value


def _check_stop_tokens(value: object) -> object:
    if value not in (None, []) and not _is_tokens(value):
        raise ValueError("must be a list of ids of tokens")
    return value


def _check_nothing(value: object) -> object:
    if value is not None and value != []:
        raise ValueError("must be null: only text is served; leave it out")
    return None


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
        content: the text, or a list of {"type": "text", "text": ...}, which are joined; an assistant's may be null.
        name: of the speaker, for templates that use it.
        annotations, audio, function_call, refusal, tool_calls: null or empty, as clients send answers back.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_check_content)] = None
    name: str | None = None
    annotations: Annotated[None, BeforeValidator(_check_nothing)] = None
    audio: Annotated[None, BeforeValidator(_check_nothing)] = None
    function_call: Annotated[None, BeforeValidator(_check_nothing)] = None
    refusal: Annotated[None, BeforeValidator(_check_nothing)] = None
    tool_calls: Annotated[None, BeforeValidator(_check_nothing)] = None

    def for_template(self) -> dict[str, str]:
        """Return what chat templates know of a message."""
        return {"role": self.role, "content": self.content or ""} | ({} if self.name is None else {"name": self.name})


class RequestBody(_Strict):
    """Fields that completions and chats share; see OpenAI's API reference. None is as if left out.

    Attributes:
        metadata, prompt_cache_key, prompt_cache_options, prompt_cache_retention, safety_identifier, service_tier,
            store, user: are accepted and not used: they change no token.
        top_k: beyond OpenAI's API, as all that follow, and as vLLM has them: draw from that many most probable tokens;
            0 draws from all.
        min_p: draw from tokens with at least that share of the greatest probability.
        repetition_penalty: divides logits of tokens that are in the prompt or the answer.
        min_tokens: of the answer, before which no token ends it.
        ignore_eos: the model's end-of-sequence tokens do not end the answer.
        stop_token_ids: further tokens that do.
        return_tokens_as_token_ids: logprobs name tokens "token_id:7".
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
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_bias)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_check_stop_tokens)] = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def rules(self) -> dict[str, Any]:
        """Value of Sampling.rules: those that the client gives, with None for what switches one of the model's off."""
        given = {"repetition_penalty": self.repetition_penalty, "min_p": self.min_p, "min_new_tokens": self.min_tokens}
        rules: dict[str, Any] = {name: value or None for name, value in given.items() if value is not None}
        if self.min_tokens is not None:
            rules["min_length"] = None
        if self.logit_bias:
            rules["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in self.logit_bias.items()]
        return rules

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
        parallel_tool_calls: is accepted and not used: there are no tools.
        top_logprobs: how many tokens to report at each position, with logprobs.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the longest answer that the client takes; None if it does not say."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Value of Sampling.logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(_Strict):
    """Body of /tokenize, as vLLM has it.

    Attributes:
        model: may be left out.
        prompt: a text, whose tokens are those of /v1/completions.
        messages: of a conversation, whose tokens are those of /v1/chat/completions; one of both is given.
        return_token_strs: tell also what the vocabulary calls the tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    """Body of /detokenize, as vLLM has it.

    Attributes:
        model: may be left out.
        tokens: ids.
    """

    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(_check_stop_tokens)]


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


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


def _check_contradictions(body: CompletionBody | ChatBody | TokenizeBody | DetokenizeBody) -> None:
    if isinstance(body, TokenizeBody) and (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "prompt and messages are both given or both missing; give one", "prompt")
    for place, message in enumerate(getattr(body, "messages", None) or ()):
        if message.content is None and message.role != "assistant":
            name = f"messages.{place}.content"
            raise Refusal(400, f"{name} is missing or null, but only an assistant's may be; give a text", name)
    if isinstance(body, (TokenizeBody, DetokenizeBody)):
        return
    if None not in (body.min_tokens, longest := body.longest_answer) and (body.min_tokens or 0) > (longest or 0):
        raise Refusal(
            400,
            f"min_tokens is {body.min_tokens}, but the longest answer is {longest}; give at most that",
            "min_tokens",
        )
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
