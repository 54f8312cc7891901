"""The command `laconic`: runs a subcommand, and turns laconic's errors into one line and an exit code.

Subcommands are imported when they are called, so that `laconic --help` needs neither torch nor transformers.
Exit codes: 0 done, 1 the command's answer is no (a self test fails, a plan does not fit), 2 bad input, 130
interrupted with Ctrl-C, 143 ended by SIGTERM; `train` returns the exit code of the training processes, `run` that of
the script.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import laconic
from laconic.errors import ConfigError, LaconicError

__all__ = ["COMMANDS", "main"]

_LOOK_AGAIN_SECONDS = 0.05

COMMANDS = {
    "train": "train a model; without arguments, a small demo",
    "run": "run your own training script with the savings switched on",
    "advise": "measure what each way to save activation memory keeps and costs on your model",
    "compare": "put runs side by side: a table and report.html",
    "plan": "predict bytes per rank, and choose what to keep under a budget",
    "profile": "measure this cluster's links and codecs",
    "infer": "plan inference of mixture-of-experts models on attention and expert workers",
    "explain": "say how a message travels, raw or coded, and why",
    "export": "write a run's model as a Hugging Face directory",
    "generate": "generate text with a model whose experts are in processes of their own",
    "serve": "serve such a model over HTTP, as OpenAI's clients expect it",
    "bench": "measure plans of inference: tokens per second and latency",
    "zip": "shrink safetensors files and checkpoint directories losslessly",
    "unzip": "restore what zip wrote, byte for byte",
    "verify": "compare every checksum of what zip wrote",
    "doctor": "show versions, kernels and devices, test them, and say what would be faster",
    "completion": "print what makes bash, zsh or fish complete commands and flags",
}
"""Subcommands and their summaries; `laconic.cli.<name>.run(args)` runs one and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `laconic` with `argv` (None: the process's own arguments) and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes that are not UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        with _ending_in_order_at_sigterm(), _interrupted_between_imports():
            return _dispatch(args)
    except LaconicError as error:
        print(f"laconic: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of stdout has gone (`laconic ... | head`); the interpreter's last flush must not fail on the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise
        print(f"laconic: error: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("laconic: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # --help has printed, or SIGTERM has come
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    name, *rest = args
    if name in ("-V", "--version"):
        if rest and rest != ["--json"]:
            raise ConfigError(f"unexpected argument {rest[0]!r}; laconic --version takes --json or nothing")
        print(json.dumps({"version": laconic.__version__}) if rest else f"laconic {laconic.__version__}")
        return 0
    if name not in COMMANDS:
        from laconic.train.config.dotted_names import nearest

        raise ConfigError(f"unknown command {name}{nearest(name, COMMANDS) or '; see laconic --help'}")
    code: int = importlib.import_module(f"laconic.cli.{name}").run(rest)
    return code


@contextlib.contextmanager
def _ending_in_order_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that it ends its child processes and removes temporary files.

    A rank dies at once, as it may be waiting in a collective that never returns to Python.
    """
    alone = "RANK" not in os.environ and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit_at_sigterm)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (_exit_at_sigterm, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_at_sigterm(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # the end is on its way
    sys.exit(128 + number)


@contextlib.contextmanager
def _interrupted_between_imports() -> Iterator[None]:
    """Let the first Ctrl-C wait for the end of an import.

    An exception that comes while torch's C++ part initializes itself aborts the process, and some modules swallow one
    that comes while they are imported: the command would go on as if nobody had pressed a key.
    """
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python does at SIGINT; within an import look again soon, at a second SIGINT raise."""
    waits = number == signal.SIGALRM or signal.getsignal(signal.SIGALRM) is not _interrupt
    if waits and _imports(frame):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_SECONDS)
        return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a module's code is being run in a frame or in one that has called it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def _usage() -> str:
    commands = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: laconic COMMAND [arguments]\n\n"
        "Train and serve larger language models in fewer bytes.\n\n"
        f"commands:\n{commands}\n\n"
        "`laconic COMMAND --help` tells more; `laconic --version` shows the version."
    )
