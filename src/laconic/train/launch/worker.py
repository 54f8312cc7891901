"""One process of a run of several: `python -m laconic.train.launch.worker FOLDER`, as our launcher starts it.

The folder is that of the attempt: it has config.toml and launch.json, and the process says in it which step it does.

It always ends with an exit code and, for an error, with the error file that torch's elastic agent reads; the launcher
reports to the user. torch and everything that imports it is imported late: signals must be masked before the first
thread starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from laconic.errors import first_line
from laconic.output_lines import say
from laconic.train.signals import EXIT_PEER_LOST, StopRequest, listen_to_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    from laconic.train.config.schema import TrainConfig
    from laconic.train.distributed.world import RankInfo
    from laconic.train.launch_record import Launch

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


@dataclass(frozen=True)
class WorkerResult:
    """How this process's part of a run ended."""

    code: int
    """Exit code."""
    message: str | None = None
    """Message for the user, or None."""


def work(
    config: TrainConfig,
    info: RankInfo,
    stop: StopRequest,
    launch: Launch | None = None,
    begin_step: Callable[[int], None] | None = None,
) -> WorkerResult:
    """Run this process's part of a run. Records every error for torch's elastic agent and raises none.

    `launch` and `begin_step` are those of `run`.
    """
    import traceback

    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from laconic.errors import CollectiveError, LaconicError
    from laconic.train.distributed.world import is_peer_lost, join_world
    from laconic.train.run import run

    who = f"rank {info.rank} on {socket.gethostname()}"
    handler = get_error_handler()
    handler.initialize()
    try:
        world = join_world(info, config.rank_timeout_seconds)
        code = run(config, world, stop, launch, begin_step)
        world.leave()
        return WorkerResult(code)
    except LaconicError as error:
        _record(handler, error)
        if isinstance(error, CollectiveError) and error.__cause__ is not None and is_peer_lost(error.__cause__):
            return _lost(who, error)
        return WorkerResult(EXIT_BAD_INPUT, f"laconic: error: {who}: {error}")
    except Exception as error:
        _record(handler, error)
        if is_peer_lost(error):
            return _lost(who, error)
        return WorkerResult(EXIT_FAILED, f"laconic: {who} failed:\n{traceback.format_exc()}")


def _record(handler: ErrorHandler, error: Exception) -> None:
    """Write the error file; where something has removed the launcher's temporary files, say the error here."""
    try:
        handler.record_exception(error)
    except OSError:
        say(f"laconic: {type(error).__name__}: {error}")


def leave(code: int) -> NoReturn:
    """End this process now, without destructors.

    Those of a process group abort or hang when a member is lost, and sometimes when none is.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _lost(who: str, error: Exception) -> WorkerResult:
    text = f"laconic: {who} lost contact with another process: {first_line(error)[:600]}"
    return WorkerResult(EXIT_PEER_LOST, text)


def main() -> None:
    """Entry point of the module; the one argument is the folder of the attempt."""
    stop = StopRequest()
    listen_to_launcher(stop)
    from laconic.train.launch.workers import step_file

    folder = Path(sys.argv[1])
    try:
        steps = step_file(folder, int(os.environ["RANK"]))
        steps.write(None)
        from laconic.train.config.toml import load_config
        from laconic.train.distributed.world import read_environment
        from laconic.train.launch_record import Launch

        info = read_environment(os.environ)
        assert info is not None, "started by hand: use laconic train"
        config, launch = load_config(folder / "config.toml"), Launch.load(folder)
    except Exception:
        if folder.exists():
            raise
        leave(EXIT_PEER_LOST)  # the launcher was interrupted, and has removed its files
    result = work(config, info, stop, launch, steps.write)
    if result.code == EXIT_FAILED and result.message is not None:
        # The launcher prints rank and error; the traceback is printed here.
        say(result.message)
    leave(result.code)


if __name__ == "__main__":
    main()
