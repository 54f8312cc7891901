"""Starts a run: in this process, as one of torchrun's, or as several through torch's elastic launcher.

The processes of a local run meet in a private file and talk over the loopback interface (see rendezvous.py). When one
of them dies, the elastic agent stops the others and this process names the one that failed. Ctrl-C and SIGTERM reach
this process only (the workers have sessions of their own); it passes them on as a request to finish the step, save and
leave.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from laconic.errors import ConfigError, LaconicError
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import save_config
from laconic.train.distributed.parallel_state import check_division
from laconic.train.distributed.world import join_world, num_cores, read_environment
from laconic.train.launch.rendezvous import BACKEND, LOOPBACK, local_rendezvous
from laconic.train.launch.worker import leave, work
from laconic.train.report.run_dir import checkpoint_names, latest_name, new_run_dir
from laconic.train.signals import (
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_TERMINATED,
    STOP_SIGNAL,
    StopRequest,
)

__all__ = ["launch"]

_WORKER = "laconic.train.launch.worker"
# What a process takes with torch and transformers loaded: measured, 0.3 to 0.4 GiB, some of it shared.
_PROCESS_NBYTES = 1 << 28
# Exit codes of processes that were stopped because of another one: by themselves, or by the agent before they listened.
_BYSTANDER_CODES = (EXIT_PEER_LOST, -signal.SIGTERM)


def launch(config: TrainConfig) -> int:
    """Train as `config` says and return the exit code.

    0: done. 130 or 143: stopped early by SIGINT or SIGTERM, and saved. 1: a process died or failed; the message, on
    stderr, names its rank. Under torchrun this process is one of the run's, and it ends here with that code; otherwise
    `config.nproc` processes are started, one of them right here if it is only one.

    Raises:
        ConfigError: the environment cannot be used.
        LaconicError: `run` raised it.
    """
    info = read_environment(os.environ)
    if info is not None and info.world_size > 1:
        if info.rank == 0:
            print(f"laconic: {_exposure(os.environ)}", file=sys.stderr)
        ending = work(config, info, StopRequest())
        if ending.message is not None:
            print(ending.message, file=sys.stderr)
        leave(ending.code)
    if torch.cuda.is_available() and config.nproc > torch.cuda.device_count() > 0:
        print(f"laconic: one process per GPU: {torch.cuda.device_count()} instead of {config.nproc}", file=sys.stderr)
        config = replace(config, nproc=torch.cuda.device_count())
    if info is not None or config.nproc == 1:
        from laconic.train.run import run  # slow to load, and a launcher does without

        return run(config, join_world(info, config.rank_timeout_seconds), StopRequest())
    _check_machine(config)
    return _launch_workers(replace(config, run_dir=config.run_dir or new_run_dir()))


def _check_machine(config: TrainConfig) -> None:
    """Check before a process is started that the batch divides and this machine can hold so many processes.

    Raises:
        ConfigError: it cannot; too few cores only warn.
    """
    check_division(config, config.nproc)
    memory, cores = psutil.virtual_memory(), num_cores()
    if config.nproc * _PROCESS_NBYTES > memory.total:
        raise ConfigError(
            f"nproc is {config.nproc}, but this machine has {memory.total / 2**30:.0f} GiB of memory, and a process "
            f"takes {_PROCESS_NBYTES / 2**30:.2f} GiB before it holds any model; start at most "
            f"{memory.total // _PROCESS_NBYTES}"
        )
    if config.nproc > cores:
        print(f"laconic: {config.nproc} processes share {cores} cores, and will wait for each other", file=sys.stderr)


def _launch_workers(config: TrainConfig) -> int:
    assert config.run_dir is not None
    with (
        tempfile.TemporaryDirectory(prefix="laconic-") as scratch,
        _quiet_elastic(),
        local_rendezvous(Path(scratch)),
        _pass_on_signals() as stopped,
    ):
        config_file = Path(scratch) / "config.toml"
        save_config(config, config_file)
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.nproc,
            run_id=uuid.uuid4().hex,
            role="laconic",
            rdzv_backend=BACKEND,
            local_addr=LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch) / "logs")),
            signals_to_handle="SIGHUP,SIGQUIT",  # those that this process does not handle
        )
        try:
            elastic_launch(launch_config, sys.executable)("-m", _WORKER, str(config_file))
        except ChildFailedError as error:
            return _explain(error.failures, stopped, Path(config.run_dir))
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _explain(failures: Mapping[int, ProcessFailure], stopped: list[int], run_dir: Path) -> int:
    """Report why the workers ended; returns the exit code, or raises the LaconicError of a worker here.

    Args:
        failures: by rank, in the order in which the agent saw them.
        stopped: exit codes that signals to this process asked for.
        run_dir: of the run.
    """
    codes = {failure.exitcode for failure in failures.values()}
    if stopped and codes <= {EXIT_INTERRUPTED, -STOP_SIGNAL, -signal.SIGKILL, *_BYSTANDER_CODES}:
        if EXIT_INTERRUPTED not in codes:
            print("laconic: stopped; nothing was saved", file=sys.stderr)
        return stopped[0]

    culprits = [rank for rank, failure in failures.items() if failure.exitcode not in _BYSTANDER_CODES]
    rank = culprits[0] if culprits else next(iter(failures))
    failure = failures[rank]
    text = _recorded(failure)
    error = _laconic_error(text)
    if error is not None:
        raise error
    who = f"rank {rank} (pid {failure.pid} on {socket.gethostname()})"
    if failure.exitcode in _BYSTANDER_CODES:
        what = f"{who} lost contact with another process: {text[:200]}"
    elif failure.exitcode == -signal.SIGKILL and any("timed out" in _recorded(f).lower() for f in failures.values()):
        # The others gave up on it; the agent then killed it, because it did not react to SIGTERM either.
        what = f"{who} did not answer within rank_timeout_seconds and was killed"
    elif failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        what = f"{who} was killed by {name}{hint}"
    else:
        what = f"{who} failed with exit code {failure.exitcode}" + (f" ({text})" if text else "")
    print(f"laconic: {what}; the other processes were stopped", file=sys.stderr)
    checkpoint = latest_name(run_dir) or next(iter(checkpoint_names(run_dir)), None)
    if checkpoint is None:
        print(
            f"laconic: no checkpoint had been saved (see checkpoint.every); remove {run_dir} and start again",
            file=sys.stderr,
        )
    else:
        print(f"laconic: continue after {checkpoint} with: laconic train --resume --run-dir {run_dir}", file=sys.stderr)
    return 1


def _recorded(failure: ProcessFailure) -> str:
    """What a worker wrote into its error file, "<class>: <message>", or an empty string."""
    message: Any = failure.error_file_data.get("message")
    return str(message["message"]) if isinstance(message, dict) else ""


def _laconic_error(text: str) -> LaconicError | None:
    """The error that a worker recorded as "<class>: <message>", if it is one of ours."""
    name, _, message = text.partition(": ")
    classes = [LaconicError]
    for cls in classes:
        if cls.__name__ == name:
            return cls(message)
        classes += cls.__subclasses__()
    return None


@contextmanager
def _pass_on_signals() -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the workers as a request to stop, the second SIGINT as SIGKILL.

    Yields a list that holds, once there was a request, the exit code it stands for. A signal that comes before the
    workers run interrupts the launch.
    """
    stopped: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
        yield stopped
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        workers = [child for child in psutil.Process().children() if _is_worker(child)]
        if not workers:
            raise KeyboardInterrupt
        at_once = bool(stopped) and number == signal.SIGINT
        if not stopped:
            stopped.append(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)
            print(
                "laconic: stopping after this step, then saving; Ctrl-C again leaves at once without saving",
                file=sys.stderr,
            )
        for worker in workers:
            try:
                worker.send_signal(signal.SIGKILL if at_once else STOP_SIGNAL)
            except psutil.NoSuchProcess:
                continue

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return _WORKER in process.cmdline()
    except psutil.Error:
        return False


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence the elastic agent's own log, which repeats what we say; LOGLEVEL in the environment keeps it."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names if "LOGLEVEL" not in os.environ}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _exposure(environment: Mapping[str, str]) -> str:
    """A line for the user about the interfaces on which an externally configured process group listens."""
    interface = environment.get("GLOO_SOCKET_IFNAME") or environment.get("NCCL_SOCKET_IFNAME")
    where = f"on {interface}" if interface else "on the address of its host name"
    return (
        f"the store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']} and torchrun's rendezvous listen on "
        f"all interfaces, every process {where}, without authentication; whoever can connect can change this run or "
        "run code as this user, so keep these ports inside a network you trust"
    )
