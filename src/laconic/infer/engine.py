"""Engine: the public face of inference. It starts the workers of a model, hands them requests and gives back tokens.

The workers are processes of this machine that meet in a private file and talk over the loopback interface, or those of
torchrun on any machines (see control.py). The engine itself holds no weights: it writes requests to the attention
workers and reads what they finish, as lines of JSON over pipes or connections. When a worker ends that should not, its
pipe closes; all requests in flight fail with its name at once, and the other workers are ended. With `max_restarts` all
workers are then started again, and requests that come meanwhile wait for them (workers.py).

    engine.py -> serving_plan.py   which workers, which plan
              -> recording.py      traces
              -> workers.py        events, losses, restarts -> launch.py, watch.py -> in_flight.py
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from laconic.cost.infer.engine_plan import EngineLimits
from laconic.errors import CollectiveError, ConfigError, LaconicError, ModelError
from laconic.infer.auto_plan import AutoPlan
from laconic.infer.device import DeviceKind, check_device
from laconic.infer.expert_placement import check_expert_placement, place_experts, save_loads
from laconic.infer.generation_config import AnswerDefaults, check_generation_config, read_generation_config
from laconic.infer.in_flight import Generation, InFlight
from laconic.infer.launch import Launcher, WorkerLauncher, torchrun_info
from laconic.infer.links import LinkKind
from laconic.infer.payload import LinkTraffic, PayloadCoding
from laconic.infer.recording import Recording, check_trace_file, check_traceable
from laconic.infer.sampling import Sampling
from laconic.infer.serving_plan import plan_serving
from laconic.infer.settings import WorkerSettings
from laconic.infer.token_engine import TokenListener
from laconic.infer.transformers_seam import CacheLimits, check_transformers, check_weights, read_config
from laconic.infer.watch import progress_limit
from laconic.infer.workers import WorkerReport, WorkerSet
from laconic.options import EXPERT_FORMATS, ExpertFormat
from laconic.schedule.inference import InferencePlan
from laconic.shared_secret import read_secret

_LOADS_SECONDS = 10.0
_LONGEST_SECONDS = 1e9
"""30 years; not for ever, which neither locks nor torch's groups take for a time."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "payload": get_args(PayloadCoding),
    "launcher": get_args(Launcher),
    "expert_format": EXPERT_FORMATS,
    "link": get_args(LinkKind),
}


