"""Background executor of collectives: one thread per group on CPU, one stream per CUDA device.

A coded collective is several messages with arithmetic between them. Ranks must start the collectives of a group in the
same order, so all of a group's run one after the other, in the order of the calls:

- CPU tensors: a thread with a process group of its own, so that its collectives never mix with those that the program
  issues on the caller's group meanwhile. gloo and the kernels release Python's lock. Collectives issued by callbacks of
  its futures have executors of their own (callbacks.py).
- CUDA tensors: a stream. Everything is started from the caller's thread, in program order, and nothing blocks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.utils._pytree import tree_leaves

from laconic.collectives.runtime.callbacks import CallbackFuture, CallbackQueue, CallsBack, depth, queue_of
from laconic.collectives.runtime.device_streams import Ready
from laconic.collectives.runtime.failure_diagnosis import broke_off
from laconic.collectives.runtime.group_facts import (
    follow_timeout,
    raise_if_failed,
    ranks_of,
    register_group,
    timeout_of,
)
from laconic.collectives.runtime.late_checks import LateCheck, left_on, make_checks
from laconic.collectives.runtime.thread_state import as_here
from laconic.collectives.runtime.torch_compat import in_background, untraced
from laconic.errors import CollectiveTimeoutError

T = TypeVar("T")
S = TypeVar("S")

Groups = tuple[dist.ProcessGroup, ...]
"""The process groups that a reduction runs on."""

Job = Callable[[Groups], T]
"""A reduction as a function of the groups to use."""


class Work(ABC, Generic[T]):
    """A reduction under way."""

    @abstractmethod
    def wait(self) -> T:
        """Wait for the result, or raise the reduction's error. On CUDA only the current stream waits."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def get_future(self) -> torch.futures.Future[T]:
        """The result as torch's future, which DDP's hooks return. Its callbacks may wait for other works."""

    @abstractmethod
    def map(self, change: Callable[[T], S]) -> Work[S]:
        """This work with `change` applied to its result in the background."""


def _run_and_check(job: Job[T], groups: Groups) -> T:
    """Run a job, and make the checks that it has left on the groups."""
    result = job(groups)
    make_checks(*groups)
    return result


def done(result: T) -> Work[T]:
    """A work that is over, with its result."""
    return _FinishedWork(result)


def after_callbacks(queue: CallbackQueue) -> Work[None]:
    """A work that is done when all callbacks that have been added to `queue` have run."""
    work: _ThreadWork[None] = _ThreadWork()
    queue.add(partial(work.result.set_result, None))
    return work


def run_in_background(job: Job[T], groups: Groups, device: torch.device, written: Sequence[object] = ()) -> Work[T]:
    """Run a job, which writes to `written`, in its groups' executor with the caller's settings; in one order."""
    job = as_here(job, written)
    if device.type == "cuda":
        return _run_on_stream(job, groups, device)
    return _executor_of(groups).submit(job)


# --- as torch's handles ---

_NO_TIMEOUT = timedelta()


@untraced
class TensorsWork(dist.Work):
    """A work whose result is a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def result(self) -> list[Tensor]:
        """The tensors, whether they are ready or not."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait until the tensors are ready."""
        self.wait()


