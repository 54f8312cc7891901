"""Conversations: their prompts by the model's chat template, the tools that they may call, and their answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from laconic.errors import ConfigError
from laconic.infer.server.answers import Answers
from laconic.infer.server.bodies import ChatBody
from laconic.infer.server.conversation import ChatMessage, NamedTool, Tool, in_order_of_calls
from laconic.infer.server.refusals import Refusal
from laconic.infer.server.replies import ChatReply, Reply
from laconic.infer.server.responses import ResponseReply, ResponsesBody
from laconic.infer.server.settings import ServerSettings
from laconic.infer.server.structure import grammar_of
from laconic.infer.server.tool_calls import PARSERS, NamedCall, RequiredCalls, ToolParser
from laconic.infer.token_engine import TokenEngine
from laconic.infer.tokenizer import TextTokenizer


class Chats:
    """Answers conversations."""

    def __init__(
        self, engine: TokenEngine, tokenizer: TextTokenizer, settings: ServerSettings, answers: Answers
    ) -> None:
        self._engine, self._tokenizer, self._settings, self._answers = engine, tokenizer, settings, answers
        template = tokenizer.chat_template or ""
        self._takes_tools = "tools" in template
        self._format = settings.tool_call_parser or _format_of(template)

    async def answer(self, request: Request, body: ChatBody) -> Response:
        """Answer a request of /v1/chat/completions; a Refusal if it breaks a rule, or its answer cannot be made."""
        reply = ChatReply(
            self._settings.model_name,
            self._tokenizer,
            bool(body.logprobs),
            bool(body.return_tokens_as_token_ids),
            self._parser(body),
            one_call=body.parallel_tool_calls is False,
        )
        return await self._give(request, body, "messages", reply)

    async def respond(self, request: Request, body: ResponsesBody) -> Response:
        """Answer a request of /v1/responses; a Refusal if it breaks a rule, or its answer cannot be made."""
        chat = body.to_chat()
        reply = ResponseReply(self._settings.model_name, self._tokenizer, body, self._parser(chat))
        return await self._give(request, chat, "input", reply, "text.format")

    async def encode(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], variables: dict[str, Any] | None, field: str
    ) -> list[int]:
        """Return the tokens of a conversation.

        A Refusal (400) names the field if the template does not take it, or has no place for the tools.
        """
        if tools:
            self._check_template()
        try:
            return await asyncio.to_thread(
                self._tokenizer.encode_chat,
                [each.for_template() for each in in_order_of_calls(messages)],
                [each.for_template() for each in tools],
                variables or {},
            )
        except ConfigError as error:
            raise Refusal(str(error), field) from error

    async def _give(
        self, request: Request, body: ChatBody, field: str, reply: Reply, format_field: str = "response_format"
    ) -> Response:
        grammar = await asyncio.to_thread(grammar_of, body, self._engine, format_field)
        prompt = await self.encode(body.messages, body.callable_tools, body.chat_template_kwargs, field)
        # Of several choices, whose longest answer nobody has named, all must fit into the cache at once.
        most = min(self._answers.max_tokens, self._engine.cache_tokens // (body.n or 1))
        longest = self._engine.answer_defaults.longest_answer(len(prompt), most)
        longest = body.longest_answer or min(longest, self._settings.default_max_tokens or longest)
        if body.must_call:  # stop is of texts: clients send it with every request, and it would cut the arguments
            body = body.model_copy(update={"stop": None})
        return await self._answers.give(request, body, field, [prompt], longest, reply, grammar)

    def _check_template(self) -> None:
        if not self._takes_tools:
            why = "tools is given, but the model's chat template has no place for them; leave it out"
            raise Refusal(why, "tools", "unsupported")

    def _parser(self, body: ChatBody) -> Callable[[], ToolParser] | None:
        """Return what finds calls in an answer; None if there may be none, a Refusal if their format is unknown."""
        if not body.callable_tools:
            return None
        self._check_template()
        if isinstance(body.tool_choice, NamedTool):
            return functools.partial(NamedCall, body.tool_choice.name)
        if body.tool_choice == "required":
            return RequiredCalls
        if self._format is None:
            raise Refusal(
                "tools is given, but the chat template does not tell how the model writes calls; start the server with"
                f" --tool-call-parser {'|'.join(PARSERS)}, or give tool_choice 'required'",
                "tools",
                "unsupported",
            )
        return PARSERS[self._format]


def _format_of(template: str) -> str | None:
    """Return how a model writes calls, by what its chat template shows it; None if that does not tell."""
    if "<tool_call>" in template and not any(
        other in template for other in ("<function=", "<arg_key>", "<tool_calls>")
    ):
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": dictionary' in template else None
