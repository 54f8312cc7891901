"""Runs a file as `python FILE ARGUMENTS` does, in this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from laconic.errors import ConfigError

__all__ = ["Script"]


class Script:
    """A Python file that is about to run as the module `__main__`.

    `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` become those of the script and stay so until the process
    ends: what the script registers with atexit, pickles or starts by multiprocessing's spawn finds the
    script's own module.

    Args:
        path: of the file.
        arguments: those the script finds in `sys.argv[1:]`.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(self, path: str, arguments: Sequence[str]) -> None:
        if not os.path.isfile(path):
            raise ConfigError(f"script is {path}, but there is no such file; give the path of a Python file")
        self._path = path
        self._arguments = list(arguments)

    def run(self, passed: type[BaseException] | tuple[type[BaseException], ...] = ()) -> int:
        """Run the script and return the exit code that Python would end with.

        An exception ends the script with a traceback of the script's own frames, by `sys.excepthook`, and code 1.

        Args:
            passed: exceptions that are raised to the caller instead.
        """
        module = ModuleType("__main__")
        module.__dict__.update(
            __file__=self._path,
            __builtins__=sys.modules["builtins"],
            __loader__=SourceFileLoader("__main__", self._path),
            __spec__=None,
            __package__=None,
            __cached__=None,
        )
        sys.argv = [self._path, *self._arguments]
        sys.path[0] = os.path.dirname(os.path.realpath(self._path))
        sys.modules["__main__"] = module
        try:
            exec(self._code(), module.__dict__)
        except passed:
            raise
        except SystemExit as stop:
            return _exit_code(stop)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            own = _script_frames(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(own), own)
            return 1
        return 0

    def _code(self) -> CodeType:
        with io.open_code(os.path.abspath(self._path)) as file:
            return compile(file.read(), self._path, "exec", dont_inherit=True)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _script_frames(found: TracebackType | None) -> TracebackType | None:
    """The traceback without the frame that started the script."""
    return None if found is None else found.tb_next
