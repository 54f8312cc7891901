"""The answers of one HTTP request: requests to the engine, on one event loop, as text in parts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from laconic.errors import LaconicError
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.server.text import StopFinder
from laconic.infer.server.wire import Refusal
from laconic.infer.token_engine import TokenEngine, TokenHandle
from laconic.infer.tokenizer import TextTokenizer, begun_text

FinishReason = Literal["stop", "length"]
_Event = ChosenToken | LaconicError | None


class Handover:
    """Runs calls of any thread on an event loop, in order; the loop is woken once for all that have come meanwhile.

    Waking a loop takes a system call and a change of threads, and a forward gives each of many requests a token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` soon; never if the loop has been closed, since nobody is interested any more then."""
        with self._lock:
            self._calls.append((function, args))
            if len(self._calls) > 1:
                return  # the loop has been woken, and has not taken the first yet
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            with self._lock:
                self._calls.clear()

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function, args in calls:
            try:
                function(*args)
            except Exception as error:
                self.loop.call_exception_handler({"message": f"{function.__qualname__} failed", "exception": error})


@dataclass(frozen=True)
class Part:
    """What one token adds to a choice: text, perhaps empty or that of earlier tokens, behind `offset` characters.

    The token, which may end the choice, is None if none was made; the last part has the finish_reason.
    """

    index: int
    text: str
    token: ChosenToken | None
    offset: int
    finish_reason: FinishReason | None


class Generation:
    """The choices of one HTTP request.

    Tokens come on the engine's threads and wait, in bounded number, for whoever reads `parts`. If there are more, the
    requests are cancelled, so a client that does not read costs the engine nothing.

    Args:
        engine, tokenizer: that make tokens and texts.
        prompts: tokens of each prompt; there are `num_choices` choices of each, in this order.
        num_choices: of each prompt.
        sampling: of all choices, which differ by `Sampling.request`.
        stops: strings that end a choice: in its text, or as the name of a special token, which has none.
        max_unread_tokens: that wait, those of the parts that are being read among them.
        on_freed: called, on the event loop, whenever the engine has got back a request's cache.
        handover: from the engine's threads to the event loop.
        burst: tokens that `parts` waits for, unless a request ends; 1 gives each at once.
        is_seeded: whether a client gave the seed, so that a prompt has the same choices beside others as alone; else
            equal prompts draw apart.
        continues: whether the choices' texts are those behind the prompts', and no texts of their own.

    Attributes:
        too_slow: whether it was cancelled since its parts were not taken.
        first_token_time: when the first token came, by time.monotonic; None before.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: TextTokenizer,
        prompts: Sequence[Sequence[int]],
        num_choices: int,
        sampling: Sampling,
        stops: Sequence[str],
        max_unread_tokens: int,
        on_freed: Callable[[], None],
        handover: Handover,
        burst: int = 1,
        is_seeded: bool = True,
        continues: bool = False,
    ) -> None:
        self._engine, self._on_freed, self._handover = engine, on_freed, handover
        self._events: list[tuple[int, _Event]] = []
        self._num_reading = 0
        self._is_being_checked = False
        self._arrived = asyncio.Event()
        self._max_unread, self._burst = max_unread_tokens, min(burst, max_unread_tokens)
        self._is_over = False
        stop_tokens = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else engine.eos_token_ids
        )
        self._choices = [
            _Choice(
                number * num_choices + choice,
                prompt,
                replace(sampling, request=choice if is_seeded else number * num_choices + choice),
                stop_tokens,
                tokenizer,
                stops,
                begun_text(tokenizer, prompt) if continues else ((), ""),
            )
            for number, prompt in enumerate(prompts)
            for choice in range(num_choices)
        ]
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.too_slow = False
        self.first_token_time: float | None = None

    @property
    def cache_tokens(self) -> int:
        """Tokens of the engine's cache that all choices need at most."""
        return sum(len(choice.prompt) + choice.sampling.max_new_tokens for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that have been made for the answers so far."""
        return sum(choice.count for choice in self._choices)

    def start(self) -> None:
        """Submit all choices; if the engine refuses one, with a LaconicError, none of them runs."""
        try:
            for choice in self._choices:
                listener = _Listener(self, choice.index)
                choice.handle = self._engine.stream(choice.prompt, choice.sampling, listener)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End all choices that run, and free their cache."""
        self._is_over = True
        for choice in self._choices:
            self._cancel(choice)

    async def parts(self) -> AsyncIterator[list[Part]]:
        """Yield what the tokens that have come meanwhile add to the choices, until all have finished.

        A Refusal says that the engine failed, or that the parts were not taken fast enough.
        """
        running = len(self._choices)
        while running:
            await self._arrived.wait()
            self._arrived.clear()
            events, self._events = self._events, []
            self._num_reading = len(events)
            parts: list[Part] = []
            failure: LaconicError | None = None
            for index, event in events:
                choice = self._choices[index]
                if isinstance(event, LaconicError):
                    failure = event
                    break
                if choice.finish_reason is not None:
                    continue
                try:
                    part = choice.end() if event is None else choice.push(event)
                except LaconicError as error:
                    failure = error
                    break
                parts.append(part)
                if part.finish_reason is not None:
                    running -= 1
                    if choice.found_stop:
                        self._cancel(choice)
                    if not running:
                        break
            if parts:
                yield parts
            self._num_reading = 0
            if isinstance(failure, TextError):
                raise Refusal(str(failure), code="text_differs", status=500) from failure
            if failure is not None:
                raise Refusal(f"the engine failed: {failure}", code="engine_failed", status=500) from failure

    def deliver(self, index: int, event: _Event) -> None:
        """Take an event of a choice, on any thread."""
        self._handover.call(self._take, index, event)

    def _take(self, index: int, event: _Event) -> None:
        if not isinstance(event, ChosenToken):
            self._choices[index].handle = None
            self._on_freed()
        elif self.first_token_time is None:
            self.first_token_time = time.monotonic()
        if self._is_over:
            return
        self._events.append((index, event))
        if len(self._events) >= self._burst or not isinstance(event, ChosenToken):
            self._arrived.set()
        if self._leaves_too_many and not self._is_being_checked:
            # All of them may have come at once: the reader, who has been woken, has its turn first.
            self._is_being_checked = True
            self._handover.loop.call_soon(self._check_unread)

    @property
    def _leaves_too_many(self) -> bool:
        return len(self._events) + self._num_reading > self._max_unread

    def _check_unread(self) -> None:
        self._is_being_checked = False
        if self._leaves_too_many and not self._is_over:
            self.too_slow = True
            self.cancel()
            why = f"the client left {self._max_unread} tokens unread, so its request was cancelled"
            self._events.append((0, LaconicError(why)))
            self._arrived.set()

    def _cancel(self, choice: _Choice) -> None:
        if choice.handle is not None:
            choice.handle.cancel()
            choice.handle = None
            self._on_freed()


class TextError(LaconicError):
    """The pieces of an answer are not its text."""


class _Listener:
    """Brings the events of one choice to the event loop."""

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation, self._index = generation, index

    def on_token(self, token: ChosenToken) -> None:
        self._generation.deliver(self._index, token)

    def on_end(self, error: LaconicError | None) -> None:
        self._generation.deliver(self._index, error)


class _Choice:
    """One answer: its request and its text so far."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_tokens: frozenset[int],
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        begun: tuple[Sequence[int], str],
    ) -> None:
        self.index, self.prompt, self.sampling = index, prompt, sampling
        self.handle: TokenHandle | None = None
        self.count = 0
        self.finish_reason: FinishReason | None = None
        self.found_stop = False
        self._stop_tokens = stop_tokens
        self._least = sampling.rules.get("min_new_tokens") or 0
        special = tokenizer.special_tokens
        self._special_stops = frozenset(special[stop] for stop in stops if stop in special)
        self._decode, self._detokenizer = tokenizer.decode, tokenizer.detokenizer()
        self._stopper = StopFinder(stops)
        self._tokens = list(begun[0])
        self._pieces = [self._detokenizer.push(token) for token in self._tokens]
        self._start = len(begun[1])
        self._held = begun[1].removeprefix("".join(self._pieces))  # comes with the answer's first piece
        self._offset = 0

    def push(self, token: ChosenToken) -> Part:
        self.count += 1
        if token.token in self._stop_tokens:
            return replace(self.end(), token=token)
        if token.token in self._special_stops and self._may_stop:
            part = replace(self.end(), token=token)
            self.found_stop = True
            return part
        self._tokens.append(token.token)
        offset = self._offset
        shown, self.found_stop = self._stopper.push(self._take(self._detokenizer.push(token.token)), self._may_stop)
        if self.found_stop:
            self._take(self._detokenizer.flush())
            self._check_text()
            self.finish_reason = "stop"
        elif self.count == self.sampling.max_new_tokens:
            shown += self._rest()
            self.finish_reason = "stop" if self.found_stop else "length"
        return Part(self.index, shown, token, offset, self.finish_reason)

    def end(self) -> Part:
        text = self._rest()
        self.finish_reason = "stop"
        return Part(self.index, text, None, self._offset, "stop")

    @property
    def _may_stop(self) -> bool:
        """Whether the answer has as many tokens as the request wants at least before a stop string counts."""
        return self.count > self._least

    def _rest(self) -> str:
        text, self.found_stop = self._stopper.push(self._take(self._detokenizer.flush()), self._may_stop)
        self._check_text()
        return text if self.found_stop else text + self._stopper.flush()

    def _take(self, piece: str) -> str:
        self._pieces.append(piece)
        if self._held:
            piece, self._held = piece[len(self._held) :], self._held[len(piece) :]
        self._offset += len(piece)
        return piece

    def _check_text(self) -> None:
        """Compare the pieces of the text, perhaps sent already, with that of all tokens; a TextError if they differ."""
        if (text := "".join(self._pieces)) != (whole := self._decode(self._tokens)):
            raise TextError(
                f"the pieces of this answer make {text[self._start :]!r}, but its tokens decode to"
                f" {whole[self._start :]!r}; report the model's"
                " tokenizer.json as an error of laconic, and until it is mended do not trust the pieces"
            )
