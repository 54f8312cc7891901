"""Tokens from the engine's threads to the event loop and on to a reader, in any bursts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from laconic.errors import CollectiveError
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.server.generation import Generation, Handover, Part
from laconic.infer.server.wire import Refusal
from laconic.infer.token_engine import TokenListener
from laconic.infer.tokenizer import ByteTokenizer
from tests.infer.serving import EOS


class _Loop:
    """An event loop that counts how often it is woken, and runs nothing before it is told to."""

    def __init__(self) -> None:
        self.woken: list[Any] = []
        self.failures: list[dict[str, Any]] = []
        self.closed = False

    def call_soon_threadsafe(self, function: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.woken.append(function)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def run(self) -> None:
        woken, self.woken = self.woken, []
        for function in woken:
            function()


def test_a_loop_is_woken_once_for_all_that_has_come() -> None:
    loop, done = _Loop(), list[int]()
    handover = Handover(loop)  # type: ignore[arg-type]
    for _ in range(3):
        for number in range(5):
            handover.call(done.append, number)
        assert len(loop.woken) == 1
        loop.run()
    assert done == [0, 1, 2, 3, 4] * 3


def test_a_call_that_fails_takes_no_other_with_it() -> None:
    loop, done = _Loop(), list[int]()
    handover = Handover(loop)  # type: ignore[arg-type]
    handover.call(done.append, 1)
    handover.call(done.remove, 7)
    handover.call(done.append, 2)
    loop.run()
    assert done == [1, 2]
    assert [type(failure["exception"]) for failure in loop.failures] == [ValueError]
    assert "remove" in loop.failures[0]["message"]


def test_a_closed_loop_is_left_alone() -> None:
    loop, done = _Loop(), list[int]()
    handover = Handover(loop)  # type: ignore[arg-type]
    loop.closed = True
    for number in range(3):
        handover.call(done.append, number)
    assert not handover._calls  # nothing piles up for nobody
    loop.run()
    assert not done


def test_calls_of_many_threads_all_arrive_in_the_order_of_each() -> None:
    async def hear() -> list[tuple[int, int]]:
        heard: list[tuple[int, int]] = []
        handover = Handover(asyncio.get_running_loop())

        def call(thread: int) -> None:
            for number in range(2000):
                handover.call(heard.append, (thread, number))

        threads = [threading.Thread(target=call, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return heard

    heard = asyncio.run(hear())
    for thread in range(4):
        assert [number for from_thread, number in heard if from_thread == thread] == list(range(2000))


class _Handle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> bool:
        self.cancelled = True
        return True


class _Engine:
    """Takes requests and does nothing with them."""

    max_request_tokens = cache_tokens = free_cache_tokens = 1000
    eos_token_ids = frozenset({EOS})
    error = None

    def __init__(self) -> None:
        self.listeners: list[TokenListener] = []
        self.handles: list[_Handle] = []

    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> _Handle:
        self.listeners.append(listener)
        self.handles.append(_Handle())
        return self.handles[-1]


def _generation(
    engine: _Engine, max_unread: int = 100, stops: Sequence[str] = (), num_choices: int = 1, burst: int = 1
) -> Generation:
    handover = Handover(asyncio.get_running_loop())
    sampling = Sampling(max_new_tokens=50)
    generation = Generation(
        engine, ByteTokenizer(), [[1]], num_choices, sampling, stops, max_unread, lambda: None, handover, burst
    )
    generation.start()
    return generation


def _say(listener: TokenListener, text: str) -> None:
    for token in text.encode():
        listener.on_token(ChosenToken(token))


def test_a_reader_gets_what_came_meanwhile_at_once() -> None:
    async def read() -> list[list[str]]:
        engine = _Engine()
        parts = _generation(engine).parts()
        found = []
        for text in ("abc", "d", "ef"):
            _say(engine.listeners[0], text)
            found.append([part.text for part in await anext(parts)])
        engine.listeners[0].on_end(None)
        found.append([part.finish_reason or "" for part in await anext(parts)])
        with pytest.raises(StopAsyncIteration):
            await anext(parts)
        return found

    assert asyncio.run(read()) == [["a", "b", "c"], ["d"], ["e", "f"], ["stop"]]


@pytest.mark.parametrize("max_unread", [100, 3])
def test_a_burst_is_read_when_it_is_full_or_the_answer_ends(max_unread: int) -> None:
    """A burst is never longer than what may be unread, or it would cancel its own request."""

    async def read() -> list[str]:
        engine = _Engine()
        generation = _generation(engine, max_unread, burst=4)
        found: list[str] = []

        async def collect() -> None:
            async for some in generation.parts():
                found.append("".join(part.text for part in some))

        reading = asyncio.create_task(collect())
        for letter in "abcdefghij":
            _say(engine.listeners[0], letter)
            await asyncio.sleep(0.001)
        engine.listeners[0].on_end(None)
        await reading
        assert not generation.too_slow
        return found

    assert asyncio.run(read()) == (["abcd", "efgh", "ij"] if max_unread == 100 else ["abc", "def", "ghi", "j"])


def test_nothing_is_said_after_the_end_that_a_burst_holds() -> None:
    async def read() -> tuple[list[Part], bool]:
        engine = _Engine()
        generation = _generation(engine, stops=["cd"])
        _say(engine.listeners[0], "abcdefg")
        engine.listeners[0].on_end(None)
        return [part async for some in generation.parts() for part in some], engine.handles[0].cancelled

    parts, _ = asyncio.run(read())
    assert "".join(part.text for part in parts) == "ab"
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert parts[-1].finish_reason == "stop"


def test_an_error_comes_after_what_came_before_it() -> None:
    async def read() -> str:
        engine = _Engine()
        parts = _generation(engine, num_choices=2).parts()
        _say(engine.listeners[0], "abc")
        engine.listeners[1].on_end(CollectiveError("worker 0 is lost"))
        _say(engine.listeners[0], "d")
        text = "".join(part.text for part in await anext(parts))
        with pytest.raises(Refusal, match="worker 0 is lost"):
            await anext(parts)
        return text

    assert asyncio.run(read()) == "abc"


@pytest.mark.parametrize("reads", [0, 3])
def test_tokens_that_are_being_read_count_as_unread(reads: int) -> None:
    """`reads` tokens are with a client that takes no more; the request is cancelled by one token above the limit."""

    async def overflow() -> tuple[bool, bool]:
        engine = _Engine()
        generation = _generation(engine, max_unread=8)
        parts = generation.parts()
        if reads:
            _say(engine.listeners[0], "x" * reads)
            await anext(parts)
        _say(engine.listeners[0], "y" * (8 - reads))
        await asyncio.sleep(0.01)
        before = generation.too_slow
        _say(engine.listeners[0], "z")
        await asyncio.sleep(0.01)
        await parts.aclose()  # type: ignore[attr-defined]
        return before, generation.too_slow and engine.handles[0].cancelled

    assert asyncio.run(overflow()) == (False, True)


@pytest.mark.parametrize("burst", [1, 4])
def test_a_reader_who_takes_all_is_not_too_slow_for_tokens_that_come_at_once(burst: int) -> None:
    """Three tokens of each of 16 choices in one hand-over, with a limit of 8."""

    async def read() -> tuple[str, bool]:
        engine = _Engine()
        generation = _generation(engine, max_unread=8, num_choices=16, burst=burst)
        found: list[str] = []

        async def collect() -> None:
            async for some in generation.parts():
                found.extend(part.text for part in some)

        reading = asyncio.create_task(collect())
        await asyncio.sleep(0)
        for listener in engine.listeners:
            _say(listener, "abc")
        await asyncio.sleep(0.01)
        reading.cancel()
        return "".join(found), generation.too_slow

    assert asyncio.run(read()) == ("abc" * 16, False)
