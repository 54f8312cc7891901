"""Where a reduction runs while backward goes on.

A reduction is several collectives with arithmetic between them. Ranks must start the collectives of a group in the same
order, so all background reductions of a group run one after the other, in the order they were asked for, in a *lane*:

- CPU tensors: a thread with a process group of its own, so that its collectives never mix with those that the program
  issues on the caller's group meanwhile. gloo and the kernels release Python's lock. What callbacks of a lane's futures
  issue has lanes of its own (callbacks.py).
- CUDA tensors: a stream. Everything is started from the caller's thread, in program order, and nothing blocks.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import default_pg_timeout

from laconic.collectives.runtime.callbacks import CallbackFuture, CallbackQueue, depth, queue_of
from laconic.collectives.runtime.rendezvous import meet
from laconic.collectives.runtime.torch_compat import in_background

__all__ = [
    "Groups",
    "Job",
    "Work",
    "close",
    "done",
    "future_of",
    "has_lane",
    "lanes_of",
    "original_of",
    "run_here",
    "run_in_background",
]

T = TypeVar("T")
S = TypeVar("S")

Groups = tuple[dist.ProcessGroup, ...]
"""The process groups that a reduction talks to."""

Job = Callable[[Groups], T]
"""A reduction, told which groups to use."""


class Work(ABC, Generic[T]):
    """A reduction under way."""

    @abstractmethod
    def wait(self) -> T:
        """Wait for the result, or raise what the reduction raised. On CUDA only the current stream waits."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def get_future(self) -> torch.futures.Future[T]:
        """The result as torch's future, which DDP's hooks return. Callbacks of it may wait for other works."""

    @abstractmethod
    def map(self, change: Callable[[T], S]) -> Work[S]:
        """This work with `change` of its result, which is computed in the background."""


def run_here(job: Job[T], groups: Groups) -> T:
    """Run a job in the calling thread, on the current stream, on the caller's own groups."""
    with torch.no_grad():
        return job(groups)


def done(result: T) -> Work[T]:
    """A reduction that is over."""
    work: _ThreadWork[T] = _ThreadWork()
    work.result.set_result(result)
    return work


def run_in_background(job: Job[T], groups: Groups, device: torch.device) -> Work[T]:
    """Run a job in the lane of its groups. Every rank of the groups must do so in the same order."""
    if all(group.size() == 1 for group in groups):
        return done(run_here(job, groups))
    if device.type == "cuda":
        return _run_on_stream(job, groups, device)
    return _lane_of(groups).submit(job)


# --- CPU: threads ---


class _ThreadWork(Work[T]):
    """What a lane's thread, or nobody, is at; `callbacks` is the lane's queue of them."""

    def __init__(self, callbacks: CallbackQueue | None = None) -> None:
        self.result: Future[T] = Future()
        self._callbacks = callbacks

    def wait(self) -> T:
        return self.result.result()

    def is_completed(self) -> bool:
        return self.result.done()

    def get_future(self) -> torch.futures.Future[T]:
        return future_of(self.result) if self._callbacks is None else CallbackFuture(self.result, self._callbacks)

    def map(self, change: Callable[[T], S]) -> Work[S]:
        mapped: _ThreadWork[S] = _ThreadWork(self._callbacks)
        self.result.add_done_callback(partial(_pass_on, change, mapped.result))
        return mapped


def _pass_on(change: Callable[[T], S], mapped: Future[S], done: Future[T]) -> None:
    try:
        with torch.no_grad():
            mapped.set_result(change(done.result()))
    except BaseException as error:
        mapped.set_exception(error)


def future_of(result: Future[T]) -> torch.futures.Future[T]:
    """Python's future as torch's."""
    done: torch.futures.Future[Future[T]] = torch.futures.Future()
    # A callback that raises is the one way to give torch's future an error that its C++ callers see too.
    future = done.then(lambda finished: finished.value().result())
    result.add_done_callback(done.set_result)
    return future


_Item = tuple[Job[Any], _ThreadWork[Any]]