class Engine:
    """Generation with a mixture-of-experts model on attention workers and expert workers.

    `generate` and `submit` are greedy, `stream` samples. In float32 greedy tokens are those of transformers'
    `generate`, by the rules of the model's generation_config.json (repetition_penalty and others). One attention worker
    and one expert worker without slices add the products of a row in transformers' order; more workers or slices add
    them in another, which moves the last bits of a logit.

    Use it in a `with` block, or call `close`.

    Args:
        model_dir: directory with config.json and safetensors files.
        attention: number of workers that hold everything but the experts; requests are divided between them.
        experts: number of workers that hold the experts, each some of every layer's. 0 serves whole models. None is
            1, or 0 for a model without experts; an automatic plan may then also make all workers serve whole models,
            unless another argument needs expert workers. Arguments that need them (payload, expert_loads, slices of a
            plan, ...) are refused where there are none.
        plan: micro-batches, slices and order; None is one micro-batch in one slice. "auto" or an AutoPlan chooses them
            once, before workers start; both are refused for a model without experts, which leaves nothing to choose.
        rates: for "auto": file of `laconic profile --infer`; None takes its default path.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's.
        cache_tokens: tokens, of prompts and answers, in the cache of each micro-batch.
        batch_tokens: tokens that one forward takes at most; longer prompts are cut.
        answer_timeout_seconds: for expert workers to answer; one that takes longer is lost. An attention worker that
            has requests is lost when no block of the model ends for 10 s more than that.
        threads: that each worker computes with; None divides the machine's cores, or under torchrun leaves them to
            OMP_NUM_THREADS.
        start_timeout_seconds: for all workers to load their weights and meet.
        device: "cpu", or "cuda": the workers of a machine take its CUDA devices in turn, and rows travel through host
            memory unless `link` is "group".
        expert_device: of expert workers, "cpu" or "cuda"; None is `device`, which is that of attention workers then.
        payload: how hidden states and sums travel between workers: "raw", "lossless" (the same tokens), "int8" (other
            tokens: values are rounded, see laconic.infer.payload), or "auto": raw or lossless for each message, by
            measured rates of links and codec.
        link: how they travel: "tcp" over connections of our own, "group" over process groups of torch.distributed: gloo
            between CPUs, NCCL between CUDA devices, of which each worker needs one. The latter takes raw payloads
            and devices of one kind; automatic plans and traces know "tcp" alone.
        launcher: "engine" starts the workers here. "torchrun" takes the ranks of torchrun as workers: this process is
            rank 0 and starts attention worker 0, each other rank calls `serve_rank`; one engine per launch.
        max_restarts: how often all workers are started again after one was lost. Requests in flight fail all the same.
        trace: file into which `close` writes a trace of the whole run with `RunTrace.save`; `recording` has it then.
        expert_loads: file of the rows that each expert was chosen for. Where it is there, experts are placed by it so
            that the busiest expert worker has least to do; `close` writes this run's.
        redundant_experts: further copies of experts in each layer, of those that have most to do by `expert_loads`;
            each row is sent to one of them.
        expert_format: in which expert workers hold the matrices of experts: "exact", or rounded to a code of
            laconic.formats in blocks of 64 values: "int8" (8.25 bits of a value), "int6", "int5", "nf4", "int4", "e2m1"
            (4.25 bits). Tokens are then those of the model with its experts rounded so.

    Attributes:
        split: the workers there are. A model without experts has no expert workers.
        plan: the plan that runs.
        choice: what an automatic plan chose, and why; None without.
        notes: what was chosen, and what differs from what was asked for, sentences for the user.
        recording: of `trace`; None without.
        answer_defaults: what the server gives a request that does not say, by the model's generation_config.json.

    Raises:
        ConfigError: an argument breaks its rule, or transformers is missing or of a version that is not known.
        ModelError: the directory holds no model that can be served.
        PlanError: an automatic plan was asked for, and the model's sizes cannot be counted, or a request of the
            expected size does not fit into the cache or the model's positions.
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
        device: DeviceKind = "cpu",
        payload: PayloadCoding = "raw",
        launcher: Launcher = "engine",
        max_restarts: int = 0,
        trace: str | os.PathLike[str] | None = None,
        expert_loads: str | os.PathLike[str] | None = None,
        redundant_experts: int = 0,
        expert_format: ExpertFormat = "exact",
        expert_device: DeviceKind | None = None,
        link: LinkKind = "tcp",
    ) -> None:
        check_transformers()
        _check_integers(
            attention=attention,
            experts=experts,
            cache_tokens=cache_tokens,
            batch_tokens=batch_tokens,
            threads=threads,
            max_restarts=max_restarts,
            redundant_experts=redundant_experts,
        )
        _check_seconds(answer_timeout_seconds=answer_timeout_seconds, start_timeout_seconds=start_timeout_seconds)
        _check_choices(dtype=dtype, payload=payload, launcher=launcher, expert_format=expert_format, link=link)
        _check_numbers(threads, max_restarts, launcher)
        devices = {"device": device} | ({} if expert_device is None else {"expert_device": expert_device})
        for name, each in devices.items():
            check_device(each, name)
        self._link = link
        _check_link(link, payload, device, expert_device or device)
        _check_known(link, plan, trace)
        CacheLimits(cache_tokens, batch_tokens)
        of_experts = {
            "expert_format": expert_format,
            "expert_device": expert_device,
            "payload": payload,
            "link": link,
            "expert_loads": None if expert_loads is None else str(expert_loads),
            "redundant_experts": redundant_experts,
        }
        self._pid = os.getpid()
        directory, limits = Path(model_dir), EngineLimits(cache_tokens, batch_tokens)
        serving = plan_serving(
            directory, attention, experts, plan, rates, limits, dtype, trace is not None, of_experts, device
        )
        self.split, self.plan, self.choice, self.notes = serving.split, serving.plan, serving.choice, serving.notes
        self._loads_path = None if expert_loads is None else Path(expert_loads)
        check_expert_placement(self._loads_path, redundant_experts)
        held: list[list[list[int]]] | None = None
        if self._loads_path is not None:
            held, note = place_experts(self.split, serving.num_experts, self._loads_path, redundant_experts)
            self.notes += (note,)
            self._loads_path = self._loads_path.absolute()
        self._trace_path = None if trace is None else Path(trace)
        if self._trace_path is not None:
            check_traceable(self.split)
            check_trace_file(self._trace_path)
            self._trace_path = self._trace_path.absolute()  # of now, wherever the program goes until it is written
        check_weights(directory)
        generation = read_generation_config(directory, read_config(directory))
        self.notes += check_generation_config(generation, directory)
        self.answer_defaults = _check_defaults(AnswerDefaults.of(generation))
        info = torchrun_info(launcher, self.split)
        settings = [
            WorkerSettings(
                rank=rank,
                model_dir=str(directory.absolute()),
                store="",
                split=self.split,
                plan=self.plan,
                dtype=dtype,
                cache_tokens=cache_tokens,
                batch_tokens=batch_tokens,
                answer_timeout_seconds=answer_timeout_seconds,
                threads=threads,
                device=device if self.split.role(rank)[0] == "attention" else expert_device or device,
                payload=payload,
                link=link,
                expert_format=expert_format,
                held=held,
            )
            for rank in range(self.split.num_workers)
        ]
        self._cache_tokens = cache_tokens
        self._max_request_tokens = min(cache_tokens, serving.positions or cache_tokens)
        self._requests = InFlight(self.split.attention, cache_tokens, serving.vocabulary, serving.positions)
        self._workers = WorkerSet(
            WorkerLauncher(settings, info, start_timeout_seconds),
            self.split,
            self._requests,
            start_timeout_seconds,
            progress_limit(answer_timeout_seconds),
            max_restarts,
        )
        try:
            first = self._workers.start()
        except BaseException:
            self._workers.close()
            raise
        self._eos_token_ids = frozenset(int(token) for token in first["eos_token_ids"])
        if never := sorted(token for token in self._eos_token_ids if token >= serving.vocabulary):
            self.notes += (
                f"eos_token_id names {', '.join(map(str, never))}, at which no answer ends: the model has"
                f" {serving.vocabulary} tokens",
            )
        self.notes += tuple(str(note) for note in first["notes"])
        self.recording = None if trace is None else self.trace().__enter__()
        self._forgotten = weakref.finalize(self, _end_forgotten, self._workers, self._pid)
        self._forgotten.atexit = False  # the pipes close then, at which workers end

    @property
    def workers(self) -> tuple[WorkerReport, ...]:
        """Reports of all workers."""
        return self._workers.reports

    @property
    def num_restarts(self) -> int:
        """How often the workers were started again."""
        return self._workers.num_restarts

    @property
    def traffic(self) -> tuple[LinkTraffic, LinkTraffic]:
        """Messages from attention to expert workers (a2e) and back (e2a), as of the requests that have ended."""
        return self._workers.traffic

    def expert_loads(self) -> list[list[int]]:
        """Return the rows that each expert of each layer was chosen for since the workers started.

        Raises:
            CollectiveError: an attention worker is lost or does not answer.
        """
        found: list[list[list[int]]] = []
        for rank in range(self.split.attention):
            answer = self._workers.ask(rank, {"do": "loads"}, _LOADS_SECONDS)
            if answer is None:
                raise CollectiveError(f"{self._workers.name(rank)} does not say which experts it has asked for")
            found.append(answer["loads"])
        return [[sum(each) for each in zip(*layers, strict=True)] for layers in zip(*found, strict=True)]

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 20) -> Generation:
        """Ask for at most `max_new_tokens` tokens after the tokens `prompt`; returns at once.

        Raises:
            ConfigError: the request is empty, has tokens that the model has not, or does not fit into the cache.
            CollectiveError: a worker has been lost, or the engine is closed.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}, but it must be at least 1")
        return self.stream(prompt, Sampling(max_new_tokens=max_new_tokens), None)

    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener | None) -> Generation:
        """Ask for tokens after the tokens `prompt`, which `listener` hears of as they come; returns at once.

        Raises:
            ConfigError: the request is empty, has tokens that the model has not, or does not fit into the cache.
            CollectiveError: a worker has been lost, or the engine is closed.
        """
        generation, command = self._requests.take(prompt, sampling, listener, self._cancel)
        try:
            self._workers.send(generation._rank, command)
        except BaseException:  # Ctrl-C: nobody holds it, and a worker that never got it would seem to hang
            generation.cancel()
            raise
        return generation

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request, prompt and answer together: as the cache and the model's positions allow."""
        return self._max_request_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens that the caches of all micro-batches of all attention workers hold."""
        return self._cache_tokens * self.plan.num_micro_batches * self.split.attention

    @property
    def free_cache_tokens(self) -> int:
        """What requests in flight, each with its prompt and its longest answer, leave of `cache_tokens`.

        It is negative if more have been submitted than fit at once; some of them wait then.
        """
        return self.cache_tokens - self._requests.cache_tokens

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end any request."""
        return self._eos_token_ids

    @property
    def error(self) -> LaconicError | None:
        """What ended the engine; None while it takes requests."""
        return self._requests.refusal

    @property
    def is_ready(self) -> bool:
        """Whether all workers run; not while they start again, when requests wait for them."""
        return self._workers.running

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 20) -> list[list[int]]:
        """Return the new tokens of each prompt, in order; the engine runs all of them together.

        If one fails, or Ctrl-C ends the wait, the others are cancelled.

        Raises:
            ConfigError: a request is empty or does not fit into the cache.
            CollectiveError: a worker was lost.
        """
        sampling = Sampling(max_new_tokens=max_new_tokens)
        taken: list[Generation] = []
        commands: dict[int, list[dict[str, Any]]] = {}
        try:
            for prompt in prompts:
                generation, command = self._requests.take(prompt, sampling, None, self._cancel)
                taken.append(generation)
                commands.setdefault(generation._rank, []).append(command)
        except BaseException:
            self._requests.forget(taken)
            raise
        # At once, so that the first forward finds all of them: told one by one, it begins with the first alone.
        try:
            for rank, some in commands.items():
                self._workers.send(rank, *some)
            return [generation.result() for generation in taken]
        except BaseException:  # Ctrl-C, or one that failed: nobody holds the others
            for generation in taken:
                generation.cancel()
            raise

    def trace(self) -> Recording:
        """Record every task of the passes that begin and end inside of a `with` block.

            with engine.trace() as recording:
                engine.generate([[1, 2, 3]])
            print(recording.trace.summary)
            recording.trace.save("run.json")

        Entering the block raises ConfigError if another recording of the engine is on, if its models are whole and
        there is nothing to trace, or if they are linked by a group, and CollectiveError if a worker has been lost.
        """
        _check_known(self._link, None, "a file")
        planned = None if self.choice is None else self.choice.step_seconds
        return Recording(self._workers, self.split, self.plan, planned)

    def close(self) -> None:
        """End all workers; requests in flight fail. With `trace` or `expert_loads`, write them first.

        In a process that was forked from the engine's it does nothing: the workers are those of the other.

        Raises:
            ScheduleError: the trace cannot be written; all workers have ended.
        """
        if os.getpid() != self._pid:
            return
        self._forgotten.detach()
        recording, path = self.recording, self._trace_path
        if recording is not None:
            try:
                recording.end()
            except CollectiveError as error:
                logging.getLogger("laconic").warning("%s is not written: %s", path, error)
        self._write_loads()
        self._workers.close()
        if recording is not None and recording._trace is not None and path is not None:
            recording.trace.save(path)

    def _write_loads(self) -> None:
        """Write the file of `expert_loads`, once; on a thread, as a signal handler may have interrupted a command."""
        path, self._loads_path = self._loads_path, None
        if path is None:
            return

        def write() -> None:
            try:
                save_loads(path, self.expert_loads())
            except (CollectiveError, OSError) as error:
                logging.getLogger("laconic").warning("%s is not written: %s", path, error)

        writing = threading.Thread(target=write, name="laconic-loads", daemon=True)
        try:
            writing.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            return
        writing.join(_LOADS_SECONDS * self.split.attention)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return "\n".join([*(str(worker) for worker in self.workers), *self.notes])

    def _cancel(self, generation: Generation, reason: BaseException) -> bool:
        runs = self._requests.cancel(generation, reason)
        if runs:
            self._workers.send(generation._rank, {"do": "cancel", "name": generation._name})
        return runs


