"""Calls in several threads, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(num_threads: int, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Result of each call, in order, while `num_threads` threads work on those that follow.

    At most two calls per thread run ahead of the consumer, so that memory stays bounded. The first exception ends the
    iteration; calls not begun are dropped.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
