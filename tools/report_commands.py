"""Commands that reports of benchmarks/results begin with, and whether today's programs still take them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

from laconic.cli.arguments import Parser
from laconic.errors import LaconicError

__all__ = ["NOT_AGAIN", "command_of", "complaint", "words_of"]

NOT_AGAIN = "No command makes this page again"
"""What a report says above its tables, with the reason, where it names no command."""

_COMMAND = re.compile(
    r"(?:^ {4}|`)((?:[A-Z_][A-Z0-9_]*=\S+ )*(?:python (?:-m benchmarks\.|tools/)|laconic )[^`\n]+)", re.MULTILINE
)

_PROGRAMS = tuple(f"benchmarks.{name}" for name in ("afi", "families", "moe_training", "quality", "run"))
_PROGRAMS += ("laconic.cli.main", "tools.gpu_day", "tools.load", "tools.soak")
"""Programs that parse their arguments before they do anything, so `complaint` can call them."""


class _Parsed(BaseException):
    """Ends a program when it has taken its arguments."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options


def command_of(report: str) -> str | None:
    """The first command above the tables of a report's text; "" if it says that there is none, None without either."""
    head = re.split(r"^\|", report, maxsplit=1, flags=re.MULTILINE)[0]
    found = _COMMAND.search(head)
    return "" if NOT_AGAIN in head else None if found is None else found[1]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables of the environment in front of a command, and its words."""
    words = shlex.split(command)
    count = next(number for number, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def complaint(command: str) -> str | None:
    """What the program of a command says against its arguments; None if it takes them. It does no work.

    So only programs that are known to parse before they work are called; others are refused by name.
    """
    words = words_of(command)[1]
    if words[0] == "laconic":
        name, arguments = "laconic.cli.main", words[1:]
    elif words[1] == "-m":
        name, arguments = words[2], words[3:]
    else:
        name, arguments = words[1].removesuffix(".py").replace("/", "."), words[2:]
    if name not in _PROGRAMS:
        return (
            f"{name} is not known to parse its arguments before it works; if it does, name it in {__name__}._PROGRAMS"
        )
    said = io.StringIO()
    with _only_parsing(), mock.patch.object(sys, "argv", [name, *arguments]), contextlib.redirect_stderr(said):
        try:
            program = importlib.import_module(name)
            program.main(*[arguments] * bool(inspect.signature(program.main).parameters))
        except _Parsed as parsed:
            return program.unknown_case(parsed.options) if name == "benchmarks.run" else None
        except (SystemExit, ImportError, LaconicError) as error:
            return said.getvalue().strip().rpartition("\n")[2] or str(error)
    return said.getvalue().strip() or "it reads no arguments"


@contextlib.contextmanager
def _only_parsing() -> Iterator[None]:
    def ending(parse: Any) -> Any:
        def parse_args(*args: Any, **options: Any) -> NoReturn:
            raise _Parsed(parse(*args, **options))

        return parse_args

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("RANK", None)  # with it a benchmark of several processes goes to work at once
        for parser in (argparse.ArgumentParser, Parser):
            stack.enter_context(mock.patch.object(parser, "parse_args", ending(parser.parse_args)))
        yield
