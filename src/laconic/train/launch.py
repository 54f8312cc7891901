"""Starts a run: in this process, as one of torchrun's, or as several through torch's elastic launcher.

The processes of a local run meet over the loopback interface at a port the system picks. When one of them dies, the
elastic agent stops the others and this process names the culprit. Ctrl-C and SIGTERM reach this process only (the
workers have sessions of their own); it passes them on as a request to finish the step, save and leave.
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
from laconic.train.config import TrainConfig
from laconic.train.load_config import save_config
from laconic.train.run_dir import latest_name, new_run_dir
from laconic.train.stop import (
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_TERMINATED,
    STOP_SIGNAL,
    StopRequest,
)
from laconic.train.worker import leave, work
from laconic.train.world import join_world, read_environment

__all__ = ["launch"]

_LOOPBACK = "127.0.0.1"
_WORKER = "laconic.train.worker"
# Exit codes of processes that were stopped because of another one: by themselves, or by the agent before they listened.
_BYSTANDER_CODES = (EXIT_PEER_LOST, -signal.SIGTERM)


def launch(config: TrainConfig) -> int:
    """Train as `config` says and return the exit code.

    0: done. 130 or 143: stopped early by SIGINT or SIGTERM, and saved. 1: a process died or failed; the message, on
    stderr, names its rank. Under torchrun this process is one of the run's, and it ends here with that code; otherwise
    `config.nproc` processes are started, one of them right here if it is only one.

    Raises ConfigError when the environment or the master port cannot be used, and whatever LaconicError `run` raises.
    """
    place = read_environment(os.environ)
    if place is not None and place.world_size > 1:
        ending = work(config, place, StopRequest())
        if ending.message is not None:
            print(ending.message, file=sys.stderr)
        leave(ending.code)
    if torch.cuda.is_available() and config.nproc > torch.cuda.device_count() > 0:
        print(f"laconic: one process per GPU: {torch.cuda.device_count()} instead of {config.nproc}", file=sys.stderr)
        config = replace(config, nproc=torch.cuda.device_count())
    if place is not None or config.nproc == 1:
        from laconic.train.run import run  # slow to load, and a launcher does without

        return run(config, join_world(place, config.rank_timeout_seconds), StopRequest())
    return _launch_workers(replace(config, run_dir=config.run_dir or new_run_dir()))


def _launch_workers(config: TrainConfig) -> int:
    assert config.run_dir is not None
    with (
        tempfile.TemporaryDirectory(prefix="laconic-") as scratch,
        _quiet_elastic(),
        _environment({"GLOO_SOCKET_IFNAME": _loopback_interface()}),
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
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_LOOPBACK}:{_rendezvous_port()}",
            local_addr=_LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch) / "logs")),
            signals_to_handle="SIGHUP,SIGQUIT",  # those that we do not take ourselves
        )
        try:
            elastic_launch(launch_config, sys.executable)("-m", _WORKER, str(config_file))
        except ChildFailedError as error:
            return _explain(error.failures, stopped, Path(config.run_dir))
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _explain(failures: Mapping[int, ProcessFailure], stopped: list[int], run_dir: Path) -> int:
    """Tell why the workers ended; the exit code, or the LaconicError of a worker raised here.

    `failures`: by rank, in the order in which the agent saw them. `stopped`: exit codes asked for by signals to us.
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
    checkpoint = latest_name(run_dir)
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

    Gives a list that holds, once there was a request, the exit code it stands for. A signal that comes before the
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


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that the workers inherit unless the user has set them."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            return name
    raise ConfigError(f"this machine has no network interface with address {_LOOPBACK}, where local processes meet")


def _rendezvous_port() -> int:
    """The port MASTER_PORT asks for, if it is free, or 0: any."""
    text = os.environ.get("MASTER_PORT")
    if text is None:
        return 0
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"MASTER_PORT is {text!r} in the environment, but it must be a port number; or unset it")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, int(text)))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT is {text}, but that port cannot be used on {_LOOPBACK} ({error.strerror}); "
                "unset it to have a free one chosen, or give another"
            ) from None
    return int(text)
