"""Bodies of requests: the fields of OpenAI's API that are served, and their rules."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import from_json

from laconic.infer.server.conversation import (
    ChatMessage,
    NamedTool,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    Tool,
    ToolChoice,
    check_false,
)
from laconic.infer.server.unserved import (
    NEUTRAL_IN_CHATS,
    NEUTRAL_IN_COMPLETIONS,
    NEUTRAL_IN_TOKENIZE,
    Neutral,
    asks_for_nothing,
)
from laconic.infer.server.wire import Refusal
from laconic.json_text import parse_json

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")  # without leading zeros, so that no two name one token


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
        and all(_TOKEN_ID.fullmatch(token) for token in value)
        and all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values())
    ):
        raise ValueError("must be an object of numbers from -100 to 100 by ids of tokens, as 7 and not 07")
    return value


def _check_stop_tokens(value: object) -> object:
    if value not in (None, []) and not _is_tokens(value):
        raise ValueError("must be a list of ids of tokens")
    return value


class StreamOptions(Strict):
    """Options of an answer in pieces: whether it ends with a chunk of numbers of tokens.

    No padding is sent, with include_obfuscation or without; vLLM's continuous_usage_stats are not served.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[None, BeforeValidator(check_false)] = None


class AnswerBody(Strict):
    """Fields of every request for an answer; see OpenAI's API reference. None is as if left out.

    From metadata on they are accepted and at most given back: they change no token.
    """

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class RequestBody(AnswerBody):
    """Fields that completions and chats share.

    From top_k on they are beyond OpenAI's, as vLLM has them: of top_k, 0 and -1 draw from all tokens; ignore_eos
    ignores the model's own, beside which stop_token_ids end an answer; return_tokens_as_token_ids lets logprobs name
    tokens "token_id:7". guided_* are structured_outputs by the names that vLLM gave them before, json_schema (a string)
    and regex by SGLang's. guided_decoding_backend, return_mm_kwargs, rid and session_id are accepted and not used.
    """

    top_k: int | None = Field(None, ge=-1, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=64)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop)] = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_bias)] = None
    response_format: ResponseFormat | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_check_stop_tokens)] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_decoding_backend: str | None = None
    return_mm_kwargs: bool | None = None
    rid: str | None = None
    session_id: str | None = None

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
    def continues_prompt(self) -> bool:
        """Whether the answer is the text behind the prompt's, and no text of its own."""
        return False

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def longest_answer(self) -> int | None:
        """Tokens of the longest answer that the client takes; None if it does not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Value of Sampling.logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Value of Sampling.prompt_logprobs."""
        return None


class CompletionBody(RequestBody):
    """Body of /v1/completions: a text, a list of token ids, or a list of either.

    An answer of 0 tokens is for `echo`, which begins it with the prompt and its logprobs.
    """

    neutral: ClassVar[Neutral] = NEUTRAL_IN_COMPLETIONS
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_check_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    echo: bool | None = None

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class ChatBody(RequestBody):
    """Body of /v1/chat/completions; max_completion_tokens is the same as max_tokens.

    `tool_choice` is "none", "auto" (the default), "required", or the tool that it must call; an answer may have several
    calls unless `parallel_tool_calls` is false. `chat_template_kwargs` are further variables of the template, of vLLM.
    """

    neutral: ClassVar[Neutral] = NEUTRAL_IN_CHATS
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def longest_answer(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call; none with tool_choice "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls alone, or the arguments of one."""
        return self.tool_choice not in (None, "auto", "none")


class TokenizeBody(Strict):
    """Body of /tokenize, as vLLM has it: a prompt, as of /v1/completions, or messages, as of /v1/chat/completions.

    `return_token_strs` asks also for what the vocabulary calls the tokens. `add_special_tokens` is true with a prompt
    and false with messages, whose template writes them; else it is not served.
    """

    neutral: ClassVar[Neutral] = NEUTRAL_IN_TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Strict):
    """Body of /detokenize, as vLLM has it."""

    neutral: ClassVar[Neutral] = {"skip_special_tokens": (True,)}
    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(_check_stop_tokens)]


Body = TypeVar("Body", bound=Strict)


def parse_body(kind: type[Body], content: bytes) -> Body:
    """Read the body of a request; a Refusal (400) unless it is JSON and its fields keep their rules, see make_body."""
    try:
        values: Any = from_json(content, allow_inf_nan=False)
        parse_json(content)  # of two equal names the first would be dropped, and 1e400 be infinity
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refusal(f"the body is {reprlib.repr(values)}, but it must be a JSON object")
    for name, allowed in kind.neutral.items():
        if not asks_for_nothing(values.get(name), allowed):
            shown = reprlib.repr(values[name])
            raise Refusal(f"{name} is {shown}, but {name} is not served; leave it out", name, "unsupported")
    return make_body(kind, {name: value for name, value in values.items() if name not in kind.neutral})


