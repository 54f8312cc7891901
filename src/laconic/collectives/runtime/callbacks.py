"""torch futures of background collectives, with callbacks that may issue collectives and wait for them.

DDP's hooks chain collectives: PowerSGD averages one factor in a callback of the average of another. If callbacks ran in
the thread that completes collectives, such a wait would never end. So:

- Callbacks run in threads of a pool that grows as needed: whoever blocks there holds up nobody else.
- The callbacks of a group's futures run one after the other, in the order in which they were registered, which is the
  order of the program and so the same on all ranks, however fast each of them completes what.
- What a callback issues runs in executors of its own `depth`, one below that of the future that called it. So its order
  does not depend on what the main thread issues meanwhile.
- A work that was waited for has its callbacks behind it, as over gloo and NCCL (`CallsBack`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime.thread_state import as_here

T = TypeVar("T")
S = TypeVar("S")

_IDLE_SECONDS = 10.0
"""Idle time after which a thread of the pool ends."""


class _Threads:
    """A thread pool in which no task ever waits for another one."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def run(self, task: Callable[[], object]) -> None:
        with self._lock:
            has_idle = self._num_idle > 0
            self._num_idle -= has_idle
        if has_idle:
            self._tasks.put(task)
        else:
            threading.Thread(target=self._work, args=([task],), name="laconic-callbacks", daemon=True).start()

    def _work(self, first: list[Callable[[], object]]) -> None:
        task = first.pop()  # the thread keeps its arguments
        while True:
            try:
                task()
            except Exception:
                logging.getLogger(__name__).exception("a callback of a collective's future raised")
            del task  # and with it the tensors that it closes over
            with self._lock:
                self._num_idle += 1
            while True:
                try:
                    task = self._tasks.get(timeout=_IDLE_SECONDS)
                    break
                except Empty:
                    with self._lock:
                        if self._num_idle > 0:
                            self._num_idle -= 1
                            return


_threads = _Threads()


def _forget_threads() -> None:
    """Reset the pool in a forked child, which has none of its parent's threads."""
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget_threads)


class _Here(threading.local):
    depth = 0


here = _Here()
"""Callback depth of the current thread."""


def depth() -> int:
    """Callback depth of the current thread: 0 outside of callbacks."""
    return here.depth


