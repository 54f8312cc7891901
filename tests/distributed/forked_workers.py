"""The processes that our launcher starts, forked from it instead of started afresh: it has imported torch already.

They are its children as they are in production, so what happens when one of them dies happens here, too.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

__all__ = ["FAULTS", "ForkedWorker", "forked_workers"]

_POLL_SECONDS = 0.01
FAULTS = "LACONIC_TEST_FAULTS"
"""Environment variable with the faults that the processes meet (tests/trust/faults.py)."""


class ForkedWorker:
    """What `subprocess.Popen` is for [sys.executable, ..., "-m", MODULE, ...], as far as torch's launcher uses it."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        at = list(args).index("-m") + 1
        self.args = args
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, stream in ((1, stdout), (2, stderr)):
                    if stream is not None:
                        os.dup2(stream.fileno(), number)
                if start_new_session:
                    os.setsid()
                for handled in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(handled, signal.SIG_DFL)
                os.closerange(3, 1024)
                os.environ.clear()
                os.environ |= env
                if FAULTS in env:
                    from tests.trust.faults import install

                    install(env[FAULTS])
                sys.modules.pop(args[at], None)
                sys.argv = list(args[at:])
                runpy.run_module(args[at], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let torch's elastic launcher fork what it starts from this process, which has no threads that matter."""
    with pytest.MonkeyPatch.context() as patch:
        popen: Any = ForkedWorker
        patch.setattr(subprocess_handler, "Popen", popen)
        yield