class _ThreadLane:
    """A thread that runs jobs in order on copies of `groups`."""

    def __init__(self, groups: Groups, depth: int) -> None:
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._callbacks = queue_of(groups[0])
        # The thread knows the queue and its own copies only, so it ends when nobody knows the lane any more.
        arguments = (self._items, [_copier_of(group, depth) for group in groups])
        thread = threading.Thread(target=_serve, args=arguments, name="laconic-lane", daemon=True)
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
                work.result.set_result(job(groups))
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
_lanes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Groups, int], _ThreadLane]] = WeakKeyDictionary()
"""By the first group; then by the others, and how deep in callbacks a lane's jobs come from."""


def _lane_of(groups: Groups) -> _ThreadLane:
    with _lock:
        lanes = _lanes.setdefault(groups[0], {})
        key = groups[1:], depth()
        if key not in lanes:
            lanes[key] = _ThreadLane(groups, depth())
        return lanes[key]


def has_lane(group: dist.ProcessGroup) -> bool:
    """Whether something was run in the background on `group` alone, from as deep in callbacks as the caller is."""
    with _lock:
        return ((), depth()) in _lanes.get(group, {})


def lanes_of(*groups: dist.ProcessGroup) -> Iterator[Callable[[Job[T]], Work[T]]]:
    """How to run something after all that was given to each lane that begins with one of `groups`."""
    with _lock:
        found = [lane for group in groups for lane in _lanes.get(group, {}).values()]
    return (lane.submit for lane in found)


def close(*groups: dist.ProcessGroup) -> None:
    """End the lanes that use one of `groups`, after all they have been given; as gloo does when a group is destroyed.

    A work whose rank is lost takes as long as it does in any case, the group's timeout at most.
    """
    while True:
        with _lock:
            ended = [
                lanes.pop(key)
                for first, lanes in list(_lanes.items())
                for key in list(lanes)
                if any(group in (first, *key[0]) for group in groups)
            ]
        if not ended:
            return
        # What callbacks issue meanwhile makes new lanes.
        for lane in ended:
            lane.finish()


def _copier_of(group: dist.ProcessGroup, depth: int) -> Callable[[], dist.ProcessGroup]:
    """Makes a gloo group of the same processes with the same timeout. Every process of `group` must come here.

    `dist.new_group` cannot make it: it waits for all processes of the program, or, told to wait for the group's only,
    names the group by how many groups each of them has, which need not be the same number.
    """
    numbers = _num_copies.setdefault(group, {})
    number = numbers[depth] = numbers.get(depth, -1) + 1
    store = PrefixStore(f"laconic/{depth}/{number}/", group.get_group_store())
    timeout = getattr(getattr(group._get_backend(_CPU), "options", None), "_timeout", None)
    rank, size, original = group.rank(), group.size(), ref(group)
    ranks, met = dist.get_process_group_ranks(group), [group]  # which lives until all have met, and no longer for this

    def copy() -> dist.ProcessGroup:
        meet(met.pop(), ranks, "connecting the ranks for coded collectives", depth << 10 | number % (1 << 10))
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout or default_pg_timeout)
        found = dist.ProcessGroup(store, rank, size)
        found._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        found._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        _originals[found] = original
        return found

    return copy


_originals: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()


def original_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The caller's group that a lane's is a copy of; `group` itself if it is none."""
    found = _originals.get(group)
    return (found() if found is not None else None) or group


# --- CUDA: streams ---


class _StreamWork(Work[T]):
    def __init__(self, future: torch.futures.Future[T], job: object, stream: torch.cuda.Stream) -> None:
        self._future = future
        self._job = job  # what it closes over must live until the stream is done with it
        self._stream = stream

    def wait(self) -> T:
        return self._future.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[T]:
        return self._future

    def map(self, change: Callable[[T], S]) -> Work[S]:
        return _on_stream(lambda: change(self._future.value()), (self._job, change), self._stream)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _run_on_stream(job: Job[T], groups: Groups, device: torch.device) -> Work[T]:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    return _on_stream(lambda: job(groups), job, stream)


def _on_stream(run: Callable[[], T], kept: object, stream: torch.cuda.Stream) -> Work[T]:
    future: torch.futures.Future[T] = torch.futures.Future(devices=[stream.device])
    with torch.cuda.stream(stream), torch.no_grad():
        # The future records an event here; whoever waits for it makes the current stream wait for that.
        future.set_result(run())
    return _StreamWork(future, kept, stream)
