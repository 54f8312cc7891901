"""Starts a run: in this process, as one of torchrun's, or as several through torch's elastic launcher.

The processes of a local run meet in a private file and talk over the loopback interface (see rendezvous.py). When one
of them dies, the elastic agent stops the others and this process names the one that failed; with `restarts` it starts
all of them again, and they go on from the newest good checkpoint. The agent's own restarts are not used: it knows no
reasons, and would try again what cannot succeed. Ctrl-C and SIGTERM reach this process only (the workers have sessions
of their own); it passes them on as a request to finish the step, save and leave.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from laconic import installation
from laconic.errors import CheckpointError, ConfigError
from laconic.interrupts import ending_signals, handled_by
from laconic.output_lines import say
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import save_config
from laconic.train.distributed.parallel_state import check_division
from laconic.train.distributed.world import join_world, num_cores, read_environment
from laconic.train.launch.failure import Failure, failure_of, was_asked_for, why_no_restart
from laconic.train.launch.rendezvous import BACKEND, LOOPBACK, local_rendezvous
from laconic.train.launch.worker import leave, work
from laconic.train.launch.workers import WORKER, Workers
from laconic.train.launch_record import Launch, Restart, launch_of_torchrun, now
from laconic.train.report.run_dir import checkpoint_names, latest_name, new_run_dir
from laconic.train.run_lock import keep_for_launch
from laconic.train.signals import EXIT_INTERRUPTED, STOP_SIGNAL, StopRequest

# What a process takes with torch and transformers loaded: measured, 0.3 to 0.4 GiB, some of it shared.
_PROCESS_NBYTES = 1 << 28


def launch(config: TrainConfig) -> int:
    """Train as `config` says and return the exit code.

    0: done. 129, 130 or 143: stopped early by SIGHUP, SIGINT or SIGTERM, and saved. 1: a process died or failed, more
    often than `config.restarts` allows; the message, on stderr, names its rank. Under torchrun this process is one of
    the run's, and it ends here with that code; otherwise `config.nproc` processes are started, one of them right here
    if it is only one that is not to be restarted.

    Raises:
        ConfigError: the environment cannot be used.
        LaconicError: `run` raised it.
    """
    info = read_environment(os.environ)
    if info is not None and info.rank == 0:
        idle = {"nproc": (TrainConfig().nproc, info.local_world_size), "restarts": (0,)}
        remedies = {"nproc": "--nproc-per-node", "restarts": "--max-restarts"}
        for name, usual in idle.items():
            if (value := getattr(config, name)) not in usual:
                say(
                    f"laconic: {name} = {value} has no effect: RANK is set, so the processes are started already; "
                    f"torchrun has {remedies[name]}"
                )
    if info is not None and info.world_size > 1:
        if info.rank == 0:
            say(f"laconic: {_exposure(os.environ)}")
        ending = work(config, info, StopRequest(), launch_of_torchrun(os.environ))
        if ending.message is not None:
            say(ending.message)
        leave(ending.code)
    if torch.cuda.is_available() and config.nproc > torch.cuda.device_count() > 0:
        say(f"laconic: one process per GPU: {torch.cuda.device_count()} instead of {config.nproc}")
        config = replace(config, nproc=torch.cuda.device_count())
    if info is not None or (config.nproc == 1 and config.restarts == 0):
        from laconic.train.run import run  # slow to load, and a launcher does without

        world = join_world(info, config.rank_timeout_seconds)
        return run(config, world, StopRequest(), None if info is None else launch_of_torchrun(os.environ))
    _check_machine(config)
    return _launch_workers(replace(config, run_dir=config.run_dir or new_run_dir()))


def _check_machine(config: TrainConfig) -> None:
    """Check before a process is started that the batch divides and this machine can hold so many processes."""
    check_division(config, config.nproc)
    memory, cores = psutil.virtual_memory(), num_cores()
    if config.nproc * _PROCESS_NBYTES > memory.total:
        raise ConfigError(
            f"nproc is {config.nproc}, but this machine has {memory.total / 2**30:.0f} GiB of memory, and a process "
            f"takes {_PROCESS_NBYTES / 2**30:.2f} GiB before it holds any model; start at most "
            f"{memory.total // _PROCESS_NBYTES}"
        )
    if config.nproc > cores:
        say(f"laconic: {config.nproc} processes share {cores} cores, and will wait for each other")


def _launch_workers(config: TrainConfig) -> int:
    """Start the processes until the run is done, or has failed more often than `config.restarts` allows."""
    assert config.run_dir is not None
    run_dir = Path(config.run_dir)
    launch = Launch(uuid.uuid4().hex)
    failures: list[Failure] = []
    with _quiet_elastic(), _pass_on_signals() as requests, keep_for_launch(run_dir, launch.id):
        while True:
            with _scratch_folder() as folder:  # a new one, as what cleans up temporary files may have removed the last
                launch.save(folder)
                ending = _attempt(config, folder, requests)
            if isinstance(ending, int):
                return ending
            reason = why_no_restart(ending, failures, config.restarts)
            if requests.codes and reason is None:
                reason = "a stop was asked for"
            if reason is not None:
                return _give_up(ending, reason, config, run_dir)
            failures.append(ending)
            say(f"laconic: {ending.what}; restart {len(failures)} of {config.restarts} {_going_on(run_dir)}")
            restart = Restart(launch.id, now(), ending.what, ending.rank, ending.step)
            launch = replace(launch, restarts=(*launch.restarts, restart))


def _attempt(config: TrainConfig, folder: Path, requests: _StopRequests) -> int | Failure:
    save_config(config, folder / "config.toml")
    workers = Workers(folder, config.nproc)
    requests.workers = workers
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.nproc,
        run_id=uuid.uuid4().hex,
        role="laconic",
        rdzv_backend=BACKEND,
        local_addr=LOOPBACK,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        signals_to_handle="SIGQUIT",  # this process handles the others, and nohup's ignored SIGHUP stays ignored
    )
    try:
        # A quarter of the time after which the others give up on it, and lose what they know about it.
        with local_rendezvous(folder), workers.kill_stopped(config.rank_timeout_seconds / 4):
            elastic_launch(launch_config, sys.executable)(*installation.safe_path(), "-m", WORKER, str(folder))
    except ChildFailedError as error:
        if requests.codes and was_asked_for(error.failures):
            if EXIT_INTERRUPTED not in {failure.exitcode for failure in error.failures.values()}:
                say("laconic: stopped; nothing was saved")
            return requests.codes[0]
        return failure_of(error.failures, workers.steps(), workers.stopped, config.rank_timeout_seconds)
    except SignalException as error:
        return 128 + error.sigval
    finally:
        requests.workers = None
    return 0


def _give_up(failure: Failure, reason: str, config: TrainConfig, run_dir: Path) -> int:
    """Say why the run ended and how it can be continued; returns the exit code, or raises the worker's LaconicError."""
    tried = f"; no {'further ' if reason.startswith('that is') else ''}restart: {reason}" if config.restarts else ""
    if failure.error is not None:
        if tried:
            say(f"laconic: {failure.what.partition(' failed (')[0]} failed{tried}")
        raise failure.error
    say(f"laconic: {failure.what}; the other processes were stopped{tried}")
    checkpoint = _newest(run_dir)
    command = f"{installation.command()} train --resume --run-dir {shlex.quote(str(run_dir))}"
    if checkpoint is None:
        again = f" with: {command}" if (run_dir / "config.toml").is_file() else ""
        say(f"laconic: no checkpoint had been saved (see checkpoint.every); begin anew{again}")
    else:
        say(f"laconic: continue after {checkpoint} with: {command}")
    return 1


