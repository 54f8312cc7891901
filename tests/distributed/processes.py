"""Starting processes under test and waiting for them."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from laconic.cli.main import main
from laconic.ops import lossless_encode, self_check
from laconic.ops.declarations import OPS
from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import save_config
from laconic.train.distributed.world import STORE_VARIABLE, join_world, read_environment
from laconic.train.launch.worker import leave
from tests.patience import patient

ROOT = Path(__file__).parents[2]

_spawn = util.spawnv_passfds

# What nearly every rank imports; none of it starts a thread, which a fork would lose.
_PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.testing",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "laconic.infer.attention_worker",
    "laconic.infer.expert_share",
    "laconic.train.run",
]


def run_ranks(work: Callable[..., object], args: tuple[object, ...], num_ranks: int) -> None:
    """Run work(rank, *args) in `num_ranks` processes; fails if one of them does.

    Like torch.multiprocessing.spawn, but the processes are forked from one that has imported torch and laconic once
    for the whole session and done nothing else. Environment variables are the caller's.
    """
    forkserver_context()
    told = (dict(os.environ), work, args)
    mp.start_processes(_in_environment, args=told, nprocs=num_ranks, join=True, start_method="forkserver")


def start_ranks(work: Callable[..., object], args: tuple[object, ...], num_ranks: int) -> list[BaseProcess]:
    """Start the same processes without waiting for them."""
    context, variables = forkserver_context(), dict(os.environ)
    processes = [
        context.Process(target=_in_environment, args=(rank, variables, work, args)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _in_environment(
    rank: int, variables: dict[str, str], work: Callable[..., object], args: tuple[object, ...]
) -> None:
    """Run work(rank, *args); the process it is forked from has the variables of the first test that needed one."""
    os.environ.clear()
    os.environ |= variables
    work(rank, *args)


def forkserver_context() -> ForkServerContext:
    """Starts processes that are forked from one that has imported torch and laconic."""
    context: ForkServerContext = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def copy_as_fork_server() -> None:
    """Let a copy of this process, which has imported the tests and run none, be the one that others are forked from.

    A fresh interpreter imports torch and transformers once more, and each rank the file of its test. The copy sleeps
    until the first process is asked for.
    """
    forkserver_context()
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _copy):
        forkserver.ensure_running()


def _copy(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of an interpreter that is started with [..., "-c", PROGRAM] and these files: listener, parent, ..."""
    pid = os.fork()
    if pid:
        return pid
    util.spawnv_passfds = _spawn  # for scripts that spawn
    code = 1
    try:
        listener, parent = descriptors[:2]
        _forget_pytest(parent)
        if listener in select.select([listener, parent], [], [])[0]:
            _use_kernels()
            exec(arguments[-1], {})
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _use_kernels() -> None:
    """The first use of a kernel compares it with its reference: once here, instead of in each process."""
    for op in OPS:
        for _, arguments in self_check.examples(op):
            getattr(torch.ops.laconic, op)(*arguments)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # what a group measures when it begins
        lossless_encode(torch.ones(1, dtype=dtype), code="window")


def _forget_pytest(parent: int) -> None:
    """Streams, handlers of logs and warnings become those of an interpreter; the pipe `parent` ends with the parent."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers = [it for it in logger.handlers if not type(it).__module__.startswith("_pytest.")]
            for handler in logger.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.stream = sys.stderr
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself
            if int(name) != parent and os.fstat(int(name)).st_ino == os.fstat(parent).st_ino:
                os.close(int(name))


def join_ranks(
    rank: int, world: int, folder: str, backend: str = "gloo", timeout_seconds: float = 60, **options: Any
) -> None:
    """The default group of `world` ranks that meet in `folder`; a timeout under a minute is what a test is about."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_seconds if timeout_seconds < 60 else patient(timeout_seconds))
    store = dist.FileStore(f"{folder}/store-{backend}", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, **options)


def run_joined(work: Callable[..., object], args: tuple[object, ...], num_ranks: int) -> None:
    """Run work(world, *args) in `num_ranks` processes that have met as those of a training do; fails if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_join_and_work, (num_ranks, os.path.join(folder, "store"), work, args), num_ranks)


def _join_and_work(
    rank: int, num_ranks: int, store: str, work: Callable[..., object], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ |= _rank_variables(rank, num_ranks) | {STORE_VARIABLE: store, "OMP_NUM_THREADS": "1"}
    world = join_world(read_environment(os.environ), timeout_seconds=patient(60.0))
    work(world, *args)
    world.leave()
    leave(0)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process under test: one thread, warnings are errors, nothing of an outer torchrun."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    paths = [str(ROOT / "src"), str(ROOT), inherited.get("PYTHONPATH", "")]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return inherited | fixed | changes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, world_size: int, port: int, **changes: str) -> dict[str, str]:
    """What torchrun sets for one process of a machine."""
    names = _rank_variables(rank, world_size) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment(**names, **changes)


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


@dataclass(frozen=True)
class Ending:
    """Exit code and output of a process."""

    code: int
    out: str
    err: str


def start(arguments: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start this Python with `arguments` in the repository's root."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_seconds: float = 280) -> Ending:
    """Wait for a process, `timeout_seconds` on a quiet machine; its exit code and what it printed."""
    try:
        out, err = process.communicate(timeout=patient(timeout_seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_seconds} s:\n{out}\n{err}") from None
    return Ending(process.returncode, out, err)


class ForkedCommand:
    """`laconic ARGUMENTS` in a process forked like those of `run_ranks`: it does not import torch again, and neither do
    the processes that `laconic train` starts.

    For commands of which only what they do counts; whether a fresh interpreter finds the command is for `start`.
    """

    def __init__(self, arguments: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> None:
        """Start it with the environment `variables`; it prints to the files out and err of `folder`, a new one."""
        folder.mkdir()
        self._folder = folder
        variables = environment() if variables is None else variables
        self._process = forkserver_context().Process(target=_command, args=(arguments, folder, dict(variables)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def finish(self, timeout_seconds: float = 280) -> Ending:
        """Wait for the end; the exit code (negative: the signal that killed it) and what was printed."""
        self._process.join(patient(timeout_seconds))
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise AssertionError(f"still running after {timeout_seconds} s:\n{out}\n{err}")
        return Ending(self._process.exitcode, out, err)


def _command(arguments: list[str], folder: Path, variables: dict[str, str]) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.chdir(ROOT)
    os.environ.clear()
    os.environ |= variables
    tempfile.tempdir = None  # TMPDIR may be another one now
    from tests.distributed.forked_workers import forked_workers

    with forked_workers():
        sys.exit(main(arguments))


def start_training(config: TrainConfig, file: Path) -> subprocess.Popen[str]:
    """`laconic train --config FILE` with `config` written to `file`."""
    save_config(config, file)
    return start(["-m", "laconic", "train", "--config", str(file)], environment())


def is_running(pid: int) -> bool:
    """Whether a process has not ended, be it waited for or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60) -> None:
    """Return once `condition` holds; fails when it does not in `timeout_seconds` on a quiet machine."""
    deadline = time.monotonic() + patient(timeout_seconds)
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def num_steps(run_dir: str | Path | None) -> int:
    """Training steps written down so far."""
    file = Path(str(run_dir)) / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def workers_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes that a launcher started, by rank."""
    children = psutil.Process(launcher.pid).children()
    return {
        int(child.environ()["RANK"]): child for child in children if "laconic.train.launch.worker" in child.cmdline()
    }
