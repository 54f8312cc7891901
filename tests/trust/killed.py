"""A process that is killed by SIGKILL at a chosen one of its own writes: opening, renaming or removing a file."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.distributed.processes import start_ranks

__all__ = ["killed_at_write"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def killed_at_write(folder: Path, number: int, work: Callable[..., object], *args: Any) -> bool:
    """Run work(*args) in a process of its own that is killed right before write `number`, from 0, below `folder`.

    Returns whether it was killed; if it makes fewer writes it ends by itself, and has to end well.
    """
    process = start_ranks(_work, (str(folder), number, work, args), 1)[0]
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def _work(_: int, folder: str, number: int, work: Callable[..., object], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seen = 0

    def count(event: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        match event:
            case "open":
                writes = isinstance(given[2], int) and bool(given[2] & _WRITING)
            case "os.rename" | "os.remove" | "os.rmdir" | "os.mkdir" | "os.truncate":
                writes = True
            case _:
                return
        if writes and isinstance(given[0], str | os.PathLike) and os.path.abspath(given[0]).startswith(folder):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)
    work(*args)
