"""The answers of a server: admitted to the engine, given whole or as a stream, and counted."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from laconic.errors import LaconicError
from laconic.infer.sampling import Sampling
from laconic.infer.server.generation import Generation, Handover, Part
from laconic.infer.server.metrics import Metrics
from laconic.infer.server.wire import EventStream, Refusal, unless_gone

if TYPE_CHECKING:
    from laconic.infer.server.bodies import RequestBody
    from laconic.infer.server.replies import Reply
    from laconic.infer.server.settings import ServerSettings
    from laconic.infer.token_engine import TokenEngine
    from laconic.infer.tokenizer import TextTokenizer

OWN_ERROR = "an error of the server's own; its log has more"
_BURST = 32  # tokens of a whole answer that are read together: nobody sees them one by one


@dataclass(frozen=True)
class _Waiting:
    tokens: int
    start: Callable[[], None]
    started: asyncio.Future[None]


class Admission:
    """A queue, of `max_waiting` at most, before an engine's cache, for one event loop, the engine's only user."""

    def __init__(self, engine: TokenEngine, max_waiting: int, retry_after_seconds: int) -> None:
        self._engine, self._max_waiting, self._retry_after = engine, max_waiting, retry_after_seconds
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    async def admit(self, tokens: int, start: Callable[[], None]) -> None:
        """Wait until the cache has room for `tokens`, then call `start`, which submits the request.

        It is a Refusal (429) if the queue is full; `start` is called once, or never if this raises.
        """
        if not self._waiting and tokens <= self._engine.free_cache_tokens:
            start()
            return
        if len(self._waiting) >= self._max_waiting:
            raise Refusal(
                f"{len(self._waiting)} requests wait for room already; ask again later",
                code="overloaded",
                status=429,
                headers={"Retry-After": str(self._retry_after)},
            )
        waiting = _Waiting(tokens, start, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.started
        finally:
            if waiting in self._waiting:  # the client has gone: whoever waits behind may fit now
                self._waiting.remove(waiting)
                self.wake()

    def wake(self) -> None:
        """Start those at the head of the queue that fit; to be called whenever a request has left the cache."""
        while self._waiting and (
            self._engine.error is not None or self._waiting[0].tokens <= self._engine.free_cache_tokens
        ):
            waiting = self._waiting.popleft()
            if waiting.started.done():
                continue  # cancelled
            try:
                waiting.start()
            except Exception as error:
                waiting.started.set_exception(error)
            else:
                waiting.started.set_result(None)


class Answers:
    """Answers requests for text; a prompt and its answer together have `max_tokens` at most."""

    def __init__(
        self, engine: TokenEngine, tokenizer: TextTokenizer, settings: ServerSettings, metrics: Metrics
    ) -> None:
        self._engine, self._tokenizer, self._settings, self._metrics = engine, tokenizer, settings, metrics
        self._admission = Admission(engine, settings.max_waiting, settings.retry_after_seconds)
        self._handover: Handover | None = None
        self._generations: set[Generation] = set()
        self.max_tokens = min(engine.max_request_tokens, settings.max_model_tokens or engine.max_request_tokens)
        for stop, name in self._textless(engine.answer_defaults.stop, set(engine.eos_token_ids)):
            logging.getLogger("laconic").warning(
                "generation_config.json has %r in stop_strings, which ends no answer: none has the text of %r, a"
                " special token; name %r alone there, at which answers end then",
                stop,
                name,
                name,
            )

    @property
    def gauges(self) -> dict[str, int]:
        """What is so now, by its name in the metrics."""
        return {
            "requests_running": len(self._generations) - self._admission.num_waiting,
            "requests_waiting": self._admission.num_waiting,
            "cache_tokens": self._engine.cache_tokens,
            "free_cache_tokens": self._engine.free_cache_tokens,
        }

    async def give(
        self,
        request: Request,
        body: RequestBody,
        field: str,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        reply: Reply,
        grammar: str | None = None,
    ) -> Response:
        """Answer a request of HTTP, whose prompts, tokens of each, are from `field` of the body, or raise a Refusal."""
        arrival = time.monotonic()
        if body.min_tokens is not None and body.min_tokens > max_new_tokens:
            raise Refusal(
                f"min_tokens is {body.min_tokens}, but an answer without max_tokens has at most {max_new_tokens} here;"
                " give max_tokens too",
                "min_tokens",
            )
        sampling = self._sampling(body, max_new_tokens, grammar)
        for stop, name in self._textless(body.stop or (), {*self._engine.eos_token_ids, *sampling.stop_token_ids}):
            raise Refusal(
                f"stop has {stop!r}, but no answer has the text of {name!r}, a special token; give {name!r}"
                " alone, at which the answer ends then",
                "stop",
            )
        # An answer by a grammar ends where that allows no more, whatever the model's text ends at.
        stops = body.stop or (self._engine.answer_defaults.stop if body.stop is None and grammar is None else ())
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
            is_seeded=body.seed is not None,
            # A grammar sees all that tokens add to a text that has begun, such as a space in front of the first.
            continues=body.continues_prompt or grammar is not None,
        )
        self._check_size(field, prompts, max_new_tokens, generation)
        self._generations.add(generation)
        try:
            await unless_gone(request.receive, self._admission.admit(generation.cache_tokens, generation.start))
            if body.stream:
                events = _events(reply, generation, len(prompts) * (body.n or 1), body.wants_usage)
                return EventStream(events, lambda gone: self._close(generation, arrival, gone))
            parts = await unless_gone(request.receive, _collect(generation.parts()))
        except BaseException as error:
            self._close(generation, arrival, isinstance(error, ClientDisconnect))
            if isinstance(error, Exception) and not isinstance(error, Refusal | LaconicError | ClientDisconnect):
                # Answered here: behind what it lets through, uvicorn hangs up on the next request of the connection.
                logging.getLogger("laconic").exception("an answer could not be made")
                raise Refusal(OWN_ERROR, status=500) from error
            raise
        self._close(generation, arrival, False)
        return JSONResponse(reply.whole(parts, generation))

    def _sampling(self, body: RequestBody, max_new_tokens: int, grammar: str | None) -> Sampling:
        defaults = self._engine.answer_defaults
        return Sampling(
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=body.num_logprobs,
            prompt_logprobs=body.num_prompt_logprobs,
            rules=body.rules,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            ignore_eos=bool(body.ignore_eos),
            grammar=grammar,
        )

    def _textless(self, stops: Sequence[str], ends: set[int]) -> list[tuple[str, str]]:
        """Stop strings that no text can hold, each with the special token in it that does not end the answer."""
        special = self._tokenizer.special_tokens.items()
        return [
            (stop, name)
            for stop in stops
            for name, token in special
            if name in stop and name != stop and token not in ends
        ]

    def _check_size(
        self, field: str, prompts: Sequence[list[int]], max_new_tokens: int, generation: Generation
    ) -> None:
        """Refuse what does not fit however long it waits."""
        for prompt in prompts:
            if not prompt:
                raise Refusal(f"{field} has no tokens, but there must be at least one", field)
            if (needed := len(prompt) + max_new_tokens) > self.max_tokens:
                raise Refusal(
                    # Begins as OpenAI's does: clients know it by these words, and shorten the conversation
                    f"This model's maximum context length is {self.max_tokens} tokens, but {field} has {len(prompt)},"
                    f" and with an answer of {max_new_tokens} that makes {needed}; shorten {field} or max_tokens",
                    field,
                    "context_length_exceeded",
                )
        if generation.cache_tokens > self._engine.cache_tokens:
            raise Refusal(
                f"all prompts and answers together need {generation.cache_tokens} tokens, but the cache has"
                f" {self._engine.cache_tokens}; ask for fewer prompts, a smaller n or fewer max_tokens",
                field,
            )

    def _handover_here(self) -> Handover:
        loop = asyncio.get_running_loop()
        if self._handover is None or self._handover.loop is not loop:
            self._handover = Handover(loop)
        return self._handover

    def _close(self, generation: Generation, arrival: float, client_gone: bool) -> None:
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


async def _collect(parts: AsyncIterator[list[Part]]) -> list[Part]:
    return [part async for some in parts for part in some]


async def _events(reply: Reply, generation: Generation, num_choices: int, with_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events: the chunks of an answer and what ends it, or the error that did."""
    try:
        for chunk in reply.opening(num_choices):
            yield reply.frame(chunk)
        async for parts in generation.parts():
            if events := b"".join(map(reply.events, parts)):
                yield events
        for chunk in reply.closing(generation, with_usage):
            yield reply.frame(chunk)
    except Refusal as refusal:
        yield reply.frame(reply.failure(refusal))
        return
    except Exception:
        logging.getLogger("laconic").exception("an answer could not be made")
        yield reply.frame(reply.failure(Refusal(OWN_ERROR, status=500)))
        return
    yield reply.end
