"""An engine as the server sees it: requests whose tokens come one by one. laconic.infer.Engine is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from laconic.errors import LaconicError
from laconic.infer.generation_config import AnswerDefaults
from laconic.infer.sampling import ChosenToken, Sampling


class TokenListener(Protocol):
    """Hears of one request, on any of the engine's threads, one call after the other; calls must not block.

    What `on_token` raises ends the request, without `on_end`; what `on_end` raises is logged.
    """

    def on_token(self, token: ChosenToken) -> None:
        """Take the next token."""

    def on_end(self, error: LaconicError | None) -> None:
        """Take the end: the last call, after the last token, or what ended the request early.

        A request that was cancelled has no end. After an error a token may still come, which means nothing.
        """


class TokenHandle(Protocol):
    """A request that an engine has taken."""

    def cancel(self) -> bool:
        """End the request where it is and free its cache; returns False if it has ended already."""


class TokenEngine(Protocol):
    """Generates tokens for many requests at once."""

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request, prompt and answer together."""

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests that can be in flight at once."""

    @property
    def free_cache_tokens(self) -> int:
        """What requests in flight, each with its prompt and its longest answer, leave of `cache_tokens`."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end any request; the last token of an answer may be one."""

    @property
    def answer_defaults(self) -> AnswerDefaults:
        """What an answer gets whose request does not say."""

    @property
    def error(self) -> LaconicError | None:
        """What ended the engine; None while it takes requests."""

    @property
    def is_ready(self) -> bool:
        """Whether a request would run now; it waits while workers start again."""

    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> TokenHandle:
        """Start a request and return at once.

        A ConfigError if it is empty or does not fit into the cache, a CollectiveError if the engine has lost a worker
        or ended.
        """
