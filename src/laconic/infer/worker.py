"""One worker of an engine: `python -m laconic.infer.worker SETTINGS`, as Engine starts it, or a rank of torchrun.

SETTINGS is the JSON of a WorkerSettings. A worker reads commands from its standard input and writes events to what was
its standard output, one JSON object a line; what libraries print goes to standard error. The end of its input ends it.
A rank of torchrun does the same over a connection (laconic.infer.control).

    commands: {"do": "request", "name", "prompt", "sampling", "stream"}, {"do": "cancel", "name"}, {"do": "stop"},
              {"do": "record", "ask", "on"} for workers of both roles, answered by {"is": "recorded"} with a WorkerLog,
              {"do": "loads", "ask"} for attention workers, answered by {"is": "loads", "loads"}: rows by layer and
              expert; both with "ask", the number of the question
    events: {"is": "ready", ...}, {"is": "failed", "error", "refused"},
            {"is": "tokens", "tokens"}: one of each forward, a list of [name, token, logprob, top, prompt] (see
            ChosenToken.to_fields) of the requests with "stream",
            {"is": "finished", "name", "tokens", "error", "is_own", "traffic"}: an error that is the request's own loses
            no other; traffic a2e and e2a of this worker so far,
            {"is": "progress", "stalled_seconds"} from attention workers: blocks of the model have ended since the last;
            how long ago the last was of the micro-batch, of those with requests, that has waited longest,
            {"is": "deserted"} from expert workers: all attention workers have ended, and so does this one
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from laconic.errors import ConfigError, LaconicError
from laconic.infer.recorder import Recorder
from laconic.infer.settings import WorkerSettings

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from laconic.infer.group_link import LinkGroups
    from laconic.infer.links import MessageEnd
    from laconic.infer.sampling import ChosenToken
    from laconic.infer.transformers_seam import Finished

_ENGINE_KNOWS_SECONDS = 0.5
_PROGRESS_SECONDS = 1.0


class _Events:
    """Writes events, from any thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def write(self, what: str, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # an engine that has ended; the input ends, too
            self._stream.write(json.dumps({"is": what} | values) + "\n")
            self._stream.flush()


def main() -> None:
    """Entry point of the module."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not end up between events
    work(WorkerSettings.from_json(sys.argv[1]), sys.stdin, stream)


def work(settings: WorkerSettings, commands: IO[str], stream: IO[str]) -> NoReturn:
    """Be a worker until `commands` end or say stop, and end the process; `stream` takes the lines of events."""
    events = _Events(stream)
    code = 0
    try:
        _work(settings, events, commands)
    except LaconicError as error:
        events.write("failed", error=str(error), refused=True)
        code = 2
    except Exception as error:
        traceback.print_exc()
        events.write("failed", error=f"{type(error).__name__}: {error}", refused=False)
        code = 1
    except KeyboardInterrupt:  # at a rank in a terminal
        code = 130
    # Threads of managers and links would keep the process, and destructors of process groups can hang.
    sys.stderr.flush()
    os._exit(code)


def _work(settings: WorkerSettings, events: _Events, commands: IO[str]) -> None:
    import torch

    from laconic.infer.device import take_device
    from laconic.infer.transformers_seam import check_transformers

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    check_transformers(warns=False)  # the engine has
    local_rank, num_local = local_place(settings)
    device = take_device(settings.device, local_rank, num_local if settings.link == "group" else 0)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    role, number = settings.split.role(settings.rank)
    if role == "expert":
        _serve_experts(settings, number, dtype, device, events, commands)
    else:
        _serve_requests(settings, dtype, device, events, commands)


def local_place(settings: WorkerSettings) -> tuple[int, int]:
    """Return the number of a worker among those of this machine, and how many these are, as far as it is known.

    A launcher that does not say it, or says it wrong, is a ConfigError.
    """
    if not settings.store.startswith("tcp://"):
        return settings.rank, settings.split.num_workers
    # Under torchrun, whose store has an address, several machines have ranks; other launchers may not count them.
    local_rank = _number_of("LOCAL_RANK", 0)
    return local_rank, _number_of("LOCAL_WORLD_SIZE", local_rank + 1, local_rank + 1)


def _number_of(variable: str, least: int, default: int | None = None) -> int:
    text = os.environ.get(variable, default)
    try:
        number = int(text if text is not None else "")
    except ValueError:
        number = least - 1
    if number < least:
        found = "not set" if text is None else repr(text)
        raise ConfigError(
            f"{variable} is {found} in the environment, but it must be an integer of at least {least}: it says which"
            " device of this machine a worker takes; start the workers with torchrun, or set it in the launcher"
        )
    return number


def _join_group(settings: WorkerSettings, store: Store) -> ProcessGroup:
    """Join all workers in a process group, for measuring links."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from laconic.infer.connections import FOREVER

    rank, size = settings.rank, settings.split.num_workers
    prefixed = PrefixStore("group", store)
    backend = dist.ProcessGroupGloo(prefixed, rank, size, timeout=FOREVER)
    group = dist.ProcessGroup(prefixed, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _join_link(settings: WorkerSettings, store: Store, device: torch.device) -> LinkGroups:
    from laconic.infer.group_link import join_link

    return join_link(store, settings.rank, settings.split.num_workers, device, settings.answer_timeout_seconds)


def _serve_experts(
    settings: WorkerSettings,
    number: int,
    dtype: torch.dtype | None,
    device: torch.device,
    events: _Events,
    commands: IO[str],
) -> None:
    from laconic.infer.coded_experts import keep_experts
    from laconic.infer.connections import accept_attention
    from laconic.infer.control import open_store
    from laconic.infer.expert_share import ExpertShare
    from laconic.infer.group_link import GroupConnection
    from laconic.infer.links import serve
    from laconic.infer.payload import prepared_coder
    from laconic.infer.transformers_seam import load_experts

    split, numbers = settings.split, itertools.count()
    layers = load_experts(
        Path(settings.model_dir),
        dtype,
        lambda count: settings.experts_of(next(numbers), number, count),
        functools.partial(keep_experts, settings.expert_format),
    )
    share = ExpertShare([layer.to(device) for layer in layers])
    recorder = Recorder()
    # An engine that has ended closes the input; no attention worker says stop then.
    obey = threading.Thread(target=_obey_engine, args=(recorder, events, commands), name="laconic-engine", daemon=True)
    obey.start()
    store = open_store(settings.store, split.num_workers)
    connections: Sequence[MessageEnd]
    if settings.link == "group":
        groups = _join_link(settings, store, device)
        connections = [GroupConnection(groups, peer) for peer in range(split.attention)]
    else:
        connections = accept_attention(store, number, split.attention)
    coder = prepared_coder(settings.payload, lambda: _join_group(settings, store))
    events.write("ready", nbytes=share.nbytes, rounding=share.rounding)
    serve(connections, share.run, coder, recorder)
    events.write("deserted")


def _obey_engine(recorder: Recorder, events: _Events, commands: IO[str]) -> None:
    """Record when asked to, and end with the engine."""
    with contextlib.suppress(OSError):
        while line := commands.readline():
            _record(recorder, json.loads(line), events)
    os._exit(0)


def _record(recorder: Recorder, command: dict[str, Any], events: _Events) -> None:
    """Begin or end a recording, and answer with what the one before has recorded."""
    log = recorder.stop()
    if command["on"]:
        recorder.start()
    events.write("recorded", ask=command["ask"], log=asdict(log))


def _serve_requests(
    settings: WorkerSettings, dtype: torch.dtype | None, device: torch.device, events: _Events, commands: IO[str]
) -> None:
    from laconic.infer.attention_worker import AttentionWorker
    from laconic.infer.connections import connect_expert
    from laconic.infer.control import open_store
    from laconic.infer.group_link import GroupExpertLink
    from laconic.infer.links import ExpertLink, TcpExpertLink
    from laconic.infer.payload import prepared_coder
    from laconic.infer.sampling import Sampling

    streams: set[str] = set()
    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    ready = threading.Event()

    def read_commands() -> None:
        with contextlib.suppress(OSError):
            for line in commands:
                inbox.put(line)
        if not ready.is_set():
            os._exit(0)  # the engine has ended, and other workers may never come to meet
        inbox.put(None)

    threading.Thread(target=read_commands, name="laconic-engine", daemon=True).start()

    def tell_tokens(chosen: list[tuple[str, ChosenToken]]) -> None:
        told = [(name, *token.to_fields()) for name, token in chosen if name in streams]
        if told:
            events.write("tokens", tokens=told)

    def finished(end: Finished) -> None:
        streams.discard(end.name)
        traffic = [asdict(direction) for direction in worker.traffic()]
        events.write("finished", name=end.name, tokens=end.tokens, error=end.error, is_own=end.is_own, traffic=traffic)

    def end_lost(why: str) -> None:
        # The engine sees the end of a process by itself, and knows more of it. This is for one that hangs.
        time.sleep(_ENGINE_KNOWS_SECONDS)
        events.write("failed", error=why, refused=False)
        os._exit(3)

    def lost(why: str) -> None:
        threading.Thread(target=end_lost, args=(why,)).start()

    def broken(why: str) -> None:
        # At once, and on the thread that found it: whoever hears that a request has failed must find the engine failed.
        events.write("failed", error=why, refused=False)
        sys.stderr.flush()
        os._exit(3)

    open_once = functools.cache(lambda: open_store(settings.store, settings.split.num_workers))

    def meet() -> list[ExpertLink]:
        store, seconds = open_once(), settings.answer_timeout_seconds
        names = [f"expert worker {number}" for number in range(settings.split.experts)]
        if settings.link == "group":
            groups, first = _join_link(settings, store, device), settings.split.attention
            return [GroupExpertLink(groups, first + n, name, seconds, lost) for n, name in enumerate(names)]
        connections = [connect_expert(store, number, settings.rank) for number in range(settings.split.experts)]
        coder = prepared_coder(settings.payload, lambda: _join_group(settings, store))
        return [TcpExpertLink(*each, seconds, lost, coder) for each in zip(connections, names, strict=True)]

    def report_progress() -> None:
        reported = worker.progress_time
        while True:
            time.sleep(_PROGRESS_SECONDS)
            if (last := worker.progress_time) != reported:
                reported = last
                events.write("progress", stalled_seconds=worker.stalled_seconds)

    recorder = Recorder(device)
    worker = AttentionWorker(settings, dtype, device, meet, finished, tell_tokens, recorder, broken)
    events.write("ready", nbytes=worker.nbytes, notes=worker.notes, eos_token_ids=worker.eos_token_ids)
    ready.set()
    threading.Thread(target=report_progress, name="laconic-progress", daemon=True).start()
    while (line := inbox.get()) is not None:
        command: dict[str, Any] = json.loads(line)
        if command["do"] == "request":
            if command["stream"]:
                streams.add(command["name"])
            worker.add(command["name"], command["prompt"], Sampling.from_options(command["sampling"]))
        elif command["do"] == "cancel":
            streams.discard(command["name"])
            worker.cancel(command["name"])
        elif command["do"] == "record":
            _record(recorder, command, events)
        elif command["do"] == "loads":
            events.write("loads", ask=command["ask"], loads=worker.expert_loads)
        else:
            break
    worker.close()


if __name__ == "__main__":
    main()
