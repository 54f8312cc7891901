"""Engine: starts the workers of a model, hands them requests and gives back tokens.

The workers are processes of this machine that meet in a private file and talk over the loopback interface, or those of
torchrun on any machines (see control.py). The engine itself holds no weights: it writes requests to the attention
workers and reads what they finish, as lines of JSON over pipes or connections. When a worker ends that should not, its
pipe closes; all requests in flight fail with its name at once, and the other workers are ended. With `max_restarts` all
workers are then started again, and requests that come meanwhile wait for them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from laconic.cost.infer.engine_plan import EngineChoice, EngineLimits
from laconic.errors import CollectiveError, ConfigError, LaconicError, ModelError
from laconic.infer.auto_plan import AutoPlan
from laconic.infer.control import LocalWorker, RankConnections, Worker, check_world, master_store
from laconic.infer.payload import LinkTraffic, PayloadCoding, check_payload
from laconic.infer.recorder import WorkerLog
from laconic.infer.run_trace import RunTrace
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import Split
from laconic.infer.token_engine import TokenListener
from laconic.infer.transformers_seam import (
    TRIED,
    CacheLimits,
    check_transformers,
    check_weights,
    find_experts,
    read_config,
)
from laconic.schedule.inference import InferencePlan, Order
from laconic.train.distributed.world import read_environment

__all__ = ["Engine", "Generation", "Recording", "WorkerReport", "serving_split"]

Launcher = Literal["engine", "torchrun"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_LAST_WORDS_SECONDS = 1.0
_STOP_SECONDS = 10.0
_RECORD_SECONDS = 60.0


@dataclass(frozen=True)
class WorkerReport:
    """A worker and what it holds.

    Attributes:
        role: "attention" or "expert".
        number: among the workers of this role, from 0.
        pid: of its process.
        nbytes: bytes of the parameters it holds.
        host: name of its machine; None is the engine's.
    """

    role: str
    number: int
    pid: int
    nbytes: int
    host: str | None = None

    def __str__(self) -> str:
        where = f"pid {self.pid}" if self.host is None else f"pid {self.pid} on {self.host}"
        return f"{self.role} worker {self.number} ({where}): {self.nbytes / 2**20:.1f} MiB of weights"


class Generation:
    """A request that an engine has taken."""

    def __init__(self, engine: Engine, name: str, cache_tokens: int, listener: TokenListener | None) -> None:
        self._engine, self._name, self._cache_tokens, self._listener = engine, name, cache_tokens, listener
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
        """
        return self._future.result(timeout_seconds)

    def cancel(self) -> bool:
        """End the request where it is; returns False if it has ended already."""
        return self._engine._cancel(self)

    def _end(self, tokens: list[int]) -> None:
        self._future.set_result(tokens)
        if self._listener is not None:
            self._listener.on_end(None)

    def _fail(self, error: LaconicError) -> None:
        self._future.set_exception(error)
        if self._listener is not None:
            self._listener.on_end(error)


def _automatic(
    plan: InferencePlan | AutoPlan | str | None, rates: str | os.PathLike[str] | None, experts: int | None
) -> AutoPlan | None:
    """The automatic plan that is asked for; None if a plan is given."""
    if isinstance(plan, AutoPlan):
        if rates is not None:
            raise ConfigError(
                f"rates is {str(rates)!r} beside an AutoPlan, which has its own; give AutoPlan(rates=...)"
            )
        automatic = plan
    elif plan is None or isinstance(plan, InferencePlan):
        if rates is not None:
            raise ConfigError(f"rates is {str(rates)!r}, but only an automatic plan needs rates; give plan='auto'")
        return None
    elif plan == "auto":
        automatic = AutoPlan(rates)
    else:
        raise ConfigError(f"plan is {plan!r}, but it must be an InferencePlan, an AutoPlan or 'auto'")
    if experts == 0:
        raise ConfigError("plan is automatic with experts = 0, which leaves nothing to choose; leave out one of them")
    return automatic


