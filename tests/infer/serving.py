"""A deterministic engine without a model, and servers on free ports of this host."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn

from laconic.errors import CollectiveError, ConfigError, LaconicError
from laconic.infer.generation_config import AnswerDefaults
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.server import ServerSettings, TextTokenizer, TokenListener, create_app
from tests.distributed.processes import wait_until

EOS = 256
MODEL = "tiny"


def answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """The tokens of FakeEngine: letters that a hash of prompt, seed and request gives."""
    key = f"{list(prompt)} {sampling.seed} {sampling.request}".encode()
    text = b"".join(hashlib.sha256(key + b"%d" % number).hexdigest().encode() for number in range(64))
    return list(text[: sampling.max_new_tokens])


def report(prompt: Sequence[int], count: int | None) -> tuple[ChosenToken, ...]:
    """Logprobs of a prompt, of FakeEngine: each token has that of its place."""
    if count is None:
        return ()
    made = [ChosenToken(token, -float(place), ((token, -float(place)),)[:count]) for place, token in enumerate(prompt)]
    return (ChosenToken(prompt[0]), *made[1:])


@dataclass
class _Request:
    tokens: list[int]
    sampling: Sampling
    listener: TokenListener
    cache_tokens: int
    engine: FakeEngine
    prompt: Sequence[int]
    count: int = 0

    def cancel(self) -> bool:
        return self.engine.forget(self)


class FakeEngine:
    """One thread that gives each request in flight a token, then waits `step_seconds`.

    Attributes:
        answer: what is generated.
        paused: no tokens come while it is set.
        peak: largest number of cache tokens that were taken.
    """

    eos_token_ids = frozenset({EOS})
    answer_defaults = AnswerDefaults()

    def __init__(
        self,
        answer: Callable[[Sequence[int], Sampling], list[int]] = answer,
        step_seconds: float = 0.0005,
        cache_tokens: int = 4096,
    ) -> None:
        self.answer, self.cache_tokens, self.max_request_tokens = answer, cache_tokens, min(512, cache_tokens)
        self.error: LaconicError | None = None
        self.is_ready = True
        self.paused = threading.Event()
        self.peak = 0
        self._step_seconds = step_seconds
        self._requests: list[_Request] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def free_cache_tokens(self) -> int:
        return self.cache_tokens - sum(request.cache_tokens for request in list(self._requests))

    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> _Request:
        if self.error is not None:
            raise self.error
        if max(prompt) > EOS:
            raise ConfigError(f"the prompt has tokens up to {max(prompt)}, but this model's are from 0 to {EOS}")
        tokens = self.answer(prompt, sampling)
        request = _Request(tokens, sampling, listener, len(prompt) + sampling.max_new_tokens, self, prompt)
        with self._lock:
            self._requests.append(request)
            self.peak = max(self.peak, self.cache_tokens - self.free_cache_tokens)
            assert self.peak <= self.cache_tokens
        return request

    def says(self, text: str) -> list[Sampling]:
        """Answer `text` from now on; returns what is asked."""
        asked: list[Sampling] = []

        def answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            asked.append(sampling)
            return [*text.encode(), EOS][: sampling.max_new_tokens]

        self.answer = answer
        return asked

    def forget(self, request: _Request) -> bool:
        with self._lock:
            known = request in self._requests
            if known:
                self._requests.remove(request)
        return known

    def fail(self, message: str) -> None:
        self.error = CollectiveError(message)
        with self._lock:
            failed, self._requests = self._requests, []
        for request in failed:
            request.listener.on_end(self.error)

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            for request in [] if self.paused.is_set() else list(self._requests):
                token = request.tokens[request.count]
                request.count += 1
                logprobs = request.sampling.logprobs
                top = () if logprobs is None else tuple((65 + n, -1.0 - n) for n in range(logprobs))
                prompt = () if request.count > 1 else report(request.prompt, request.sampling.prompt_logprobs)
                request.listener.on_token(ChosenToken(token, None if logprobs is None else -0.5, top, prompt))
                if request.count == len(request.tokens) and self.forget(request):
                    request.listener.on_end(None)
            time.sleep(self._step_seconds)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Serve `app` with uvicorn on a free port; yields the URL."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=75))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def client_of(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of a server."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@contextmanager
def served(engine: Any, tokenizer: TextTokenizer, **settings: Any) -> Iterator[openai.OpenAI]:
    """A client of a server over `engine`."""
    with running(create_app(engine, tokenizer, ServerSettings(MODEL, **settings))) as url, client_of(url) as client:
        yield client