def _end_forgotten(workers: WorkerSet, pid: int) -> None:
    """End the workers of an engine that nobody can close any more."""
    if os.getpid() == pid:
        # On a thread of its own: garbage is collected anywhere, with any lock held.
        threading.Thread(target=workers.close, name="laconic-close", daemon=True).start()
        warnings.warn(
            "an Engine was not closed; use it in a `with` block, or call close", ResourceWarning, stacklevel=2
        )


def _check_defaults(defaults: AnswerDefaults) -> AnswerDefaults:
    """Return what generation_config.json gives a request that does not say; what breaks its rule is a ModelError."""
    try:
        for longest in (defaults.max_new_tokens, defaults.max_length):
            Sampling(
                defaults.temperature, defaults.top_p, defaults.top_k, max_new_tokens=1 if longest is None else longest
            )
    except ConfigError as error:
        raise ModelError(f"the model's generation_config.json is wrong: {error}; mend it, or remove it") from None
    return defaults


def _check_known(link: str, plan: InferencePlan | AutoPlan | str | None, trace: str | os.PathLike[str] | None) -> None:
    """Refuse what knows the times of TCP alone."""
    if link == "tcp":
        return
    if plan is not None and not isinstance(plan, InferencePlan):
        raise ConfigError(
            f"plan is automatic with link = {link!r}, but rates are those of link = 'tcp' (laconic profile --infer);"
            " give an InferencePlan (laconic infer plan finds one)"
        )
    if trace is not None:
        raise ConfigError(
            f"trace is asked for with link = {link!r}, over which nothing notes when an answer comes; leave link out"
        )


