"""The server as an ASGI application: routes, keys, streams."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from laconic.errors import ConfigError, LaconicError
from laconic.infer.sampling import Sampling
from laconic.infer.server.admission import Admission
from laconic.infer.server.bodies import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody, parse_body
from laconic.infer.server.frames import PartFrames, frame
from laconic.infer.server.generation import Generation, Part
from laconic.infer.server.handover import Handover
from laconic.infer.server.metrics import CONTENT_TYPE, Metrics
from laconic.infer.server.refusals import Refusal
from laconic.infer.server.replies import ChatReply, CompletionReply, Reply
from laconic.infer.server.settings import ServerSettings
from laconic.infer.token_engine import TokenEngine
from laconic.infer.tokenizer import TextTokenizer

__all__ = ["create_app"]

_T = TypeVar("_T")
_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_OWN_ERROR = "an error of the server's own; its log has more"
_BURST = 32  # tokens of a whole answer that are read together: nobody sees them one by one


def create_app(
    engine: TokenEngine, tokenizer: TextTokenizer, settings: ServerSettings, lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """Return an ASGI application that serves a model as OpenAI's API does.

    It has POST /v1/completions, /v1/chat/completions, /tokenize and /detokenize, GET /v1/models, /v1/models/{id},
    /health, /ready and /metrics, and no more. The engine stays the caller's, who closes it after the server has ended.
    One process serves: run one worker.

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
        self._admission = Admission(engine, settings.max_waiting, settings.retry_after_seconds)
        self._metrics = Metrics()
        self._handover: Handover | None = None
        self._generations: set[Generation] = set()
        self._created = int(time.time())
        self._max_tokens = min(engine.max_request_tokens, settings.max_model_tokens or engine.max_request_tokens)

    def app(self, lifespan: Lifespan[Starlette] | None) -> Starlette:
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
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
            app.add_middleware(_RequireKey, api_key=self._settings.api_key)
        app.add_middleware(_CountAnswers, answers=self._metrics.answers, paths={route.path for route in routes})
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
        return head | {"max_model_len": self._max_tokens}

    async def _tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await _read(request, self._settings))
        self._check_model(body.model)
        if body.messages is not None:
            tokens = await self._encode_chat(body.messages)
        else:
            tokens = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "")
        names = [self._tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
        count = {"count": len(tokens), "max_model_len": self._max_tokens}
        return JSONResponse(count | {"tokens": tokens, "token_strs": names})

    async def _detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await _read(request, self._settings))
        self._check_model(body.model)
        return JSONResponse({"prompt": await asyncio.to_thread(self._tokenizer.decode, body.tokens)})

    async def _show_metrics(self, request: Request) -> Response:
        gauges = {
            "requests_running": len(self._generations) - self._admission.num_waiting,
            "requests_waiting": self._admission.num_waiting,
            "cache_tokens": self._engine.cache_tokens,
            "free_cache_tokens": self._engine.free_cache_tokens,
        }
        return Response(self._metrics.text(gauges), media_type=CONTENT_TYPE)

    async def _completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await _read(request, self._settings))
        self._check_model(body.model)
        prompts = [
            await asyncio.to_thread(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        reply = CompletionReply(
            self._settings.model_name, self._tokenizer, body.logprobs is not None, body.names_tokens_by_id
        )
        return await self._answer(request, body, "prompt", prompts, _DEFAULT_COMPLETION_TOKENS, reply)

    async def _chat(self, request: Request) -> Response:
        body = parse_body(ChatBody, await _read(request, self._settings))
        self._check_model(body.model)
        prompt = await self._encode_chat(body.messages)
        default = self._engine.answer_defaults.longest_answer(len(prompt), self._max_tokens)
        default = min(default, self._settings.default_max_tokens or default)
        reply = ChatReply(self._settings.model_name, self._tokenizer, bool(body.logprobs), body.names_tokens_by_id)
        return await self._answer(request, body, "messages", [prompt], default, reply)

    async def _encode_chat(self, messages: list[Message]) -> list[int]:
        try:
            return await asyncio.to_thread(self._tokenizer.encode_chat, [each.for_template() for each in messages])
        except ConfigError as error:
            raise Refusal(400, str(error), "messages") from error

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != (name := self._settings.model_name):
            raise Refusal(404, f"model is {model!r}, but only {name!r} is served here", "model", "model_not_found")

    async def _answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        field: str,
        prompts: list[list[int]],
        default_max_tokens: int,
        reply: Reply,
    ) -> Response:
        arrival = time.monotonic()
        defaults = self._engine.answer_defaults
        stops = defaults.stop if body.stop is None else body.stop
        sampling = Sampling(
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else body.top_k,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            max_new_tokens=body.longest_answer or default_max_tokens,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=body.num_logprobs,
            rules=body.rules,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            ignore_eos=bool(body.ignore_eos),
        )
        generation = Generation(
            self._engine,
            self._tokenizer,
            prompts,
            body.n or 1,
            sampling,
            stops,
            self._settings.max_unread_tokens,
            self._admission.wake,
            self._handover_here(),
            burst=1 if body.stream or stops else _BURST,
        )
        self._check_size(field, prompts, sampling.max_new_tokens, generation)
        self._generations.add(generation)
        try:
            await _unless_gone(request.receive, self._admission.admit(generation.cache_tokens, generation.start))
            if body.stream:
                with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
                num_choices = len(prompts) * (body.n or 1)
                events = _events(reply, generation, num_choices, with_usage)
                return _EventStream(events, lambda gone: self._close(generation, arrival, gone))
            parts = await _unless_gone(request.receive, _collect(generation.parts()))
        except BaseException as error:
            self._close(generation, arrival, isinstance(error, ClientDisconnect))
            if isinstance(error, Exception) and not isinstance(error, Refusal | LaconicError | ClientDisconnect):
                # Answered here: behind what it lets through, uvicorn hangs up on the next request of the connection.
                logging.getLogger("laconic").exception("an answer could not be made")
                raise Refusal(500, _OWN_ERROR) from error
            raise
        self._close(generation, arrival, False)
        return JSONResponse(reply.whole(parts, generation))

    def _check_size(self, field: str, prompts: list[list[int]], max_new_tokens: int, generation: Generation) -> None:
        """Refuse what does not fit however long it waits."""
        for prompt in prompts:
            if not prompt:
                raise Refusal(400, f"{field} has no tokens, but there must be at least one", field)
            if (needed := len(prompt) + max_new_tokens) > self._max_tokens:
                raise Refusal(
                    400,
                    f"{field} has {len(prompt)} tokens, and with an answer of {max_new_tokens} that makes {needed}, but"
                    f" this model serves at most {self._max_tokens}; shorten {field} or max_tokens",
                    field,
                    "context_length_exceeded",
                )
        if generation.cache_tokens > self._engine.cache_tokens:
            raise Refusal(
                400,
                f"all prompts and answers together need {generation.cache_tokens} tokens, but the cache has"
                f" {self._engine.cache_tokens}; ask for fewer prompts or a smaller n",
                field,
            )

    def _handover_here(self) -> Handover:
        """Return the handover of all requests to the loop that runs."""
        loop = asyncio.get_running_loop()
        if self._handover is None or self._handover.loop is not loop:
            self._handover = Handover(loop)
        return self._handover

    def _close(self, generation: Generation, arrival: float, client_gone: bool) -> None:
        """End a request: cancel what still runs and count it."""
        generation.cancel()
        self._generations.discard(generation)
        if generation.too_slow:
            self._metrics.cancelled["slow_client"] += 1
        elif client_gone:
            self._metrics.cancelled["disconnect"] += 1
        if generation.first_token_time is not None:
            self._metrics.tokens["prompt"] += generation.prompt_tokens
            self._metrics.tokens["completion"] += generation.completion_tokens
            self._metrics.first_token_seconds.add(generation.first_token_time - arrival)
            self._metrics.request_seconds.add(time.monotonic() - arrival)


async def _read(request: Request, settings: ServerSettings) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: it is not JSON by its header (415), too long (413), or does not come in time (408).
    """
    max_bytes, seconds = settings.max_body_bytes, settings.max_body_seconds
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites can send anything else without asking the browser
        raise Refusal(415, f"Content-Type is {kind!r}, but it must be application/json")
    too_long = Refusal(413, f"the body has more than {max_bytes} bytes, which is the most that is read")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_bytes:
                    raise too_long
    except TimeoutError:
        # The rest of the body would be read as the next request.
        raise Refusal(
            408, f"the body has not arrived within {seconds} s; send it again", headers={"Connection": "close"}
        ) from None
    return bytes(content)


async def _collect(parts: AsyncIterator[list[Part]]) -> list[Part]:
    return [part async for some in parts for part in some]


async def _events(reply: Reply, generation: Generation, num_choices: int, with_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events: the chunks of an answer and [DONE], or the error that ended it."""
    frames = PartFrames(reply)
    try:
        for chunk in reply.opening(num_choices):
            yield frame(chunk)
        async for parts in generation.parts():
            if events := b"".join([frames.of(part) for part in parts]):
                yield events
        if with_usage:
            yield frame(reply.usage_chunk(generation))
    except Refusal as refusal:
        yield frame(refusal.body())
        return
    except Exception:
        logging.getLogger("laconic").exception("an answer could not be made")
        yield frame(Refusal(500, _OWN_ERROR).body())
        return
    yield b"data: [DONE]\n\n"


class _EventStream(Response):
    """Sends events as they come, until there are no more or the client has gone.

    Args:
        events: to send.
        close: called at the end, with whether the client has gone before.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[bool], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False
        try:
            await _unless_gone(receive, self._send(send))
        except (ClientDisconnect, OSError):
            gone = True
        finally:
            self._close(gone)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns, and cancel it if the client goes away before.

    Raises:
        ClientDisconnect: the client has gone.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = [working, asyncio.ensure_future(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _RequireKey:
    """Lets only requests with the key through, and those for /health and /ready."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._digest = app, hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", "/ready") and not self._has_key(scope):
            refusal = Refusal(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests have one length, so the comparison takes the same time for all keys.
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(key).digest(), self._digest)


class _CountAnswers:
    """Counts answers by path and status; paths that are not served count as one."""

    def __init__(self, app: ASGIApp, answers: dict[tuple[str, int], int], paths: set[str]) -> None:
        self._app, self._answers, self._paths = app, answers, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                path = "/v1/models" if scope["path"].startswith("/v1/models/") else scope["path"]
                path = path if path in self._paths else "other"
                self._answers[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _not_taken(request: Request, error: Exception) -> Response:
    return Refusal(400, str(error)).response()


async def _failed(request: Request, error: Exception) -> Response:
    return Refusal(503, f"the engine takes no requests: {error}", code="engine_failed").response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the counters: nobody reads it


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Refusal(error.status_code, f"{request.method} {request.url.path} is not served here").response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refusal(500, _OWN_ERROR).response()
