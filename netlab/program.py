"""Programs on the hosts of a lab: their output, their signals and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["Ending", "OnLine", "Program", "finish"]

OnLine = Callable[["Program", str], None]
"""Callback for every line that a program prints, without its line break, while it runs; called from threads."""


@dataclass(frozen=True)
class Ending:
    """How a program ended: exit code (minus the signal's number when one killed it) and all of its output."""

    code: int
    out: str
    err: str


class Program:
    """A command in a network namespace, in a session of its own so that signals reach its children too.

    Two threads read its output, so that it never waits for a reader.

    Args:
        namespace: name of the network namespace.
        command: program and arguments.
        environment: all variables of the process.
        name: of the program in messages.
        cwd: working directory; None: this process's.
        on_line: called with every line that the program prints.
    """

    def __init__(
        self,
        namespace: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        cwd: Path | None = None,
        on_line: OnLine | None = None,
    ) -> None:
        self.namespace = namespace
        self.name = name
        self._popen = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._on_line = on_line
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._printed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, self._lines[kind]), daemon=True)
            for kind, stream in (("out", self._popen.stdout), ("err", self._popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id of the command, which `ip` has replaced itself with."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while the program runs."""
        return self._popen.poll()

    @property
    def out(self) -> str:
        """Standard output so far."""
        return "".join(self._lines["out"])

    @property
    def err(self) -> str:
        """Standard error so far."""
        return "".join(self._lines["err"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children; do nothing when it has ended."""
        if self.code is None:  # afterwards its process id may belong to another process
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait_for(self, text: str, timeout_seconds: float = 60) -> None:
        """Wait until the program has printed `text`.

        Raises:
            TimeoutError: it has not after `timeout_seconds`; with its output.
            RuntimeError: it ended before; with its output.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._printed:
            while text not in self.out:
                ended = self.code is not None and not any(reader.is_alive() for reader in self._readers)
                if ended or time.monotonic() > deadline:
                    error = RuntimeError if ended else TimeoutError
                    what = f"ended with {self.code}" if ended else f"ran for {timeout_seconds} s"
                    raise error(f"{self.name} {what} and did not print {text!r}:\n{self.out}\n{self.err}")
                self._printed.wait(timeout=0.1)

    def wait(self, timeout_seconds: float) -> Ending:
        """Wait for the program's end.

        Raises:
            TimeoutError: it is still running after `timeout_seconds`; with its output.
        """
        try:
            code = self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self.name} is still running after {timeout_seconds:.1f} s:\n{self.out}\n{self.err}"
            ) from None
        for reader in self._readers:
            reader.join(timeout=10)  # a child that outlives it may hold the pipe
        return Ending(code, self.out, self.err)

    def kill(self) -> None:
        """Kill the process and its children, and wait for its end."""
        self.signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=10)
        for reader in self._readers:
            reader.join(timeout=10)

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        """Collect the lines of a stream until it is closed; runs in a thread."""
        with stream:
            for line in stream:
                with self._printed:
                    lines.append(line)
                    self._printed.notify_all()
                if self._on_line is not None:
                    self._on_line(self, line.rstrip("\n"))


def finish(programs: Sequence[Program], timeout_seconds: float) -> list[Ending]:
    """Wait until all programs have ended, for at most `timeout_seconds` in all.

    Raises:
        TimeoutError: a program is still running; the message names it.
    """
    deadline = time.monotonic() + timeout_seconds
    return [program.wait(max(0.0, deadline - time.monotonic())) for program in programs]