def _check_link(link: str, payload: str, *devices: str) -> None:
    """Check the argument `link` beside those that it cannot work with."""
    if link == "tcp":
        return
    why = "link is 'group', "
    if payload != "raw":
        raise ConfigError(
            f"{why}whose messages have sizes that both ends know beforehand, but payload is {payload!r}; leave one of"
            " them out"
        )
    if len(set(devices)) > 1:
        raise ConfigError(
            f"{why}which joins devices of one kind, but attention workers are on {devices[0]!r} and expert workers on"
            f" {devices[1]!r}; leave link or expert_device out"
        )
    if read_secret() is not None:
        raise ConfigError(
            f"{why}but there is a shared secret, which torch's groups do not ask for; leave link out, or unset"
            " LACONIC_SECRET and LACONIC_SECRET_FILE on a network of your own"
        )


def _check_integers(**given: int | None) -> None:
    """Refuse other integers than Python's: workers are told them as JSON."""
    for name, value in given.items():
        if value is not None and type(value) is not int:
            raise ConfigError(f"{name} is {value!r}, but it must be an int; convert it with int()")


def _check_seconds(**given: float) -> None:
    """Refuse what is no time that threads can wait."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_SECONDS:
            raise ConfigError(f"{name} is {value!r}, but it must be a number above 0 and at most {_LONGEST_SECONDS:g}")


def _check_choices(**given: str) -> None:
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ConfigError(f"{name} is {value!r}, but it must be one of {', '.join(_CHOICES[name])}")


def _check_numbers(threads: int | None, max_restarts: int, launcher: str) -> None:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}, but it must be at least 1; leave it out to divide the cores")
    if max_restarts < 0 or (max_restarts and launcher == "torchrun"):
        raise ConfigError(
            f"max_restarts is {max_restarts}, but it must be at least 0, and 0 under torchrun, which starts its"
            " ranks again itself (--max-restarts)"
        )