@untraced
class BackgroundWork(TensorsWork):
    """A collective in the background, with the interface that torch's C++ and Python expect."""

    def __init__(self, work: Work[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        result = self._tensors
        self._work: Work[list[Tensor]] = work.map(lambda _: result)

    def then(self, do: Callable[[], object], tensors: Sequence[Tensor]) -> BackgroundWork:
        """A work that runs `do` in the background once this one is done, with `tensors` as the result."""
        return BackgroundWork(self._work.map(as_here(lambda _: do(), tensors)), tensors)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for it and its callbacks, or raise its error; CollectiveTimeoutError after a positive `timeout`."""
        if timeout > _NO_TIMEOUT:
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"a collective, or a callback of its future, was not done within {timeout}; it goes on"
                    )
                time.sleep(0.001)
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """The tensors as torch's future; its callbacks may wait for other works."""
        return self._work.get_future()


# --- CPU: threads ---


class _FinishedWork(Work[T]):
    """A result that is there; most callers of a blocking call throw it away, so making one costs next to nothing."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        return self._result

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[T]:
        return future_of(self._as_future())

    def map(self, change: Callable[[T], S]) -> Work[S]:
        mapped: _ThreadWork[S] = _ThreadWork()
        _pass_on(as_here(change), mapped.result, self._as_future())
        return mapped

    def _as_future(self) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(self._result)
        return future


class _ThreadWork(CallsBack, Work[T]):
    """A job of an executor's thread, or what became of a finished one; `callbacks` is its queue of callbacks."""

    def __init__(self, callbacks: CallbackQueue | None = None) -> None:
        self.result: Future[T] = Future()
        self._callbacks = callbacks

    def wait(self) -> T:
        found = self.result.result()
        self._settle()
        return found

    def is_completed(self) -> bool:
        return self.result.done() and self._is_settled()

    def get_future(self) -> torch.futures.Future[T]:
        if self._callbacks is None:
            return future_of(self.result)
        return self._give(CallbackFuture(self.result, self._callbacks))

    def map(self, change: Callable[[T], S]) -> Work[S]:
        mapped: _ThreadWork[S] = _ThreadWork(self._callbacks)
        self.result.add_done_callback(partial(_pass_on, as_here(change), mapped.result))
        return mapped


def _pass_on(change: Callable[[T], S], mapped: Future[S], done: Future[T]) -> None:
    try:
        mapped.set_result(change(done.result()))
    except BaseException as error:
        mapped.set_exception(error)


def future_of(result: Future[T]) -> torch.futures.Future[T]:
    """Convert Python's future to torch's."""
    done: torch.futures.Future[Future[T]] = torch.futures.Future()
    # A callback that raises is the one way to give torch's future an error that its C++ callers see too.
    future = done.then(lambda finished: finished.value().result())
    result.add_done_callback(done.set_result)
    return future


_Item = tuple[Job[Any], _ThreadWork[Any]]


class _ThreadExecutor:
    """A thread that runs jobs in order on copies of `groups`."""

    def __init__(self, groups: Groups, depth: int) -> None:
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._callbacks = queue_of(groups[0])
        # The thread refers to the queue and its own copies only, so it ends when the executor is garbage-collected.
        arguments = (self._items, [_copier_of(group, depth) for group in groups])
        thread = threading.Thread(target=_serve, args=arguments, name="laconic-background", daemon=True)
        thread.start()
        self._thread = thread
        self._finalizer = finalize(self, _close, self._items, thread)  # also when the program ends

    def submit(self, job: Job[T]) -> Work[T]:
        work: _ThreadWork[T] = _ThreadWork(self._callbacks)
        self._items.put((job, work))
        return work

    def finish(self) -> None:
        """Let the thread end after the jobs it has, and wait for them."""
        self._finalizer.detach()
        self._items.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


def _serve(items: SimpleQueue[_Item | None], copiers: list[Callable[[], dist.ProcessGroup]]) -> None:
    with in_background(), torch.no_grad():
        groups: Groups = ()
        failure: BaseException | None = None
        try:
            # Here and not in the caller's thread: the other ranks may come only after the caller has gone on.
            groups = tuple(copy() for copy in copiers)
        except BaseException as error:
            failure = error
        while (item := items.get()) is not None:
            job, work = item
            try:
                if failure is not None:
                    raise failure
                follow_timeout(groups)
                work.result.set_result(_run_and_check(job, groups))
            except BaseException as error:
                work.result.set_exception(error)
            del item, job, work  # and with them the tensors that the job closes over


def _close(items: SimpleQueue[_Item | None], thread: threading.Thread) -> None:
    items.put(None)
    # gloo aborts the process if its groups outlive the interpreter. A reduction that hangs is not waited for.
    if thread is not threading.current_thread():
        thread.join(timeout=5)


_CPU = torch.device("cpu")
_lock = threading.RLock()  # two threads may be the first to use a group; what is collected meanwhile may come here, too
_num_copies: WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = WeakKeyDictionary()
_executors: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Groups, int], _ThreadExecutor]] = WeakKeyDictionary()
"""By the first group; then by the others and the callback depth of the executor's jobs."""


