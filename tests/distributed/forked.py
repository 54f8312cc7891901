"""Python programs in processes forked from one that has imported torch, transformers and laconic already.

A fresh interpreter spends seconds of a processor on these imports, many times what most programs under test do.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, process, reduction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import pytest

from tests.distributed.processes import forkserver_context

__all__ = ["ForkedPython", "forked_programs"]

_CLONE_NEWNS, _CLONE_NEWNET, _MS_SLAVE_AND_BELOW, _MNT_DETACH = 0x20000, 0x40000000, 0x84000, 2


class ForkedPython:
    """What `subprocess.Popen` is for [sys.executable, "-m", MODULE, ...], also behind `ip netns exec NAMESPACE`.

    Process id, signals, exit code, pipes and environment are those of a process of its own. What differs: modules that
    were imported before read their environment then, and the interpreter is neither started nor finalized.

    Args:
        command: as above.
        env, cwd, stdin, stdout, stderr, start_new_session: as of Popen; a standard input that is no pipe is empty.
        text: True; streams are text.
        errors: of decoding.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
        text: bool = True,
        errors: str | None = None,
    ) -> None:
        program = _Program.of(command)
        assert text, "streams are text"
        assert program is not None, command
        self.args = list(command)
        self._lock = threading.Lock()
        pairs = [_stream(kind, number, errors) for number, kind in enumerate((stdin, stdout, stderr))]
        self.stdin, self.stdout, self.stderr = (ours for ours, _ in pairs)
        child = _Child(
            program,
            streams=[_Descriptor(theirs) for _, theirs in pairs],
            environment=dict(os.environ if env is None else env),
            cwd=os.fspath(cwd or os.getcwd()),
            new_session=start_new_session,
        )
        self._process = forkserver_context().Process(target=child)
        self._process.start()
        process._children.discard(self._process)  # type: ignore[attr-defined]  # what cleans up takes the exit code
        self.pid: int = self._process.pid  # type: ignore[assignment]
        for _, theirs in pairs:
            os.close(theirs)

    def __enter__(self) -> ForkedPython:
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raises subprocess.TimeoutExpired."""
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.returncode
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what was printed to standard output and to standard error."""
        found = {1: "", 2: ""}

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                found[number] = stream.read()

        streams = [(number, stream) for number, stream in ((1, self.stdout), (2, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return found[1], found[2]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()


@contextmanager
def forked_programs(*modules: ModuleType) -> Iterator[None]:
    """Let what these modules start by `subprocess.Popen` be forked where it is a module of Python."""

    def start(command: Sequence[str], **options: Any) -> Any:
        return (subprocess.Popen if _Program.of(command) is None else ForkedPython)(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
        yield


def _stream(kind: int | None, number: int, errors: str | None) -> tuple[Any, int]:
    """This process's end of a pipe or None, and the descriptor that becomes `number` in the other process."""
    if kind == subprocess.PIPE:
        reading, writing = os.pipe()
        if number == 0:
            return os.fdopen(writing, "w", errors=errors), reading
        return os.fdopen(reading, errors=errors), writing
    if kind == subprocess.DEVNULL or number == 0:
        return None, os.open(os.devnull, os.O_RDWR)
    assert kind is None, f"a stream is PIPE, DEVNULL or None, not {kind}"
    return None, os.dup(number)


class _Descriptor:
    """A file descriptor that goes along to a process, where it is a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _detached, (reduction.DupFd(self._number),)


def _detached(there: Any) -> int:
    return int(there.detach())


@dataclass(frozen=True)
class _Program:
    """A module to run with arguments, perhaps in a network namespace."""

    namespace: str | None
    module: str
    arguments: Sequence[str]

    @classmethod
    def of(cls, command: Sequence[str]) -> _Program | None:
        """That of a command; None if it is another one."""
        namespace = None
        if tuple(command[:3]) == ("ip", "netns", "exec"):
            namespace, command = command[3], command[4:]
        command = [command[0], *command[2:]] if tuple(command[1:2]) == ("-P",) else command
        if tuple(command[:2]) != (sys.executable, "-m"):
            return None
        return cls(namespace, command[2], tuple(command[3:]))


@dataclass(frozen=True)
class _Child:
    """What the other process does."""

    program: _Program
    streams: Sequence[Any]
    environment: Mapping[str, str]
    cwd: str
    new_session: bool

    def __call__(self) -> None:
        for number, descriptor in enumerate(self.streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        unbuffered = bool(self.environment.get("PYTHONUNBUFFERED"))
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1 if unbuffered else -1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if self.new_session:
            os.setsid()
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ |= self.environment
        if self.environment.get("PYTHONWARNINGS") == "error":
            warnings.simplefilter("error")
        # What it forks comes from the same server; Python 3.11 would start another one.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        if self.program.namespace is not None:
            _enter(self.program.namespace)
        sys.modules.pop(self.program.module, None)
        sys.argv = [self.program.module, *self.program.arguments]
        runpy.run_module(self.program.module, run_name="__main__", alter_sys=True)


def _enter(namespace: str) -> None:
    """Go where `ip netns exec` goes: to the interfaces of `namespace`, and to a /sys that shows them."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    call("setns", descriptor, _CLONE_NEWNET)
    os.close(descriptor)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", _MS_SLAVE_AND_BELOW, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
