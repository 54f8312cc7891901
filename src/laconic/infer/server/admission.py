"""Which requests run: as many as the cache holds, the others wait in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from laconic.infer.server.refusals import Refusal
from laconic.infer.token_engine import TokenEngine


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