def _executor_of(groups: Groups) -> _ThreadExecutor:
    with _lock:
        executors = _executors.setdefault(groups[0], {})
        key = groups[1:], depth()
        if key not in executors:
            executors[key] = _ThreadExecutor(groups, depth())
        return executors[key]


def has_executor(group: dist.ProcessGroup) -> bool:
    """Whether a job was run in the background on `group` alone, at the caller's callback depth."""
    with _lock:
        return ((), depth()) in _executors.get(group, {})


def executors_of(*groups: dist.ProcessGroup) -> Iterator[Callable[[Job[T]], Work[T]]]:
    """Submit functions that run a job after all jobs of each executor whose first group is one of `groups`."""
    with _lock:
        found = [executor for group in groups for executor in _executors.get(group, {}).values()]
    return (executor.submit for executor in found)


def close(*groups: dist.ProcessGroup) -> None:
    """End the executors of `groups` after all their jobs, as gloo does when a group is destroyed.

    A work whose rank is lost takes as long as it does in any case, the group's timeout at most.
    """
    while True:
        with _lock:
            ended = [
                executors.pop(key)
                for first, executors in list(_executors.items())
                for key in list(executors)
                if any(group in (first, *key[0]) for group in groups)
            ]
        if not ended:
            return
        # What callbacks issue meanwhile makes new executors.
        for executor in ended:
            executor.finish()


def _copier_of(group: dist.ProcessGroup, depth: int) -> Callable[[], dist.ProcessGroup]:
    """A function that makes a gloo group of the same processes and timeout. Every process of `group` must call it.

    `dist.new_group` cannot make it: it waits for all processes of the program, or, set to wait for the group's only,
    names the group by how many groups each of them has, which need not be the same number.
    """
    numbers = _num_copies.setdefault(group, {})
    number = numbers[depth] = numbers.get(depth, -1) + 1
    store = PrefixStore(f"laconic/{depth}/{number}/", group.get_group_store())
    timeout = timeout_of(group)
    rank, size, original = group.rank(), group.size(), ref(group)
    ranks, met = ranks_of(group), [group]  # which lives until all have met, and no longer for this

    def copy() -> dist.ProcessGroup:
        _meet(met.pop(), ranks, depth << 10 | number % (1 << 10))
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout or default_pg_timeout)
        found = dist.ProcessGroup(store, rank, size)
        found._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        found._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        register_group(found, ranks, original)
        return found

    return copy


_FIRST_TAG, _NUM_TAGS = (1 << 24) + (1 << 20), 1 << 20


def _meet(group: dist.ProcessGroup, ranks: Sequence[int], number: int) -> None:
    """Return once every rank of a group has called it; a CollectiveError names a rank that did not.

    Connections are made through the store, which does not report that a rank has ended: the other ranks would wait for
    the group's timeout. An open connection breaks at once. `number` distinguishes meetings.
    """
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    tag, mark = _FIRST_TAG + number % _NUM_TAGS, torch.zeros(1, dtype=torch.uint8, device="cpu")
    sent: list[dist.Work] = []
    timeout = timeout_of(group)
    steps: tuple[Callable[[int], object], ...] = (
        lambda peer: sent.append(group.send([mark], peer, tag)),
        lambda peer: group.recv([torch.empty_like(mark)], peer, tag).wait(timeout),
        lambda peer: sent.pop(0).wait(timeout),
    )
    for step in steps:
        for peer in others:
            try:
                step(peer)
            except RuntimeError as error:
                what = "connecting the ranks for coded collectives"
                raise broke_off(what, group, ranks, peer, error, wake=True, or_else=", made no such call") from error


# --- CUDA: streams ---


