"""The workers of an engine: started, waited for, listened to, given up when they are lost, started again.

One thread per worker reads its events until its pipe or connection ends; that end is the one way in which a worker is
lost. A worker that hangs does not end by itself: a watch (laconic.infer.watch) ends it, and says why.

[Note: locks of an engine] Each room has one lock for its own fields: InFlight for requests, WorkerSet for what became
of the workers. They are taken in the order WorkerSet, InFlight, and nobody calls a listener, starts a process or waits
for one with a lock held. Only `_hand_over` writes to workers under a lock, since nothing may overtake what was held
back. One more lock per worker keeps the lines apart that go to it, and whoever records the workers holds `recorded`.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from laconic.errors import CollectiveError, LaconicError, ModelError
from laconic.infer.control import Worker
from laconic.infer.in_flight import InFlight, fail_all
from laconic.infer.launch import WorkerLauncher
from laconic.infer.payload import LinkTraffic
from laconic.infer.sampling import ChosenToken
from laconic.infer.split import EngineSplit
from laconic.infer.watch import Watch

_LAST_WORDS_SECONDS = 1.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class WorkerReport:
    """A worker and what it holds.

    Attributes:
        role: "attention" or "expert".
        number: among the workers of this role, from 0.
        pid: of its process.
        nbytes: bytes of the parameters it holds, or of their codes and scales.
        host: name of its machine; None is the engine's.
        rounding: of experts held as codes: what these have moved matrices by, root mean square over the values'; None
            is exact.
    """

    role: str
    number: int
    pid: int
    nbytes: int
    host: str | None = None
    rounding: float | None = None

    def __str__(self) -> str:
        rounded = "" if self.rounding is None else f", in codes that move them by {100 * self.rounding:.2g} %"
        where = f"pid {self.pid}" if self.host is None else f"pid {self.pid} on {self.host}"
        return f"{self.role} worker {self.number} ({where}): {self.nbytes / 2**20:.1f} MiB of weights{rounded}"


class WorkerSet:
    """All workers of one engine, and the requests that they serve, which end here.

    They are started again `max_restarts` times after one was lost; `reports` are of those that run, or ran last.
    """

    def __init__(
        self,
        launcher: WorkerLauncher,
        split: EngineSplit,
        requests: InFlight,
        start_timeout_seconds: float,
        progress_seconds: float,
        max_restarts: int,
    ) -> None:
        self._launcher, self._split, self.requests = launcher, split, requests
        self._start_timeout_seconds, self._max_restarts = start_timeout_seconds, max_restarts
        self._progress_seconds = progress_seconds
        self._lock = threading.RLock()  # reentrant: a signal handler of the same thread may close the engine
        self._writing = [threading.RLock() for _ in range(split.num_workers)]
        self._processes: list[Worker] = []
        self._readers: list[threading.Thread] = []
        self._ready: list[dict[str, Any] | None] = []
        self._ready_count = threading.Semaphore(0)
        self._watch: Watch | None = None
        self._failure: LaconicError | None = None
        self._lost = threading.Event()  # set when there is a failure
        self._closing = False
        self._restarting: threading.Thread | None = None
        self._held_back: list[tuple[int, list[dict[str, Any]]]] | None = None
        self._asks = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}  # by the number of the question
        self.recorded = threading.Lock()
        self._past_traffic = (LinkTraffic(), LinkTraffic())
        self._traffic: dict[int, tuple[LinkTraffic, LinkTraffic]] = {}
        self.running = False
        self.num_restarts = 0
        self.reports: tuple[WorkerReport, ...] = ()

    @property
    def traffic(self) -> tuple[LinkTraffic, LinkTraffic]:
        """Messages to expert workers (a2e) and back (e2a), as of the requests that have ended."""
        with self._lock:
            a2e, e2a = self._past_traffic
            for there, back in self._traffic.values():
                a2e, e2a = a2e + there, e2a + back
            return a2e, e2a

    def name(self, rank: int) -> str:
        """Return what messages call a worker."""
        role, number = self._split.role(rank)
        return f"{role} worker {number}"

    def start(self) -> dict[str, Any]:
        """Start all; returns what the first attention worker said when it was ready.

        A LaconicError says what keeps one from starting; all have ended then.
        """
        self._start_all()
        with self._lock:
            self.running = self._failure is None
        first = self._ready[0]
        assert first is not None
        return first

    def send(self, rank: int, *commands: dict[str, Any]) -> None:
        """Tell a worker something, or hold it back for those that are being started again."""
        with self._lock:
            if self._held_back is not None:
                self._held_back.append((rank, list(commands)))
                return
        self._tell(rank, *commands)

    def ask(self, rank: int, command: dict[str, Any], timeout_seconds: float) -> dict[str, Any] | None:
        """Tell a worker something that it answers; returns the answer, or None without one. On any thread."""
        number, answer = next(self._asks), queue.SimpleQueue[dict[str, Any] | None]()
        self._asked[number] = answer
        try:
            if not self.running:
                return None
            self._tell(rank, command | {"ask": number})
            return answer.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        finally:
            del self._asked[number]

    def close(self) -> None:
        """End all; who is in flight fails. Does nothing the second time."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self.running = False
        closed = CollectiveError("the engine is closed")
        fail_all(self.requests.refuse(closed), closed)
        self._answer_nobody()
        if self._restarting is not None:
            while self._restarting.is_alive():
                for process in self._processes:
                    process.kill()
                self._restarting.join(0.1)
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            for rank in range(min(self._split.attention, len(self._processes))):
                self._ask_to_stop(rank)
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._end_all()
            self._launcher.close()

    def _ask_to_stop(self, rank: int) -> None:
        """Tell a worker to stop without waiting: the pipe of one that stands still may be full."""
        asking = threading.Thread(target=self._tell, args=(rank, {"do": "stop"}), name="laconic-stop", daemon=True)
        try:
            asking.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            self._tell(rank, {"do": "stop"})

    def _start_all(self) -> None:
        self._ready = [None] * self._split.num_workers
        self._ready_count = threading.Semaphore(0)
        try:
            self._processes = self._launcher.launch(self.num_restarts)
        except OSError as error:
            raise CollectiveError(f"a worker's process could not be started: {error}") from error
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"laconic-worker-{rank}", daemon=True)
            for rank in range(self._split.num_workers)
        ]
        ranks = range(self._split.attention)
        self._watch = Watch({rank: self._processes[rank] for rank in ranks}, self.requests, self._progress_seconds)
        for reader in self._readers:
            reader.start()
        self._wait_until_ready()
        self.reports = tuple(self._report(rank) for rank in range(self._split.num_workers))
        self._watch.start()

    def _wait_until_ready(self) -> None:
        try:
            deadline = time.monotonic() + self._start_timeout_seconds
            for _ in self._processes:
                if not self._ready_count.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    waiting = [self.name(rank) for rank, said in enumerate(self._ready) if said is None]
                    raise CollectiveError(
                        f"{', '.join(waiting)} did not start within {self._start_timeout_seconds:.0f} s; see its"
                        " output, or give start_timeout_seconds"
                    )
                if self._failure is not None or self._closing:
                    raise self._failure or CollectiveError("the engine is closed")
        except BaseException as error:
            with self._lock:
                wrapped = error if isinstance(error, LaconicError) else CollectiveError("the engine did not start")
                self._failure = self._failure or wrapped
                self._lost.set()
            self._end_all()
            raise

    def _report(self, rank: int) -> WorkerReport:
        role, number = self._split.role(rank)
        said, process = self._ready[rank], self._processes[rank]
        assert said is not None
        return WorkerReport(role, number, process.pid, said["nbytes"], process.host, said.get("rounding"))

    def _tell(self, rank: int, *commands: dict[str, Any]) -> None:
        stream = self._processes[rank].commands
        lines = "".join(f"{json.dumps(command)}\n" for command in commands)
        with self._writing[rank]:
            try:
                stream.write(lines)
                stream.flush()
            except (OSError, ValueError):
                return  # it has ended, and its reader says so

    def _read(self, rank: int) -> None:
        """Read the events of one worker until it ends."""
        process, watch = self._processes[rank], self._watch
        assert watch is not None
        error: LaconicError | None = None
        deserted = False
        try:
            for line in process.events:
                if not line.endswith("\n"):
                    break  # it ended while it wrote
                event = json.loads(line)
                deserted |= event["is"] == "deserted"
                error = self._take_event(rank, event, watch) or error
        except Exception as broken:  # whatever it is: requests must not wait for a reader that has gone
            error = CollectiveError(
                f"{self.name(rank)} (pid {process.pid}) sent what is no event ({type(broken).__name__}: {broken}); its"
                " requests are lost; run the same version of laconic on all workers"
            )
        if (hung := watch.verdict(rank)) is not None:
            error = CollectiveError(f"{self.name(rank)} (pid {process.pid}) {hung}; its requests are lost")
        if deserted and not self._closing:
            self._await_cause()
        self._lose(error or CollectiveError(f"{self.name(rank)} {process.ending()}; its requests are lost"))

    def _take_event(self, rank: int, event: dict[str, Any], watch: Watch) -> LaconicError | None:
        """Take what a worker says; returns why it ends, if it says that."""
        if event["is"] == "progress":
            watch.mark(rank, event["stalled_seconds"])
        elif event["is"] == "ready":
            self._ready[rank] = event
            self._ready_count.release()
        elif event["is"] == "tokens":
            self.requests.hear([(name, ChosenToken.from_fields(*token)) for name, *token in event["tokens"]])
        elif event["is"] == "finished":
            a2e, e2a = (LinkTraffic(**direction) for direction in event["traffic"])
            with self._lock:
                self._traffic[rank] = (a2e, e2a)
            self._finish(event)
        elif event["is"] in ("recorded", "loads"):
            if (asked := self._asked.get(event["ask"])) is not None:
                asked.put(event)
        elif event["is"] == "failed":
            kind = ModelError if event["refused"] else CollectiveError
            return kind(f"{self.name(rank)}: {event['error']}")
        return None

    def _finish(self, event: dict[str, Any]) -> None:
        name = event["name"]
        error: LaconicError | None = None
        if event["error"] is not None and name in self.requests:
            if not event["is_own"]:
                self._await_cause()
            error = self._failure or CollectiveError(f"{name} failed: {event['error']}")
        self.requests.end(name, event["tokens"], error)

    def _await_cause(self) -> None:
        """Let the reader of a lost worker speak first.

        The connections of its peers break as soon as its pipe does, but only the pipe knows why.
        """
        self._lost.wait(_LAST_WORDS_SECONDS)

    def _lose(self, error: LaconicError) -> None:
        """Fail what is in flight, end all workers, and start them again if that is wanted."""
        with self._lock:
            if self._closing or self._failure is not None:
                self._ready_count.release()
                return
            self._failure = error
            self._lost.set()
            starts_again = self._held_back is not None  # `_restart` knows whether it tries once more
            restarts = self.running and self.num_restarts < self._max_restarts
            self.running = False
            if restarts:
                self._held_back = []  # only running workers hold nothing back
                failed = self.requests.withdraw()
            else:
                failed = [] if starts_again else self.requests.refuse(error)
        for process in self._processes:
            process.kill()
            self._ready_count.release()
        self._answer_nobody()
        fail_all(failed, error)
        if restarts:
            self._restarting = threading.Thread(target=self._restart, name="laconic-restart", daemon=True)
            self._restarting.start()

    def _answer_nobody(self) -> None:
        """Tell who waits for an answer of workers that there is none."""
        for asked in list(self._asked.values()):
            asked.put(None)

    def _restart(self) -> None:
        """Start all workers again, as often as is wanted, and hand them the requests that have come meanwhile."""
        while True:
            self._end_all()
            with self._lock:
                self._past_traffic = self.traffic
                self._traffic.clear()
                if self._closing:
                    return
                self.num_restarts += 1
                self._failure = None
                self._lost.clear()
            try:
                self._start_all()
                error = self._hand_over()
            except LaconicError as failure:
                error = failure
            if error is None:
                return
            if self._closing or self.num_restarts >= self._max_restarts:
                fail_all(self.requests.refuse(error), error)
                return

    def _hand_over(self) -> LaconicError | None:
        """Send what was held back; returns what ended the new workers meanwhile, if anything did."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            for rank, commands in self._held_back or ():
                self._tell(rank, *(command for command in commands if command["name"] in self.requests))
            self._held_back = None
            self.running = True
        return None

    def _end_all(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for process in self._processes:
            process.kill()
            process.wait(_STOP_SECONDS)
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(_STOP_SECONDS)
        for process in self._processes:
            process.close()