def _going_on(run_dir: Path) -> str:
    checkpoint = _newest(run_dir)
    return "begins anew: there is no checkpoint yet" if checkpoint is None else f"goes on after {checkpoint}"


def _newest(run_dir: Path) -> str | None:
    """The checkpoint to go on from, as far as names tell; its contents are verified when it is loaded."""
    try:
        return latest_name(run_dir) or next(iter(checkpoint_names(run_dir)), None)
    except CheckpointError:
        return None


class _StopRequests:
    def __init__(self) -> None:
        self.codes: list[int] = []
        """The exit code that the first request stands for; empty without one."""
        self.workers: Workers | None = None


@contextmanager
def _pass_on_signals() -> Iterator[_StopRequests]:
    """Pass SIGINT, SIGTERM and SIGHUP on to the workers as a request to stop, the second SIGINT as SIGKILL.

    A signal that comes before the workers run interrupts the launch.
    """
    requests = _StopRequests()

    def pass_on(number: int, frame: FrameType | None) -> None:
        at_once = bool(requests.codes) and number == signal.SIGINT
        reached = requests.workers is not None and requests.workers.send_signal(
            signal.SIGKILL if at_once else STOP_SIGNAL
        )
        if not reached:
            raise KeyboardInterrupt
        if not requests.codes:
            requests.codes.append(128 + number)
            say("laconic: stopping after this step, then saving; Ctrl-C again leaves at once without saving")

    with handled_by(pass_on, ending_signals()):
        yield requests


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
    interface = environment.get("GLOO_SOCKET_IFNAME") or environment.get("NCCL_SOCKET_IFNAME")
    where = f"on {interface}" if interface else "on the address of its host name"
    return (
        f"the store at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']} and torchrun's rendezvous listen on "
        f"all interfaces, every process {where}, without authentication; whoever can connect can change this run or "
        "run code as this user, so keep these ports inside a network you trust"
    )


# Processes of a launcher that was killed leave at once, but may still be writing: hence a second and a third try.
_REMOVER = """
import shutil, sys, time
sys.stdin.buffer.read()
for pause in (0, 1, 3):
    time.sleep(pause)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
_LEAVE_SECONDS = 10.0


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can enter; removed at the end of the block or of this process, however it ends.

    A small process of its own waits at a pipe whose other end only this one holds. When that end closes, whatever
    closed it, the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="laconic-"))
    # Isolated and without site-packages it starts in some 20 ms; a session of its own keeps Ctrl-C away from it.
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remover.kill()  # the folder is gone
        assert remover.stdin is not None
        with contextlib.suppress(OSError):
            remover.stdin.close()
        remover.wait(_LEAVE_SECONDS)
