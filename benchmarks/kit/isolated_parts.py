"""Parts of a benchmark in processes of their own: a part that fails, crashes or hangs costs its own table only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_GRACE_SECONDS = 2.0
"""For the end of the output of a process that has ended."""


_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl."""


@dataclass(frozen=True)
class Part:
    """What one process left."""

    name: str
    text: str
    """What it printed, Markdown."""
    failure: str
    """Why it has no result, or not all of it; empty if it ended well."""

    def render(self) -> str:
        """Its text, and its failure if there is one."""
        if not self.failure:
            return self.text
        return f"{self.text}## {self.name}: failed\n\n```\n{self.failure}\n```\n"


def run_parts(commands: Mapping[str, Sequence[str]], most_seconds: float, all_seconds: float) -> Iterator[Part]:
    """Run commands one after the other; yield each part when it has ended.

    Args:
        commands: the command line of each part, by its name.
        most_seconds: a part is killed after that.
        all_seconds: for all of them; parts that would begin later are not started.
    """
    end = time.monotonic() + all_seconds
    for name, command in commands.items():
        seconds = min(most_seconds, end - time.monotonic())
        if seconds <= 0:
            yield Part(name, "", f"not started: the {all_seconds:.0f} s for all parts were over")
        else:
            yield run_part(name, command, seconds)


def run_part(
    name: str,
    command: Sequence[str],
    seconds: float,
    on_line: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Part:
    """Run one command; at the end, or when it is killed, every process that it started is killed with it.

    Args:
        name: of the part.
        command: its command line.
        seconds: it is killed after that.
        on_line: called with each line of its output as it comes; the last may have no end.
        environment: of the process; None is this one's.
    """
    deadline = time.monotonic() + seconds
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if on_line is not None:
            on_line(line)

    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, process_group=0)
        except OSError as error:
            return Part(name, "", f"not started: {error}")
        assert process.stdout is not None
        incoming = _read_lines(process.stdout)
        try:
            was_killed = _follow(process, incoming, deadline, take)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with contextlib.suppress(queue.Empty):  # held open by a process in a session of its own
            while (line := incoming.get(timeout=_GRACE_SECONDS)) is not None:
                take(line)
        errors.seek(0)
        tail = _tail(errors.read().decode(errors="replace"))
    text = "".join(lines)
    if was_killed:
        return Part(name, text, f"killed after {seconds:.0f} s\n{tail}".rstrip())
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return Part(name, text, f"{how}\n{tail}".rstrip() if process.returncode else "")


def end_with_parent() -> None:
    """Called by a part's process: it is killed as well when whoever started it is killed. Linux alone can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(
    process: subprocess.Popen[bytes],
    incoming: queue.SimpleQueue[str | None],
    deadline: float,
    take: Callable[[str], None],
) -> bool:
    """Take lines until the process has ended; whether its time was over first. Its end leaves None in `incoming`."""
    while time.monotonic() < deadline:
        try:
            line = incoming.get(timeout=0.1)
        except queue.Empty:
            if process.poll() is not None:  # what it started may hold the pipe open
                return False
            continue
        if line is not None:
            take(line)
            continue
        incoming.put(None)
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return True
        return False
    return True


def _read_lines(stream: IO[bytes]) -> queue.SimpleQueue[str | None]:
    """Lines of a pipe from a thread of its own, None at its end."""
    incoming: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with stream:
            for line in stream:
                incoming.put(line.decode(errors="replace"))
        incoming.put(None)

    threading.Thread(target=read, daemon=True).start()
    return incoming


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])