class _StreamWork(Work[T]):
    """A job that was issued to an executor's stream; `held` lives until the stream is done with it.

    `ready` is its end there: a future has an event only for tensors that it holds, and many jobs return nothing.
    """

    def __init__(
        self, executor: _StreamExecutor, result: torch.futures.Future[T], ready: Ready, held: _Held, groups: Groups
    ) -> None:
        self._executor, self._result, self._ready, self._held, self._groups = executor, result, ready, held, groups
        self.checks: Sequence[LateCheck] = ()
        """What the host has to look at before the result is used."""

    def wait(self) -> T:
        for group in self._groups:
            raise_if_failed(group)
        self.make_checks()
        self._ready.wait()
        self._held.release()
        return self._result.wait()  # which records the tensors of the result on the current stream

    def make_checks(self) -> None:
        """Make the host's checks: the result is what it should be for all that is issued afterwards."""
        for check in self.checks:
            check.make()
        self.checks = ()

    def is_completed(self) -> bool:
        return self._result.done() and all(check.is_over for check in self.checks)

    def get_future(self) -> torch.futures.Future[T]:
        self.make_checks()
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self._result.value())):
            self._ready.synchronize()  # such a future lets nobody wait for the stream
        return self._result

    def map(self, change: Callable[[T], S]) -> Work[S]:
        change = as_here(change)
        return _LateWork(lambda: self._map(change), self.is_completed) if self.checks else self._map(change)

    def _map(self, change: Callable[[T], S]) -> Work[S]:
        self.make_checks()
        return self._executor.map(self._result, self._held, self._groups, change)


class _LateWork(Work[T]):
    """What becomes of a result that the host has to look at first; it is started when somebody waits."""

    def __init__(self, start: Callable[[], Work[T]], is_over: Callable[[], bool]) -> None:
        self._start, self._is_over = start, is_over
        self._started: Work[T] | None = None

    def wait(self) -> T:
        return self._now().wait()

    def is_completed(self) -> bool:
        return self._is_over() if self._started is None else self._started.is_completed()

    def get_future(self) -> torch.futures.Future[T]:
        return self._now().get_future()

    def map(self, change: Callable[[T], S]) -> Work[S]:
        change = as_here(change)
        return _LateWork(lambda: self._now().map(change), self.is_completed)

    def _now(self) -> Work[T]:
        if self._started is None:
            self._started = self._start()
        return self._started


class _Held:
    """What a job uses. It lives until the stream that issued the job, or the host, has waited for it.

    The memory of its tensors belongs to other streams than the job's, which would give it away while the job runs.
    What the job uses whose result this one changes, `before`, is let go with this one at the latest.
    """

    def __init__(self, what: object, device: torch.device, before: _Held | None = None) -> None:
        self._what, self._device, self._before = what, device, before
        self._issuer = torch.cuda.current_stream(device)

    def release(self, done: bool = False) -> None:
        """Let go after the current stream has waited for the job, or if it is `done`."""
        if self._before is not None:
            self._before.release(done)
        if done or torch.cuda.current_stream(self._device) == self._issuer:
            self._what = self._before = None


class _StreamExecutor:
    """A stream that runs jobs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[Ready, _Held]] = deque()

    def submit(self, job: Job[T], groups: Groups) -> Work[T]:
        work = self._run(lambda: job(groups), _Held(job, self._device), groups)
        work.checks = left_on(*groups)
        return work

    def map(self, result: torch.futures.Future[T], before: _Held, groups: Groups, change: Callable[[T], S]) -> Work[S]:
        return self._run(lambda: change(result.value()), _Held(change, self._device, before), groups)

    def _run(self, action: Callable[[], T], held: _Held, groups: Groups) -> _StreamWork[T]:
        """Issue `action` behind all that the current stream has been given so far."""
        while self._in_flight and self._in_flight[0][0].is_over:
            self._in_flight.popleft()[1].release(done=True)
        result: torch.futures.Future[T] = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                result.set_result(action())
            finally:  # what was issued before an error runs, too
                ready = Ready(self._device)
                self._in_flight.append((ready, held))
        return _StreamWork(self, result, ready, held, groups)


_stream_executors: dict[torch.device, _StreamExecutor] = {}


def _run_on_stream(job: Job[T], groups: Groups, device: torch.device) -> Work[T]:
    if device not in _stream_executors:
        _stream_executors[device] = _StreamExecutor(device)
    return _stream_executors[device].submit(job, groups)
