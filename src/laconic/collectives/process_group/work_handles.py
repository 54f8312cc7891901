"""Work handles of torch for operations under way, as process groups return them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from laconic.collectives.runtime.background import BackgroundWork, Groups, TensorsWork, run_in_background
from laconic.collectives.runtime.callbacks import CallbackQueue, CallsBack, follow, queue_of
from laconic.collectives.runtime.failure_diagnosis import broken_off
from laconic.collectives.runtime.thread_state import as_here
from laconic.collectives.runtime.torch_compat import untraced
from laconic.errors import CollectiveTimeoutError

_NO_TIMEOUT = timedelta()

_GOES_ON = "Operation timed out"
"""What torch says where the time to wait is over, and not that of the operation."""


def _deadline_of(timeout: timedelta) -> float | None:
    return time.monotonic() + timeout.total_seconds() if timeout > _NO_TIMEOUT else None


def _left_until(deadline: float) -> timedelta:
    """The time that is left, and 1 ms if none is: 0 would be no timeout."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _late_callback(name: str, timeout: timedelta) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"a callback of the future of {name} was not done within {timeout}; it goes on")


class Ordered:
    """A group whose calls on CPU tensors run in its executor, so that also raw calls of callbacks keep their order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        method = getattr(self._group, name)

        def call(*args: Any, **kwargs: Any) -> dist.Work:
            tensors = [x for x in tree_leaves(list(args)) if isinstance(x, Tensor)]
            if self._group.size() == 1 or any(x.device.type != "cpu" for x in tensors):
                return method(*args, **kwargs)

            def job(groups: Groups) -> None:
                getattr(groups[0], name)(*args, **kwargs).wait()

            return BackgroundWork(run_in_background(job, (self._group,), torch.device("cpu")), tensors)

        return call


@untraced
class RawWork(CallsBack, dist.Work):
    """A collective of the backend, whose errors name the rank that was lost.

    Callbacks of its future may wait; gloo's own threads would run out.
    """

    def __init__(self, work: dist.Work, group: dist.ProcessGroup, name: str) -> None:
        super().__init__()
        self._work, self._group, self._name = work, group, name

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for it and its callbacks; CollectiveError if it gave up, CollectiveTimeoutError after `timeout`."""
        deadline = _deadline_of(timeout)
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            if timeout > _NO_TIMEOUT and _GOES_ON in str(error):
                raise CollectiveTimeoutError(f"{self._name} was not done within {timeout}; it goes on") from error
            raise broken_off(self._name, self._group, error) from error
        if not self._settle(deadline):
            raise _late_callback(self._name, timeout)
        return True

    def is_completed(self) -> bool:
        """Whether the backend has finished, and callbacks have run."""
        return self._work.is_completed() and self._is_settled()

    def is_success(self) -> bool:
        """Whether the backend has finished without an error."""
        return self._work.is_success()

    def result(self) -> list[Tensor]:
        """Tensors that the backend returns."""
        return self._work.result()

    def synchronize(self) -> None:
        """Make the current stream wait, as the backend does."""
        self._work.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """The backend's future, with callbacks that may wait."""
        explain = functools.partial(broken_off, self._name, self._group)
        return self._give(follow(self._work.get_future(), queue_of(self._group), explain))


