"""Parts of a benchmark in processes of their own: a part that fails, crashes or hangs costs its own table only."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Part", "run_parts"]


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
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as expired:
            yield Part(
                name, _text(expired.stdout), f"killed after {seconds:.0f} s\n{_tail(_text(expired.stderr))}".rstrip()
            )
            continue
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        yield Part(name, done.stdout, f"{how}\n{_tail(done.stderr)}".rstrip() if done.returncode else "")


def _text(output: str | bytes | None) -> str:
    """What was captured so far; bytes of a process that was killed, whatever it was opened with."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])
