"""What the processes of a running or hung job do just now, for `laconic doctor --pid`: their stacks, read by py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from laconic.errors import ConfigError
from laconic.json_text import parse_json

_SECONDS = 30.0
_SHOWN_FRAMES = 16


def read_stacks(pid: int) -> list[dict[str, Any]]:
    """Read the stacks of process `pid` and of all Python processes below it; each stands still for milliseconds.

    Returns:
        For each process "pid", "rank" (RANK of its environment, or None), "command", and "threads", the main one first:
        "name", "busy" (it uses a core), and "frames", "function file:line", the innermost first.

    Raises:
        ConfigError: py-spy is missing, no such process runs Python, or it may not be looked into.
    """
    py_spy = program()
    if py_spy is None:
        raise ConfigError("--pid reads stacks with py-spy, which is not installed: pip install 'laconic[debug]'")
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        raise ConfigError(f"--pid is {pid}, but there is no such process; `ps -ef | grep laconic` lists them") from None
    found, refused = [], ""
    for process in processes:
        command = [py_spy, "dump", "--json", "--pid", str(process.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            refused = f"py-spy did not answer in {_SECONDS:.0f} s"
            continue
        if done.returncode != 0:  # a shell or a compiler, a process that has ended, or one of somebody else
            refused = refused or done.stderr.strip().partition("\n")[0].removeprefix("Error: ")
            continue
        found.append({"pid": process.pid, **_said(process), "threads": _threads(parse_json(done.stdout))})
    if not found:
        raise ConfigError(
            f"--pid is {pid}, but no stack of it could be read: {refused}; it must be a Python process of this user, "
            "and the kernel may ask for root (sudo) or, in a container, for --cap-add SYS_PTRACE"
        )
    return sorted(found, key=lambda one: (one["rank"] is not None, one["rank"] or 0))


def program() -> str | None:
    """Where py-spy is, of this environment or on the PATH."""
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.exists() else shutil.which("py-spy")


def render_stacks(processes: Sequence[dict[str, Any]]) -> str:
    """The stacks as text: first where ranks are, the fewest first, then each process's main thread and busy ones."""
    lines = list(_where_ranks_are(processes))
    for one in processes:
        rank = "" if one["rank"] is None else f"rank {one['rank']}, "
        lines += [*([""] if lines else []), f"{rank}pid {one['pid']}: {one['command']}"]
        shown = [thread for thread in one["threads"] if thread is one["threads"][0] or thread["busy"]]
        for thread in shown:
            lines.append(f"  {thread['name']}, {'busy' if thread['busy'] else 'waiting'}")
            lines += [f"    {frame}" for frame in thread["frames"][:_SHOWN_FRAMES]]
            if (further := len(thread["frames"]) - _SHOWN_FRAMES) > 0:
                lines.append(f"    and {further} outer frames; --json has all")
        if others := len(one["threads"]) - len(shown):
            lines.append(f"  and {others} waiting thread{'s' * (others > 1)}")
    return "\n".join(lines)


def _where_ranks_are(processes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Ranks by the innermost frame of their main thread: the one that is elsewhere is what the others wait for."""
    places = [(one["rank"], (one["threads"][0]["frames"] or ["no Python"])[0]) for one in processes]
    places = [(rank, place) for rank, place in places if rank is not None]
    for place, count in reversed(Counter(place for _, place in places).most_common()):
        ranks = ", ".join(str(rank) for rank, where in places if where == place)
        yield f"{'ranks' if count > 1 else 'rank'} {ranks}: {place}"


def _said(process: psutil.Process) -> dict[str, Any]:
    """Rank and command line of a process, as far as it tells."""
    try:
        rank = process.environ().get("RANK", "")
        return {"rank": int(rank) if rank.isdecimal() else None, "command": " ".join(process.cmdline())[:200]}
    except psutil.Error:
        return {"rank": None, "command": "?"}


def _threads(dumped: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    threads = [
        {
            "name": thread["thread_name"] or f"thread {thread['os_thread_id']}",
            "busy": thread["active"],
            "frames": [f"{frame['name']} {frame['filename']}:{frame['line']}" for frame in thread["frames"]],
        }
        for thread in dumped
    ]
    return sorted(threads, key=lambda thread: thread["name"] != "MainThread")