class CallbackQueue:
    """Callbacks that run one after the other, one deeper than the calls whose futures they belong to (`depth`)."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], object]] = deque()
        self._is_running = False

    @property
    def is_running(self) -> bool:
        """Whether one of the callbacks that were added has not ended."""
        return self._is_running

    def add(self, task: Callable[[], object]) -> None:
        """Run `task` after all that were added before."""
        with self._lock:
            self._tasks.append(task)
            if self._is_running:
                return
            self._is_running = True
        _threads.run(self._drain)

    def _drain(self) -> None:
        before, here.depth = here.depth, self.depth + 1
        try:
            while True:
                with self._lock:
                    if not self._tasks:
                        self._is_running = False
                        return
                    task = self._tasks.popleft()
                task()
                del task
        finally:
            here.depth = before


_lock = threading.Lock()
_queues: WeakKeyDictionary[dist.ProcessGroup, dict[int, CallbackQueue]] = WeakKeyDictionary()


def queue_of(group: dist.ProcessGroup) -> CallbackQueue:
    """Callback queue of calls on `group` from the current thread."""
    with _lock:
        return _queues.setdefault(group, {}).setdefault(depth(), CallbackQueue(depth()))


class _Family:
    """Futures of one work, and all that follow them, as long as they are not done: values of done ones are let go."""

    def __init__(self) -> None:
        self.is_waited_for = False
        self._undone: set[CallbackFuture[Any]] = set()

    def add(self, future: CallbackFuture[Any]) -> None:
        """Add a future, which `remove`s itself once it is done."""
        self._undone.add(future)
        if future.done():
            self.remove(future)

    def remove(self, future: CallbackFuture[Any]) -> None:
        """Let go of a future that is done."""
        self._undone.discard(future)

    def settle(self, deadline: float | None = None) -> bool:
        """Wait until all futures are done, and from now on for each that is added; False at the monotonic `deadline`.

        In a callback those of its queue, and of queues that wait for that one, are left out: it would wait for itself.
        """
        self.is_waited_for = True
        while undone := self._awaited():
            if deadline is None:
                for future in undone:
                    with suppress(Exception):
                        future.wait()
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(0.001)
        return True

    def is_settled(self) -> bool:
        """Whether `settle` would return at once."""
        return not self._awaited()

    def _awaited(self) -> list[CallbackFuture[Any]]:
        return [future for future in [*self._undone] if here.depth <= future.queue.depth and not future.done()]


class CallbackFuture(torch.futures.Future[T]):
    """torch's future of `result`; callbacks given to `then` run in `queue`.

    `here` completes it in the thread that sets `result`, which must tolerate that callbacks of C++ and of torch's own
    futures, such as that of `collect_all`, block it. `family` is that of the future that this one follows.
    """

    def __init__(
        self, result: Future[T], queue: CallbackQueue, here: bool = False, family: _Family | None = None
    ) -> None:
        super().__init__()
        self.queue = queue
        self._family = family or _Family()
        self._family.add(self)
        if here or result.done():
            result.add_done_callback(self._complete)
        else:
            result.add_done_callback(lambda done: _threads.run(partial(self._complete, done)))

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """Add a callback as torch does; it may wait, and sees the caller's grad mode, inference mode and autocast."""
        result: Future[S] = Future()
        self.queue.add(partial(_call, as_here(callback, grad=None), self, result))
        follower = CallbackFuture(result, self.queue, family=self._family)
        if self._family.is_waited_for:
            self._family.settle()
        return follower

    def join(self, family: _Family) -> None:
        """Change to the family of a work, before this future has followers."""
        self._family = family
        family.add(self)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Add a callback as torch does: an exception that it raises is logged."""

        def logged(future: torch.futures.Future[T]) -> None:
            try:
                callback(future)
            except Exception:
                logging.getLogger(__name__).exception("a callback of a collective's future raised")

        self.then(logged)

    def set_exception(self, result: Any) -> None:
        """Set an error as torch does, also for C++: DDP reads values past the function that raises it for Python."""

        def raise_error(_: object) -> None:
            raise result

        self._set_unwrap_func(raise_error)
        self.set_result(_Failed.of(result))  # type: ignore[arg-type]

    def _complete(self, done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            self.set_result(done.result())
        else:
            self.set_exception(error)
        self._family.remove(self)


class CallsBack:
    """A work that is done for its callers once the callbacks of the futures it has given away have run, as torch's."""

    _family: _Family | None = None
    _is_waited_for = False

    def _give(self, future: CallbackFuture[T]) -> CallbackFuture[T]:
        """Return `future`, whose callbacks belong to this work."""
        family: _Family = self.__dict__.setdefault("_family", _Family())
        future.join(family)
        if self._is_waited_for:
            family.settle()
        return future

    def _settle(self, deadline: float | None = None) -> bool:
        """Wait for the callbacks, at the end of a `wait` that succeeds; return False at the deadline."""
        self._is_waited_for = True
        return self._family is None or self._family.settle(deadline)

    def _is_settled(self) -> bool:
        return self._family is None or self._family.is_settled()


def follow(
    future: torch.futures.Future[Any],
    queue: CallbackQueue,
    explain: Callable[[RuntimeError], BaseException] = lambda error: error,
    change: Callable[[Any], Any] = lambda value: value,
) -> CallbackFuture[Any]:
    """Wrap a future of torch's own in one whose callbacks, run by `queue`, may wait; its error and value are made anew.

    An error that callbacks of `future` itself raise would lose its class.
    """
    result: Future[Any] = Future()

    def finish(done: torch.futures.Future[Any]) -> None:
        try:
            result.set_result(change(done.value()))
        except RuntimeError as error:
            result.set_exception(_explained(explain, error))
        except Exception as error:
            result.set_exception(error)

    future.add_done_callback(finish)
    return CallbackFuture(result, queue, here=True)


def _explained(explain: Callable[[RuntimeError], BaseException], error: RuntimeError) -> BaseException:
    try:
        found = explain(error)
    except BaseException as own:
        return own
    if found is not error:
        found.__cause__ = error
    return found


def _call(callback: Callable[[torch.futures.Future[T]], S], source: torch.futures.Future[T], result: Future[S]) -> None:
    with suppress(Exception):
        source.wait()
    try:
        result.set_result(callback(source))
    except BaseException as error:
        result.set_exception(error)


class _Failed(Tensor):
    """Stand-in for a tensor that raises an error when it is used."""

    error: BaseException

    @staticmethod
    def of(error: BaseException) -> _Failed:
        found = Tensor._make_subclass(_Failed, torch.empty(0, dtype=torch.float32, device="cpu"))
        found.error = error
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(x, _Failed):
                raise x.error
        raise AssertionError("called for a tensor of this class")