@untraced
class AfterWork(TensorsWork):
    """Another work, and a function to run once it is done, such as decoding what arrived.

    It runs in the first call that finds the work done: `wait`, `is_completed` or a callback of the future.
    """

    def __init__(self, work: dist.Work, tensors: Sequence[Tensor], then: Callable[[], object]) -> None:
        super().__init__(tensors)
        self._work = work
        self._then: Callable[[], object] | None = as_here(then, tensors)
        self._lock = threading.Lock()
        self._kept: set[AfterWork] = set()

    def kept_in(self, kept: set[AfterWork]) -> AfterWork:
        """Let a group keep this work until its function has run, so that a barrier finds it if its caller does not."""
        for one in [*kept]:
            if one._tensors and one._tensors[0].is_cpu:  # a query of CUDA would break off a graph's capture
                one.is_completed()
        self._kept = kept
        kept.add(self)
        return self

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the work, then run the function unless it has run."""
        try:
            self._work.wait(timeout)
        except Exception:
            if timeout <= _NO_TIMEOUT:  # it does not go on: no later barrier has to wait for it
                self._kept.discard(self)
            raise
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the work is done; runs the function then unless it has run."""
        if not self._work.is_completed():
            return False
        self._finish()
        return True

    def is_success(self) -> bool:
        """Whether the function has run."""
        return self._then is None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that runs the function first."""

        def value(done: torch.futures.Future[Any]) -> list[Tensor]:
            done.value()
            self._finish()
            return self._tensors

        return self._work.get_future().then(value)

    def source_rank(self) -> int:
        """Group rank that the message came from."""
        return self._work._source_rank()

    _source_rank = source_rank

    def _finish(self) -> None:
        with self._lock:
            if self._then is not None:
                self._kept.discard(self)
                self._then()
                self._then = None


def after(work: dist.Work, do: Callable[[], object], tensors: Sequence[Tensor]) -> dist.Work:
    """Run `do` after `work`, with `tensors` as the result."""
    return work.then(do, tensors) if isinstance(work, BackgroundWork) else AfterWork(work, tensors, do)


@untraced
class PeerWork(TensorsWork):
    """A send or receive of the backend, whose error becomes one that names the peer: `explain` of it and `call`.

    A wait without a timeout takes that of `options` now, as gloo would take the one that the group was made with.
    """

    def __init__(
        self,
        work: dist.Work,
        tensors: list[Tensor],
        explain: Callable[..., Exception],
        call: tuple[Any, ...],
        options: Any,
    ) -> None:
        dist.Work.__init__(self)  # a frame less: short messages wait for this
        self._tensors, self._work, self._explain, self._call = tensors, work, explain, call
        self._options = options

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the backend; its RuntimeError becomes the error of `explain`."""
        try:
            return self._work.wait(timeout if timeout or self._options is None else self._options._timeout)
        except RuntimeError as error:
            raise self._explain(error, *self._call) from error

    def is_completed(self) -> bool:
        """Whether the backend has finished."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the backend has finished without an error."""
        return self._work.is_success()

    def get_future(self) -> torch.futures.Future[Any]:
        """The backend's future; its errors do not name the peer."""
        return self._work.get_future()

    def source_rank(self) -> int:
        """Group rank that the message came from."""
        return self._work._source_rank()

    _source_rank = source_rank


@untraced
class WorkGroup(CallsBack, TensorsWork):
    """Several works as one."""

    def __init__(
        self, works: Sequence[dist.Work], tensors: Sequence[Tensor], queue: CallbackQueue | None = None
    ) -> None:
        super().__init__(tensors)
        self._works, self._queue = list(works), queue

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for all works, within `timeout` as a whole, then raise the first of their errors if there is one."""
        deadline, name = _deadline_of(timeout), f"a call of {len(self._works)} parts"
        # All of them, so that nothing writes into tensors after the caller got an error.
        errors: list[Exception] = []
        for work in self._works:
            try:
                work.wait(timeout if deadline is None else _left_until(deadline))
            except Exception as error:
                errors.append(error)
        if errors and deadline is not None and isinstance(errors[0], CollectiveTimeoutError):
            raise CollectiveTimeoutError(f"{name} was not done within {timeout}; it goes on") from errors[0]
        if errors:
            raise errors[0]
        if not self._settle(deadline):
            raise _late_callback(name, timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all works are done, and callbacks have run."""
        return all([work.is_completed() for work in self._works]) and self._is_settled()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of all tensors, which fails if any work does."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])

        def value(done: torch.futures.Future[Any]) -> list[Tensor]:
            for future in done.value():
                future.value()
            return self._tensors

        found = futures.then(value)
        return found if self._queue is None else self._give(follow(found, self._queue))