def make_body(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """Return the body; a Refusal (400) if a field is unknown or missing, breaks its rule or contradicts another."""
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    _check_contradictions(body)
    return body


def _refusal(kind: type[BaseModel], error: ValidationError) -> Refusal:
    first = error.errors(include_url=False)[0]
    # pydantic's marks of a union's members are left out: no field is called so
    places = [str(part) for part in first["loc"]]
    name = ".".join(each for each in places if each not in ("bool", "str") and not each.startswith("dict["))
    if first["type"] == "missing":
        return Refusal(f"{name} is missing, but it must be given", name)
    if first["type"] == "extra_forbidden":
        remedy = f"; the fields are {', '.join(sorted(kind.model_fields))}" if len(first["loc"]) == 1 else ""
        return Refusal(f"{name} is no field that is served{remedy}", name, "unknown_parameter")
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    rule = rule if rule.startswith("must") else f"must be {rule}"
    return Refusal(f"{name} is {reprlib.repr(first['input'])}, but it {rule}", name)


def _check_contradictions(body: Strict) -> None:
    if isinstance(body, TokenizeBody):
        _check_tokenize(body)
    open_calls: dict[str, bool] = {}  # by their ids, whether they wait for their answer
    for place, message in enumerate(getattr(body, "messages", None) or ()):
        _check_message(f"messages.{place}", message)
        _check_answer(f"messages.{place}", message, open_calls)
    if not isinstance(body, RequestBody):
        return
    longest = body.longest_answer
    if body.min_tokens is not None and longest is not None and body.min_tokens > longest:
        raise Refusal(
            f"min_tokens is {body.min_tokens}, but the longest answer is {longest}; give at most that",
            "min_tokens",
        )
    if body.stream_options is not None and not body.stream:
        raise Refusal("stream_options is given, but stream is not true; give both or neither", "stream_options")
    if isinstance(body, CompletionBody) and longest == 0 and not body.echo:
        raise Refusal("max_tokens is 0, but echo is not true, so nothing is asked for; give at least 1", "max_tokens")
    if isinstance(body, ChatBody):
        _check_chat(body)


def _check_tokenize(body: TokenizeBody) -> None:
    has_prompt = body.prompt is not None
    if has_prompt == (body.messages is not None):
        raise Refusal("prompt and messages are both given or both missing; give one", "prompt")
    if body.add_special_tokens not in (None, has_prompt):
        raise Refusal(
            f"add_special_tokens is {json.dumps(body.add_special_tokens)}, but it is served as true with prompt and as"
            " false with messages; leave it out",
            "add_special_tokens",
            "unsupported",
        )
    for name in ("tools", "chat_template_kwargs") if has_prompt else ():
        if getattr(body, name):
            raise Refusal(f"{name} is given with prompt, which passes no chat template; give messages", name)


def _check_message(name: str, message: ChatMessage) -> None:
    if message.content is None and message.role != "assistant":
        raise Refusal(
            f"{name}.content is missing or null, but only an assistant's may be; give a text", f"{name}.content"
        )
    if message.tool_calls and message.role != "assistant":
        raise Refusal(f"{name}.tool_calls is given, but only an assistant has calls", f"{name}.tool_calls")
    if (message.tool_call_id is None) != (message.role != "tool"):
        raise Refusal(
            f"{name}.tool_call_id must be given with the role tool, which answers a call, and with no other",
            f"{name}.tool_call_id",
        )


def _check_answer(name: str, message: ChatMessage, open_calls: dict[str, bool]) -> None:
    ids = [call.id for call in message.tool_calls or ()]
    if len(set(ids)) < len(ids):
        why = f"{name}.tool_calls has an id twice, but answers name their call by it; give each its own"
        raise Refusal(why, f"{name}.tool_calls")
    open_calls |= dict.fromkeys(ids, True)
    if (answered := message.tool_call_id) is not None:
        if not open_calls.get(answered):
            why = "that call has been answered" if answered in open_calls else "no message before it has such a call"
            raise Refusal(
                f"{name}.tool_call_id is {answered!r}, but {why}; give each call one answer, behind it",
                f"{name}.tool_call_id",
            )
        open_calls[answered] = False


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise Refusal("top_logprobs is given, but logprobs is not true; give both or neither", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise Refusal(
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is {body.max_completion_tokens}; give one",
            "max_tokens",
        )
    names = [tool.function.name for tool in body.tools or ()]
    if len(set(names)) < len(names):
        raise Refusal("tools has a name twice, but calls name their tool; give each a name of its own", "tools")
    if body.tool_choice == "required" and not names:
        raise Refusal("tool_choice is 'required', but there are no tools; give some", "tool_choice")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.name not in names:
        raise Refusal(
            f"tool_choice names {body.tool_choice.name!r}, but tools are {', '.join(names) or 'missing'}",
            "tool_choice",
        )
