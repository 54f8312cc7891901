"""The command `laconic`: runs a subcommand, and turns laconic's errors into one line and an exit code.

Subcommands are imported when they are called, so that `laconic --help` needs neither torch nor transformers.
Exit codes: 0 done, 1 the command's answer is no (a self test fails, a plan does not fit), 2 bad input, 129 ended by
SIGHUP (its terminal was closed), 130 interrupted with Ctrl-C, 143 ended by SIGTERM; `train` returns the exit code of
the training processes, `run` that of the script.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Sequence

import laconic
from laconic.cli.interrupts import ending_in_order, interrupted_between_imports
from laconic.errors import ConfigError, LaconicError
from laconic.output_lines import say

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
    "cluster-test": "test links, clocks, versions and coded collectives of a launch's processes",
    "doctor": "show versions, kernels and devices, test them, and say what would be faster",
    "completion": "print what makes bash, zsh or fish complete commands and flags",
}
"""Subcommands and their summaries; `laconic.cli.<name>.run(args)` runs one and returns the exit code."""


def module_of(command: str) -> str:
    """The module of a subcommand, with its functions `run` and `make_parser`."""
    return f"laconic.cli.{command.replace('-', '_')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `laconic` with `argv` (None: the process's own arguments) and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold bytes that are not UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        with ending_in_order(), interrupted_between_imports():
            return _dispatch(args)
    except LaconicError as error:
        say(f"laconic: error: {error}")
        return 2
    except BrokenPipeError:
        # The reader of stdout has gone (`laconic ... | head`); the interpreter's last flush must not fail on the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None or error.filename is None:
            raise
        say(f"laconic: error: cannot use {error.filename}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # who has started the ranks says it, once
            say("laconic: interrupted")
        return 130
    except SystemExit as stop:  # --help has printed, or a signal has come
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2


def _open_what_is_closed() -> None:
    """Let stdin, stdout and stderr lead nowhere where they are closed.

    The next file that is opened would get the number of one of them, and with it what C code writes there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


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
    code: int = importlib.import_module(module_of(name)).run(rest)
    return code


def _usage() -> str:
    commands = "\n".join(f"  {name:<12} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: laconic COMMAND [arguments]\n\n"
        "Train and serve larger language models in fewer bytes.\n\n"
        f"commands:\n{commands}\n\n"
        "`laconic COMMAND --help` tells more; `laconic --version` shows the version."
    )
