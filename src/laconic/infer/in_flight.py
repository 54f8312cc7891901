"""Requests in flight: what an engine has taken and not yet ended, and the handle of each that its caller holds."""

from __future__ import annotations

import logging
import operator
import os
import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from laconic.errors import ConfigError, LaconicError
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.token_engine import TokenListener

Cancel = Callable[["Generation", BaseException], bool]
"""Ends a request with what `result` is to raise; False if it has ended already."""


class Generation:
    """A request that an engine has taken."""

    def __init__(self, name: str, rank: int, cache_tokens: int, listener: TokenListener | None, cancel: Cancel) -> None:
        self._name, self._rank, self._cache_tokens = name, rank, cache_tokens
        self._listener, self._cancel = listener, cancel
        self._future: Future[list[int]] = Future()

    @property
    def done(self) -> bool:
        """Whether it has ended, by its last token, an error or `cancel`."""
        return self._future.done()

    def result(self, timeout_seconds: float | None = None) -> list[int]:
        """Wait for the new tokens; they end with the end-of-sequence token if it came.

        Raises:
            CollectiveError: a worker was lost, or the request failed in one.
            CancelledError: it was cancelled.
            TimeoutError: it takes longer than `timeout_seconds`.
            Exception: what its listener raised at a token.
        """
        return self._future.result(timeout_seconds)

    def cancel(self) -> bool:
        """End the request where it is; returns False if it has ended already."""
        return self._cancel(self, CancelledError())

    def _end(self, tokens: list[int], error: LaconicError | None = None) -> None:
        if error is None:
            self._future.set_result(tokens)
        else:
            self._future.set_exception(error)
        if self._listener is None:
            return
        try:
            self._listener.on_end(error)
        except Exception:  # the request has ended, and others wait for their end
            logging.getLogger("laconic").exception("the listener of %s raised at its end", self._name)


class InFlight:
    """The requests of one engine. Its methods may be called from any thread; listeners are called without its lock.

    Attributes:
        refusal: why no more requests are taken; None while they are.
    """

    def __init__(
        self, num_workers: int, max_request_tokens: int, vocabulary: int, positions: int | None = None
    ) -> None:
        self._num_workers, self._max_request_tokens, self._vocabulary = num_workers, max_request_tokens, vocabulary
        self._positions = positions
        self._lock = threading.RLock()  # reentrant: a signal handler of the same thread may close the engine
        self._taken: dict[str, Generation] = {}
        self._counter = 0
        self._pid = os.getpid()
        self.refusal: LaconicError | None = None

    @property
    def cache_tokens(self) -> int:
        """Tokens that all of them need in caches at most."""
        with self._lock:
            return sum(generation._cache_tokens for generation in self._taken.values())

    @property
    def busy_ranks(self) -> set[int]:
        """Ranks of the workers that have requests."""
        with self._lock:
            return {generation._rank for generation in self._taken.values()}

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._taken

    def take(
        self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener | None, cancel: Cancel
    ) -> tuple[Generation, dict[str, Any]]:
        """Take a request for the worker that has the fewest, and return what that has to be told of it.

        Raises `refusal`, if there is one. A ConfigError if it is empty, has or biases tokens that the model has not,
        does not fit into cache or positions, or if this is a process that was forked from the engine's.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the engine belongs to process {self._pid}, but this is process {os.getpid()}, forked from it; start"
                " an engine here, or send requests to the process that has one"
            )
        tokens = _token_ids(prompt)
        needed = self._check(tokens, sampling)
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            counts = [0] * self._num_workers
            for other in self._taken.values():
                counts[other._rank] += 1
            rank = counts.index(min(counts))
            name = f"request-{self._counter}"
            self._counter += 1
            generation = self._taken[name] = Generation(name, rank, needed, listener, cancel)
        command = {"do": "request", "name": name, "prompt": tokens, "sampling": sampling.to_options()}
        return generation, command | {"stream": listener is not None}

    def forget(self, generations: Iterable[Generation]) -> None:
        """Forget requests that have not been sent."""
        with self._lock:
            for generation in generations:
                self._taken.pop(generation._name, None)

    def cancel(self, generation: Generation, reason: BaseException) -> bool:
        """End a request with what `result` raises; False if it has ended already."""
        with self._lock:
            known = self._taken.pop(generation._name, None)
        if known is not None:
            known._future.set_exception(reason)
        return known is not None

    def hear(self, tokens: Iterable[tuple[str, ChosenToken]]) -> None:
        """Pass tokens, each with its request's name, on to who listens."""
        with self._lock:
            found = [(self._taken.get(name), token) for name, token in tokens]
        for known, token in found:
            if known is None or known._listener is None:
                continue
            try:
                known._listener.on_token(token)
            except BaseException as error:  # on a thread that reads what all requests of a worker get
                if known._cancel(known, error):
                    logging.getLogger("laconic").exception(
                        "the listener of %s raised; the request is cancelled", known._name
                    )

    def end(self, name: str, tokens: list[int], error: LaconicError | None = None) -> None:
        """End a request, if it is in flight, with its tokens or an error."""
        with self._lock:
            known = self._taken.pop(name, None)
        if known is not None:
            known._end(tokens, error)

    def withdraw(self) -> list[Generation]:
        """Take all requests out of flight; the caller ends them with `fail_all`, once it holds no lock."""
        with self._lock:
            withdrawn = list(self._taken.values())
            self._taken.clear()
        return withdrawn

    def refuse(self, error: LaconicError) -> list[Generation]:
        """Take no more requests, for the first reason that is given; returns `withdraw()`."""
        with self._lock:
            self.refusal = self.refusal or error
            return self.withdraw()

    def _check(self, prompt: list[int], sampling: Sampling) -> int:
        if not prompt:
            raise ConfigError("the prompt has 0 tokens, but it must have at least 1")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ConfigError(
                f"the prompt has tokens from {min(prompt)} to {max(prompt)}, but this model's are from 0 to"
                f" {self._vocabulary - 1}; use the tokenizer of the model"
            )
        biased = {token for tokens, _ in sampling.rules.get("sequence_bias") or () for token in tokens}
        for what, tokens in (
            ("a bias is given for tokens", biased),
            ("stop_token_ids has tokens", sampling.stop_token_ids),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise ConfigError(
                    f"{what} from {min(tokens)} to {max(tokens)}, but this model's are from 0 to"
                    f" {self._vocabulary - 1}; use the tokenizer of the model"
                )
        if (needed := len(prompt) + sampling.max_new_tokens) > self._max_request_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} need {needed} tokens"
                f" in the cache, but cache_tokens is {self._max_request_tokens}; start the engine with more"
            )
        if self._positions is not None and needed > self._positions:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} need {needed}"
                f" positions, but this model is served with {self._positions}; shorten the prompt or ask for fewer"
            )
        return needed


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ConfigError(
            f"the prompt is {reprlib.repr(prompt)}, but it must be a sequence of integers, the ids of tokens; use the"
            " tokenizer of the model, and give one prompt, not a batch"
        ) from None


def fail_all(generations: Iterable[Generation], error: LaconicError) -> None:
    """End requests that have been withdrawn."""
    for generation in generations:
        generation._end([], error)
