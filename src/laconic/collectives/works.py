"""torch's handles of operations under way, as process groups return them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import lane

__all__ = ["AfterWork", "LaneWork", "Together"]

_NO_TIMEOUT = timedelta()


class _TensorsWork(dist.Work):
    """A work whose result is a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class LaneWork(_TensorsWork):
    """A collective in a lane, as torch's C++ and Python want to see it."""

    def __init__(self, work: lane.Work[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._work = work

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if timeout > _NO_TIMEOUT:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a collective was not done within {timeout}; it goes on")
                time.sleep(0.001)
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        def value(done: torch.futures.Future[Any]) -> list[Tensor]:
            done.value()
            return self._tensors

        return self._work.get_future().then(value)


class AfterWork(_TensorsWork):
    """Another work, and something to do once it is done, such as decoding what arrived.

    It is done by whoever finds out first: `wait`, or `is_completed` when it says so.
    """

    def __init__(self, work: dist.Work, tensors: Sequence[Tensor], then: Callable[[], object]) -> None:
        super().__init__(tensors)
        self._work = work
        self._then: Callable[[], object] | None = then
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._work.wait(timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        return self._then is None

    def get_future(self) -> torch.futures.Future[Any]:
        def value(done: torch.futures.Future[Any]) -> list[Tensor]:
            done.value()
            self._finish()
            return self._tensors

        return self._work.get_future().then(value)

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank

    def _finish(self) -> None:
        with self._lock:
            if self._then is not None:
                self._then()
                self._then = None


class Together(_TensorsWork):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        # All of them, so that nothing writes into tensors whose owner was told of an error.
        errors: list[Exception] = []
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def get_future(self) -> torch.futures.Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])

        def value(done: torch.futures.Future[Any]) -> list[Tensor]:
            for future in done.value():
                future.value()
            return self._tensors

        return futures.then(value)
