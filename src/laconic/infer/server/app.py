"""The server as an ASGI application: its routes, and what every one of them may answer."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Lifespan

from laconic.errors import ConfigError, LaconicError
from laconic.infer.server.answers import OWN_ERROR, Answers
from laconic.infer.server.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from laconic.infer.server.conversation import ChatMessage, NamedTool, Tool, in_order_of_calls
from laconic.infer.server.metrics import CONTENT_TYPE, Metrics
from laconic.infer.server.replies import ChatReply, CompletionReply
from laconic.infer.server.responses import ResponseReply, ResponsesBody
from laconic.infer.server.settings import ServerSettings
from laconic.infer.server.structure import grammar_of
from laconic.infer.server.tool_calls import PARSERS, NamedCall, RequiredCalls, ToolParser
from laconic.infer.server.wire import CountAnswers, Refusal, RequireKey, read_body
from laconic.infer.token_engine import TokenEngine
from laconic.infer.tokenizer import TextTokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_LONG_BODY_NBYTES = 2**16  # from here on reading takes milliseconds, for which no stream should stand still


def create_app(
    engine: TokenEngine, tokenizer: TextTokenizer, settings: ServerSettings, lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """Return an ASGI application that serves a model as OpenAI's API does.

    It has POST /v1/completions, /v1/chat/completions, /v1/responses, /tokenize and /detokenize, GET /v1/models,
    /v1/models/{id}, /health, /ready and /metrics, and no more. The engine stays the caller's, who closes it after the
    server has ended. One process serves: run one worker.

    Args:
        engine: that makes the tokens; it must have no other user.
        tokenizer: of its model.
        settings: of the server.
        lifespan: context of the time in which the application serves, as Starlette's.
    """
    return _Server(engine, tokenizer, settings).app(lifespan)


class _Server:
    def __init__(self, engine: TokenEngine, tokenizer: TextTokenizer, settings: ServerSettings) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._metrics = Metrics()
        self._answers = Answers(engine, tokenizer, settings, self._metrics)
        template = tokenizer.chat_template or ""
        self._takes_tools = "tools" in template
        self._call_format = settings.tool_call_parser or _call_format(template)
        self._created = int(time.time())

    def app(self, lifespan: Lifespan[Starlette] | None) -> Starlette:
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{id:path}", self._one_model, methods=["GET"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={
                Refusal: _refused,
                ConfigError: _not_taken,
                LaconicError: _failed,
                ClientDisconnect: _gone,
                HTTPException: _no_route,
                500: _broken,
            },
        )
        app.router.redirect_slashes = False
        if self._settings.api_key is not None:
            app.add_middleware(RequireKey, api_key=self._settings.api_key)
        app.add_middleware(CountAnswers, answers=self._metrics.answers, paths={route.path for route in routes})
        if origins := self._settings.allowed_origins:
            # Before the key: a browser asks without one whether it may ask.
            app.add_middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        return app

    async def _health(self, request: Request) -> Response:
        if self._engine.error is not None:
            return JSONResponse({"status": "failed", "error": str(self._engine.error)}, 503)
        return JSONResponse({"status": "ok" if self._engine.is_ready else "restarting"})

    async def _ready(self, request: Request) -> Response:
        if self._engine.error is None and not self._engine.is_ready:
            return JSONResponse({"status": "restarting"}, 503)
        return await self._health(request)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        head = {"id": self._settings.model_name, "object": "model", "created": self._created, "owned_by": "laconic"}
        return head | {"max_model_len": self._answers.max_tokens}

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(TokenizeBody, request)
        self._check_model(body.model)
        if body.messages is not None:
            tokens = await self._encode_chat(body.messages, body.tools or (), body.chat_template_kwargs, "messages")
        else:
            tokens = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "")
        names = [self._tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
        count = {"count": len(tokens), "max_model_len": self._answers.max_tokens}
        return JSONResponse(count | {"tokens": tokens, "token_strs": names})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(DetokenizeBody, request)
        self._check_model(body.model)
        self._check_known("tokens", body.tokens)
        return JSONResponse({"prompt": await asyncio.to_thread(self._tokenizer.decode, body.tokens)})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(self._answers.gauges), media_type=CONTENT_TYPE)

    async def _completions(self, request: Request) -> Response:
        body = await self._body(CompletionBody, request)
        self._check_model(body.model)
        grammar = await asyncio.to_thread(grammar_of, body, self._engine)
        prompts = [
            await asyncio.to_thread(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        texts = None
        if body.echo:
            for prompt in body.prompt:
                if not isinstance(prompt, str):
                    self._check_known("prompt", prompt)
            texts = [
                prompt if isinstance(prompt, str) else await asyncio.to_thread(self._tokenizer.decode, prompt)
                for prompt in body.prompt
                for _ in range(body.n or 1)
            ]
        reply = CompletionReply(
            self._settings.model_name,
            self._tokenizer,
            body.logprobs is not None,
            bool(body.return_tokens_as_token_ids),
            texts,
            only_prompts=body.max_tokens == 0,
        )
        longest = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        return await self._answers.give(request, body, "prompt", prompts, longest, reply, grammar)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(ChatBody, request)
        self._check_model(body.model)
        reply = ChatReply(
            self._settings.model_name,
            self._tokenizer,
            bool(body.logprobs),
            bool(body.return_tokens_as_token_ids),
            self._tool_parser(body),
            one_call=body.parallel_tool_calls is False,
        )
        return await self._answer_chat(request, body, "messages", reply, "response_format")

    async def _responses(self, request: Request) -> Response:
        body = await self._body(ResponsesBody, request)
        self._check_model(body.model)
        chat = body.to_chat()
        reply = ResponseReply(self._settings.model_name, self._tokenizer, body, self._tool_parser(chat))
        return await self._answer_chat(request, chat, "input", reply, "text.format")

    async def _answer_chat(
        self, request: Request, body: ChatBody, field: str, reply: ChatReply, format_field: str
    ) -> Response:
        grammar = await asyncio.to_thread(grammar_of, body, self._engine, format_field)
        prompt = await self._encode_chat(body.messages, body.callable_tools, body.chat_template_kwargs, field)
        # Of several choices, whose longest answer nobody has named, all must fit into the cache at once.
        most = min(self._answers.max_tokens, self._engine.cache_tokens // (body.n or 1))
        longest = self._engine.answer_defaults.longest_answer(len(prompt), most)
        longest = body.longest_answer or min(longest, self._settings.default_max_tokens or longest)
        if body.must_call:  # stop is of texts: clients send it with every request, and it would cut the arguments
            body = body.model_copy(update={"stop": None})
        return await self._answers.give(request, body, field, [prompt], longest, reply, grammar)

    async def _encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], variables: dict[str, Any] | None, field: str
    ) -> list[int]:
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

    def _check_template(self) -> None:
        if not self._takes_tools:
            why = "tools is given, but the model's chat template has no place for them; leave it out"
            raise Refusal(why, "tools", "unsupported")

    def _tool_parser(self, body: ChatBody) -> Callable[[], ToolParser] | None:
        """Return what finds calls in an answer; None if there may be none, a Refusal if their format is unknown."""
        if not body.callable_tools:
            return None
        self._check_template()
        if isinstance(body.tool_choice, NamedTool):
            return functools.partial(NamedCall, body.tool_choice.name)
        if body.tool_choice == "required":
            return RequiredCalls
        if self._call_format is None:
            raise Refusal(
                "tools is given, but the chat template does not tell how the model writes calls; start the server with"
                f" --tool-call-parser {'|'.join(PARSERS)}, or give tool_choice 'required'",
                "tools",
                "unsupported",
            )
        return PARSERS[self._call_format]

    async def _body(self, kind: type[Body], request: Request) -> Body:
        # A query string may have what proxies and clients add (api-version), but no field goes in it unheard
        for name in request.query_params:
            if name in kind.model_fields or name in kind.neutral:
                raise Refusal(f"{name} is in the query string, where it is not read; put it into the body", name)
        content = await read_body(request, self._settings)
        if len(content) < _LONG_BODY_NBYTES:
            return parse_body(kind, content)
        return await asyncio.to_thread(parse_body, kind, content)

    def _check_known(self, field: str, tokens: list[int]) -> None:
        """Refuse to show tokens that have no text because there are none such."""
        if unknown := [token for token in tokens if not self._tokenizer.knows(token)]:
            raise Refusal(f"{field} has the token {unknown[0]}, which is none of the model's tokenizer", field)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != (name := self._settings.model_name):
            raise Refusal(
                f"model is {model!r}, but only {name!r} is served here", "model", "model_not_found", status=404
            )


def _call_format(template: str) -> str | None:
    """Return how a model writes calls, by what its chat template shows it; None if that does not tell."""
    if "<tool_call>" in template and not any(
        other in template for other in ("<function=", "<arg_key>", "<tool_calls>")
    ):
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": dictionary' in template else None


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _not_taken(request: Request, error: Exception) -> Response:
    return Refusal(str(error)).response()


async def _failed(request: Request, error: Exception) -> Response:
    return Refusal(f"the engine takes no requests: {error}", code="engine_failed", status=503).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the counters: nobody reads it


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Refusal(f"{request.method} {request.url.path} is not served here", status=error.status_code).response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refusal(OWN_ERROR, status=500).response()
