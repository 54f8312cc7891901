"""Runs requests through an engine: all at once for tokens per second, at given times for latency."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from laconic.errors import LaconicError
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.token_engine import TokenEngine, TokenListener


@dataclass
class Answer:
    """What came of a request; times in seconds of `time.perf_counter`.

    `arrival` is when the request was due, whether or not it was submitted later, `times` when each token was heard of.
    """

    arrival: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the arrival to the first token (TTFT)."""
        return self.times[0] - self.arrival

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds from one token to the next (TPOT); None for an answer of one token."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None


class Listener(TokenListener):
    """Notes the tokens of one request, which arrived at `arrival`, seconds of `time.perf_counter`."""

    def __init__(self, arrival: float = 0.0) -> None:
        self._answer = Answer(arrival)
        self._error: LaconicError | None = None
        self._ended = threading.Event()

    def on_token(self, token: ChosenToken) -> None:
        self._answer.times.append(time.perf_counter())
        self._answer.tokens.append(token.token)

    def on_end(self, error: LaconicError | None) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> Answer:
        """Wait for the end and return what was heard; a request that failed raises its LaconicError."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._answer


def run_together(engine: TokenEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answer]:
    """Submit all requests at once and return their answers, in order; see run_at."""
    return run_at(engine, prompts, max_new_tokens, [0.0] * len(prompts))


def run_at(
    engine: TokenEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, arrivals: Sequence[float]
) -> list[Answer]:
    """Submit each request at its time, however far behind the engine is, and return the greedy answers, in order.

    `arrivals` are seconds from the call, ascending; the engine has no other requests. What it refuses, or fails with,
    is raised.
    """
    start = time.perf_counter()
    listeners = []
    for prompt, seconds in zip(prompts, arrivals, strict=True):
        if (wait := start + seconds - time.perf_counter()) > 0:
            time.sleep(wait)
        listeners.append(Listener(start + seconds))
        engine.stream(prompt, Sampling(max_new_tokens=max_new_tokens), listeners[-1])
    return [listener.wait() for listener in listeners]