class Recording:
    """A trace of what an engine runs inside of a `with` block; see Engine.trace."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._trace: RunTrace | None = None
        self._num_restarts = 0

    @property
    def trace(self) -> RunTrace:
        """The trace, once the block has ended.

        Raises:
            ConfigError: it has not ended, or a worker was lost before.
        """
        if self._trace is None:
            raise ConfigError("the recording has no trace: its block has not ended, or a worker was lost in it")
        return self._trace

    def __enter__(self) -> Recording:
        self._engine._start_recording(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._trace = self._engine._stop_recording(self)
        except LaconicError:
            if error is None:
                raise


class Engine:
    """Generation with a mixture-of-experts model on attention workers and expert workers.

    `generate` and `submit` are greedy, `stream` samples. In float32 greedy tokens are those of transformers'
    `generate`. One attention worker and one expert worker without slices add the products of a row in transformers'
    order; more workers or slices add them in another, which moves the last bits of a logit.

    Use it in a `with` block, or call `close`.

    Args:
        model_dir: directory with config.json and safetensors files.
        attention: number of workers that hold everything but the experts; requests are divided between them.
        experts: number of workers that hold the experts, each a range of every layer's. 0 serves whole models. None is
            1; an automatic plan may then also make all workers serve whole models.
        plan: micro-batches, slices and order; None is one micro-batch in one slice. "auto" or an AutoPlan chooses them
            once, before workers start.
        rates: for "auto": file of `laconic profile --infer`; None takes its default path.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's.
        cache_tokens: tokens, of prompts and answers, in the cache of each micro-batch.
        batch_tokens: tokens that one forward takes at most; longer prompts are cut.
        answer_timeout_seconds: for expert workers to answer; one that takes longer is lost.
        threads: that each worker computes with; None divides the machine's cores, or under torchrun leaves them to
            OMP_NUM_THREADS.
        start_timeout_seconds: for all workers to load their weights and meet.
        payload: how hidden states and sums travel between workers: "raw", "lossless" (the same tokens), "int8" (other
            tokens: values are rounded, see laconic.infer.payload), or "auto": raw or lossless for each message, by
            measured rates of links and codec.
        launcher: "engine" starts the workers here. "torchrun" takes the ranks of torchrun as workers: this process is
            rank 0 and starts attention worker 0, each other rank calls `serve_rank`; one engine per launch.
        max_restarts: how often all workers are started again after one was lost. Requests in flight fail all the same.
        trace: file into which `close` writes a trace of the whole run with `RunTrace.save`; `recording` has it then.

    Attributes:
        split: the workers there are. A model without experts has no expert workers, whatever was asked for.
        plan: the plan that runs.
        choice: what an automatic plan chose, and why; None without.
        notes: what was chosen, and what differs from what was asked for, sentences for the user.
        workers: reports of all workers.
        recording: of `trace`; None without.
        num_restarts: how often the workers were started again.

    Raises:
        ConfigError: an argument breaks its rule, or transformers is missing or of a version that is not known.
        ModelError: the directory holds no model that can be served.
        PlanError: an automatic plan was asked for, and the planner does not know the model's family, or a request of
            the expected size does not fit into the cache.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        *,
        attention: int = 1,
        experts: int | None = None,
        plan: InferencePlan | AutoPlan | Literal["auto"] | None = None,
        rates: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        cache_tokens: int = 4096,
        batch_tokens: int = 256,
        answer_timeout_seconds: float = 120.0,
        threads: int | None = None,
        start_timeout_seconds: float = 300.0,
        payload: PayloadCoding = "raw",
        launcher: Launcher = "engine",
        max_restarts: int = 0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        # 1. Everything that can be refused without a process.
        check_transformers()
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype!r}, but it must be one of {', '.join(_DTYPES)}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads is {threads}, but it must be at least 1; leave it out to divide the cores")
        if answer_timeout_seconds <= 0:
            raise ConfigError(f"answer_timeout_seconds is {answer_timeout_seconds}, but it must be above 0")
        check_payload(payload)
        if launcher not in get_args(Launcher):
            raise ConfigError(f"launcher is {launcher!r}, but it must be one of {', '.join(get_args(Launcher))}")
        if max_restarts < 0 or (max_restarts and launcher == "torchrun"):
            raise ConfigError(
                f"max_restarts is {max_restarts}, but it must be at least 0, and 0 under torchrun, which starts its"
                " ranks again itself (--max-restarts)"
            )
        CacheLimits(cache_tokens, batch_tokens)
        self._limits = (cache_tokens, batch_tokens)
        self.notes: tuple[str, ...] = ()
        self.choice: EngineChoice | None = None
        automatic = _automatic(plan, rates, experts)
        self.split = self._check_split(Path(model_dir), Split(attention, 1 if experts is None else experts))
        if automatic is not None and self.split.experts:
            limits = EngineLimits(cache_tokens, batch_tokens)
            self.choice = automatic.choose(
                Path(model_dir), self.split, limits, dtype=dtype, may_unsplit=experts is None and trace is None
            )
            self.notes += (f"plan auto: {self.choice}",)
            logging.getLogger("laconic").info("plan auto: %s", self.choice)
            if self.choice.split is None:
                self.split = Split(self.split.num_workers, 0)
            plan = self.choice.plan
        self.plan = self._runnable(plan if isinstance(plan, InferencePlan) else InferencePlan())
        self.recording = None if trace is None else self._check_trace(Path(trace))
        check_weights(Path(model_dir))
        info = read_environment(os.environ) if launcher == "torchrun" else None
        if launcher == "torchrun":
            if info is None or info.rank != 0:
                raise ConfigError(
                    f"launcher is 'torchrun', but RANK is {None if info is None else info.rank}: the engine runs on"
                    " rank 0 of torchrun, and other ranks call laconic.infer.serve_rank"
                )
            check_world(info, self.split)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

        # 2. The workers.
        self._lock = threading.Lock()
        self._writing = [threading.Lock() for _ in range(self.split.num_workers)]
        self._generations: dict[str, tuple[Generation, int]] = {}
        self._counter = 0
        self._ready: list[dict[str, Any] | None] = []
        self._lost: LaconicError | None = None
        self._closing = False
        self._recording: Recording | None = None
        self._logs: queue.SimpleQueue[tuple[int, WorkerLog] | None] = queue.SimpleQueue()
        self._failure: LaconicError | None = None
        self._running = False
        self._max_restarts, self.num_restarts = max_restarts, 0
        self._restarting: threading.Thread | None = None
        self._held_back: list[tuple[int, dict[str, Any]]] | None = None
        self._past_traffic = (LinkTraffic(), LinkTraffic())
        self._traffic: dict[int, tuple[LinkTraffic, LinkTraffic]] = {}
        self._start_timeout_seconds = start_timeout_seconds
        self._connections: RankConnections | None = None
        self._interface: str | None = "lo"
        self._scratch = tempfile.TemporaryDirectory(prefix="laconic-infer-")
        store = ""
        if info is not None and info.world_size > 1:
            store, opened = master_store(info, start_timeout_seconds)
            self._connections = RankConnections(opened)
            self._interface = "lo" if info.local_world_size == info.world_size else None
        default_threads = None if info is not None else max(1, cores // self.split.num_workers)
        self._settings = [
            WorkerSettings(
                rank=rank,
                model_dir=str(Path(model_dir).absolute()),
                store=store,
                split=self.split,
                plan=self.plan,
                dtype=dtype,
                cache_tokens=cache_tokens,
                batch_tokens=batch_tokens,
                answer_timeout_seconds=answer_timeout_seconds,
                threads=threads or default_threads,
                payload=payload,
            )
            for rank in range(self.split.num_workers)
        ]
        try:
            self._start_all()
        except BaseException:
            self._scratch.cleanup()
            raise
        with self._lock:
            self._running = self._failure is None
        first = self._ready[0]  # the first rank is an attention worker's
        assert first is not None
        self._eos_token_ids = frozenset(int(token) for token in first["eos_token_ids"])
        self.notes += tuple(str(note) for note in first["notes"])
        if self.recording is not None:
            self._start_recording(self.recording)

    @property
    def traffic(self) -> tuple[LinkTraffic, LinkTraffic]:
        """Messages from attention to expert workers (a2e) and back (e2a), as of the requests that have ended."""
        with self._lock:
            return self._sum_traffic()

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 20) -> Generation:
        """Ask for at most `max_new_tokens` tokens after the tokens `prompt`; returns at once.

        Raises:
            ConfigError: the request is empty, has tokens that the model has not, or does not fit into the cache.
            CollectiveError: a worker has been lost, or the engine is closed.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, but it must be at least 1")
        return self._add(prompt, Sampling(max_new_tokens=max_new_tokens), None)

    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> Generation:
        """Ask for tokens after the tokens `prompt`, which `listener` hears of as they come; returns at once.

        Raises:
            ConfigError: the request is empty, has tokens that the model has not, or does not fit into the cache.
            CollectiveError: a worker has been lost, or the engine is closed.
        """
        return self._add(prompt, sampling, listener)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return self._limits[0]

    @property
    def cache_tokens(self) -> int:
        """Tokens that the caches of all micro-batches of all attention workers hold."""
        return self._limits[0] * self.plan.num_micro_batches * self.split.attention

    @property
    def free_cache_tokens(self) -> int:
        """What requests in flight, each with its prompt and its longest answer, leave of `cache_tokens`.

        It is negative if more have been submitted than fit at once; some of them wait then.
        """
        with self._lock:
            return self.cache_tokens - sum(generation._cache_tokens for generation, _ in self._generations.values())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end any request."""
        return self._eos_token_ids

    @property
    def error(self) -> LaconicError | None:
        """What ended the engine; None while it takes requests."""
        return self._lost

    def _add(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener | None) -> Generation:
        generation, rank, command = self._take(prompt, sampling, listener)
        self._send(rank, [command])
        return generation

    def _take(
        self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener | None
    ) -> tuple[Generation, int, dict[str, Any]]:
        """Take a request; returns it, the rank it is for and what that is to be told."""
        if not prompt:
            raise ConfigError("the prompt has 0 tokens, but it must have at least 1")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ConfigError(
                f"the prompt has tokens from {min(prompt)} to {max(prompt)}, but this model's are from 0 to"
                f" {self._vocabulary - 1}; use the tokenizer of the model"
            )
        if (needed := len(prompt) + sampling.max_new_tokens) > self._limits[0]:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} need {needed} tokens"
                f" in the cache, but cache_tokens is {self._limits[0]}; start the engine with more"
            )
        with self._lock:
            if self._lost is not None:
                raise self._lost
            counts = [0] * self.split.attention
            for _, rank in self._generations.values():
                counts[rank] += 1
            rank = counts.index(min(counts))
            name = f"request-{self._counter}"
            self._counter += 1
            generation = Generation(self, name, needed, listener)
            self._generations[name] = (generation, rank)
        command = {"do": "request", "name": name, "prompt": list(prompt), "sampling": sampling.to_options()}
        return generation, rank, command | {"stream": listener is not None}

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 20) -> list[list[int]]:
        """Return the new tokens of each prompt, in order; the engine runs all of them together.

        Raises:
            ConfigError: a request is empty or does not fit into the cache.
            CollectiveError: a worker was lost.
        """
        sampling = Sampling(max_new_tokens=max_new_tokens)
        taken: list[tuple[Generation, int, dict[str, Any]]] = []
        try:
            for prompt in prompts:
                taken.append(self._take(prompt, sampling, None))
        except LaconicError:
            with self._lock:
                for generation, _, _ in taken:
                    self._generations.pop(generation._name, None)
            raise
        # At once, so that the first forward finds all of them: told one by one, it begins with the first alone.
        for rank in range(self.split.attention):
            self._send(rank, [command for _, of, command in taken if of == rank])
        return [generation.result() for generation, _, _ in taken]

    def trace(self) -> Recording:
        """Record every task of the passes that begin and end inside of a `with` block.

            with engine.trace() as recording:
                engine.generate([[1, 2, 3]])
            print(recording.trace.summary)
            recording.trace.save("run.json")

        Entering the block raises ConfigError if another recording of the engine is on, or if its models are whole and
        there is nothing to trace, and CollectiveError if a worker has been lost.
        """
        return Recording(self)

    def close(self) -> None:
        """End all workers; requests in flight fail. With `trace`, write it first.

        Raises:
            ScheduleError: the trace cannot be written; all workers have ended.
        """
        if self.recording is not None and self._recording is self.recording:
            try:
                self.recording._trace = self._stop_recording(self.recording)
            except CollectiveError as error:
                logging.getLogger("laconic").warning("%s is not written: %s", self._trace_path, error)
        self._end()
        if self.recording is not None and self.recording._trace is not None:
            self.recording._trace.save(self._trace_path)

    def _end(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._fail_all(CollectiveError("the engine is closed"))
        if self._restarting is not None:
            while self._restarting.is_alive():
                for process in self._processes:
                    process.kill()
                self._restarting.join(0.1)
        for rank in range(self.split.attention):
            self._tell(rank, {"do": "stop"})
        for process in self._processes:
            if not process.wait(_STOP_SECONDS):
                process.kill()
        self._end_processes()
        self._scratch.cleanup()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return "\n".join([*(str(worker) for worker in self.workers), *self.notes])

    def _check_split(self, model_dir: Path, wanted: Split) -> Split:
        """Check that the model can be served by these workers, and return those that will."""
        config = read_config(model_dir)
        self._vocabulary: int = config.get_text_config().vocab_size
        split = serving_split(model_dir, wanted)
        if split != wanted:
            self.notes += (
                f"{model_dir.name} is a {config.model_type} model without experts that could be elsewhere, so every"
                " attention worker holds all of it",
            )
        elif split.experts and config.model_type not in TRIED:
            self.notes += (
                f"{config.model_type} is served split, but has not been tried; compare some of its tokens with"
                " those of experts=0",
            )
        return split

    def _runnable(self, plan: InferencePlan) -> InferencePlan:
        """The plan that will run in place of one that asks micro-batches to keep step."""
        if plan.order != "AASS":
            return plan
        runs: Order = "ASAS" if plan.shared_first else "greedy"
        if plan.num_micro_batches > 1 and self.split.experts:
            self.notes += (
                f"order AASS runs as {runs}: micro-batches do not wait for each other between attention and shared"
                " experts",
            )
        return replace(plan, order=runs)

    def _check_trace(self, path: Path) -> Recording:
        self._check_traceable()
        if not path.parent.is_dir():
            raise ConfigError(f"trace is {str(path)!r}, but {str(path.parent)!r} is no directory; make it first")
        if path.is_dir():
            raise ConfigError(f"trace is {str(path)!r}, but that is a directory; give the name of a file")
        self._trace_path = path
        return Recording(self)

    def _check_traceable(self) -> None:
        if not self.split.experts:
            raise ConfigError(
                "trace needs expert workers, but this engine has none: whole models have no plan whose tasks could be"
                " recorded; start expert workers, or leave trace out"
            )

    def _start_recording(self, recording: Recording) -> None:
        self._check_traceable()
        with self._lock:
            if self._recording is not None:
                raise ConfigError("the engine is being recorded already; end that recording first")
            if not self._running:
                raise self._lost or CollectiveError("the workers are being started again; record when they are ready")
            self._recording, recording._num_restarts = recording, self.num_restarts
        try:
            # Whatever an attention worker records, an expert worker has recorded, too: those begin first and end last.
            self._ask_logs(reversed(range(self.split.num_workers)), on=True)
        except BaseException:
            self._recording = None
            raise

    def _stop_recording(self, recording: Recording) -> RunTrace | None:
        if self._recording is not recording:
            return None
        try:
            if recording._num_restarts != self.num_restarts or not self._running:
                raise self._lost or CollectiveError("a worker was lost during the recording, and its part with it")
            logs = self._ask_logs(range(self.split.num_workers), on=False)
        finally:
            self._recording = None
        planned = None if self.choice is None else self.choice.step_seconds
        return RunTrace.of([logs[rank] for rank in sorted(logs)], self.split, self.plan, planned)

    def _ask_logs(self, ranks: Iterable[int], on: bool) -> dict[int, WorkerLog]:
        """Begin or end the recording of one worker after the other; returns what each has recorded until then."""
        logs: dict[int, WorkerLog] = {}
        self._logs = queue.SimpleQueue()
        for rank in ranks:
            if self._running:
                self._tell(rank, {"do": "record", "on": on})
                with contextlib.suppress(queue.Empty):
                    if (answer := self._logs.get(timeout=_RECORD_SECONDS)) is not None:
                        logs[answer[0]] = answer[1]
            if rank not in logs:
                raise self._lost or CollectiveError(
                    f"{self._name(rank)} did not answer within {_RECORD_SECONDS:.0f} s when it was asked for its trace"
                )
        return logs

    def _start_all(self) -> None:
        """Start all workers, or take those of torchrun, and wait until they are ready."""
        self._ready = [None] * self.split.num_workers
        self._ready_count = threading.Semaphore(0)
        settings = self._settings
        if self._connections is None:
            # A file of its own: what an earlier set of workers has written must not be found.
            store = str(Path(self._scratch.name) / f"store-{self.num_restarts}")
            settings = [replace(each, store=store) for each in settings]
        self._processes: list[Worker] = [LocalWorker(settings[0], self._interface)]
        if self._connections is None:
            self._processes += [LocalWorker(each, self._interface) for each in settings[1:]]
        else:
            try:
                found = self._connections.accept(dict(enumerate(settings[1:], 1)), self._start_timeout_seconds)
            except BaseException:
                self._processes[0].kill()
                self._processes[0].wait()
                self._processes[0].close()
                raise
            finally:
                self._connections.close()
            self._processes += [found[rank] for rank in range(1, self.split.num_workers)]
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), name=f"laconic-worker-{rank}", daemon=True)
            for rank in range(self.split.num_workers)
        ]
        for reader in self._readers:
            reader.start()
        self._wait_until_ready(self._start_timeout_seconds)
        self.workers = tuple(self._report(rank) for rank in range(self.split.num_workers))

    def _wait_until_ready(self, timeout_seconds: float) -> None:
        try:
            for _ in self._processes:
                if not self._ready_count.acquire(timeout=timeout_seconds):
                    waiting = [self._name(rank) for rank, said in enumerate(self._ready) if said is None]
                    raise CollectiveError(
                        f"{', '.join(waiting)} did not start within {timeout_seconds:.0f} s; see its output, or give"
                        " start_timeout_seconds"
                    )
                if self._failure is not None or self._closing:
                    raise self._failure or CollectiveError("the engine is closed")
        except BaseException as error:
            with self._lock:
                wrapped = error if isinstance(error, LaconicError) else CollectiveError("the engine did not start")
                self._failure = self._failure or wrapped
            self._end_processes()
            raise

    def _report(self, rank: int) -> WorkerReport:
        role, number = self.split.role(rank)
        said, process = self._ready[rank], self._processes[rank]
        assert said is not None
        return WorkerReport(role, number, process.pid, said["nbytes"], process.host)

    def _name(self, rank: int) -> str:
        role, number = self.split.role(rank)
        return f"{role} worker {number}"

    def _send(self, rank: int, requests: list[dict[str, Any]]) -> None:
        """Hand requests to a worker, or hold them back for those that are being started again."""
        with self._lock:
            if self._held_back is not None:
                self._held_back += [(rank, request) for request in requests]
                return
        self._tell(rank, *requests)

    def _tell(self, rank: int, *commands: dict[str, Any]) -> None:
        stream = self._processes[rank].commands
        with self._writing[rank]:
            try:
                stream.write("".join(f"{json.dumps(command)}\n" for command in commands))
                stream.flush()
            except (OSError, ValueError):
                return  # it has ended, and its reader says so

    def _cancel(self, generation: Generation) -> bool:
        with self._lock:
            known = self._generations.pop(generation._name, None)
        if known is None:
            return False
        self._tell(known[1], {"do": "cancel", "name": generation._name})
        generation._future.set_exception(CancelledError())
        return True

    def _read(self, rank: int) -> None:
        """Read the events of one worker until it ends."""
        process = self._processes[rank]
        error: LaconicError | None = None
        for line in process.events:
            event: dict[str, Any] = json.loads(line)
            if event["is"] == "ready":
                self._ready[rank] = event
                self._ready_count.release()
            elif event["is"] == "token":
                self._hear(event)
            elif event["is"] == "finished":
                a2e, e2a = (LinkTraffic(**direction) for direction in event["traffic"])
                with self._lock:
                    self._traffic[rank] = (a2e, e2a)
                self._finish(event)
            elif event["is"] == "recorded":
                self._logs.put((rank, WorkerLog.from_dict(event["log"])))
            else:
                kind = ModelError if event["refused"] else CollectiveError
                error = kind(f"{self._name(rank)}: {event['error']}")
        self._lose(error or CollectiveError(f"{self._name(rank)} {process.ending()}; its requests are lost"))

    def _hear(self, event: dict[str, Any]) -> None:
        with self._lock:
            known = self._generations.get(event["name"])
        if known is not None and known[0]._listener is not None:
            top = tuple((token, logprob) for token, logprob in event["top"])
            known[0]._listener.on_token(ChosenToken(event["token"], event["logprob"], top))

    def _finish(self, event: dict[str, Any]) -> None:
        with self._lock:
            known = self._generations.get(event["name"])
            if known is None:
                return
            if event["error"] is None:
                del self._generations[event["name"]]
        if event["error"] is None:
            known[0]._end(event["tokens"])
            return
        # The links of an attention worker notice a lost expert worker as soon as its pipe does: the pipe knows why.
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(_LAST_WORDS_SECONDS / len(self._readers))
        with self._lock:
            known = self._generations.pop(event["name"], None)
        if known is not None:
            known[0]._fail(self._failure or CollectiveError(f"{event['name']} failed: {event['error']}"))

    def _lose(self, error: LaconicError) -> None:
        """Fail what is in flight, end all workers, and start them again if that is wanted."""
        with self._lock:
            if self._closing or self._failure is not None:
                self._ready_count.release()
                return
            self._failure = error
            starts_again = self._held_back is not None  # `_restart` knows whether it tries once more
            failed = [] if starts_again else [generation for generation, _ in self._generations.values()]
            if restarts := self._running and self.num_restarts < self._max_restarts:
                self._held_back = []  # only a running engine holds nothing back
            elif not starts_again:
                self._lost = error
            self._running = False
            for generation in failed:
                del self._generations[generation._name]
        for generation in failed:
            generation._fail(error)
        for process in self._processes:
            process.kill()
            self._ready_count.release()
        self._logs.put(None)
        if restarts:
            self._restarting = threading.Thread(target=self._restart, name="laconic-restart", daemon=True)
            self._restarting.start()

    def _restart(self) -> None:
        """Start all workers again, as often as is wanted, and hand them the requests that have come meanwhile."""
        while True:
            self._end_processes()
            with self._lock:
                self._past_traffic = self._sum_traffic()
                self._traffic.clear()
                if self._closing:
                    return
                self.num_restarts += 1
                self._failure = None
            try:
                self._start_all()
                error = self._hand_over()
            except LaconicError as failure:
                error = failure
            if error is None:
                return
            if self._closing or self.num_restarts >= self._max_restarts:
                self._fail_all(error)
                return

    def _hand_over(self) -> LaconicError | None:
        """Send what was held back; returns what ended the new workers meanwhile, if anything did."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            for rank, command in self._held_back or ():
                if command["name"] in self._generations:
                    self._tell(rank, command)
            self._held_back = None
            self._running = True
        return None

    def _sum_traffic(self) -> tuple[LinkTraffic, LinkTraffic]:
        a2e, e2a = self._past_traffic
        for there, back in self._traffic.values():
            a2e, e2a = a2e + there, e2a + back
        return a2e, e2a

    def _fail_all(self, error: LaconicError) -> None:
        with self._lock:
            self._lost = self._lost or error
            failed = [generation for generation, _ in self._generations.values()]
            self._generations.clear()
        for generation in failed:
            generation._fail(error)

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(_STOP_SECONDS)
        for reader in self._readers:
            reader.join(_STOP_SECONDS)
        for process in self._processes:
            process.close()


def serving_split(model_dir: Path, wanted: Split) -> Split:
    """Return the workers that will serve a model: a dense one has no expert workers.

    Raises:
        ConfigError: there are more expert workers than experts.
        ModelError: the directory holds no model that can be served.
    """
    _, blocks = find_experts(read_config(model_dir))
    if not blocks:
        return Split(wanted.attention, 0)
    if wanted.experts:
        for block in blocks.values():
            wanted.expert_range(0, block.num_experts)
    return wanted
