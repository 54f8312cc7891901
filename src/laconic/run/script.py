"""Runs a file as `python FILE ARGUMENTS` does, or a module as `python -m MODULE ARGUMENTS`, in this process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType

from laconic.errors import ConfigError


class Script:
    """A Python file, or a module, that is about to run as the module `__main__`.

    `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` become those of the script and stay so until the process
    ends: what the script registers with atexit, pickles or starts by multiprocessing's spawn finds the
    script's own module.

    Args:
        name: path of the file; or, with `is_module`, name of a module or of a package with a `__main__`.
        arguments: those the script finds in `sys.argv[1:]`.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
        if not is_module and not os.path.isfile(name):
            raise ConfigError(f"script is {name}, but there is no such file; give the path of a Python file")
        self._name = name
        self._arguments = list(arguments)
        self._is_module = is_module

    def run(self, passed: type[BaseException] | tuple[type[BaseException], ...] = ()) -> int:
        """Run the script and return the exit code that Python would end with.

        An exception ends the script with a traceback of the script's own frames, by `sys.excepthook`, and code 1.

        Args:
            passed: exceptions that are raised to the caller instead.

        Raises:
            ConfigError: there is no such module. Looking for it imports the packages that it is in.
        """
        module = ModuleType("__main__")
        if self._is_module:
            sys.argv, sys.path[0] = ["-m", *self._arguments], os.getcwd()
            path, spec, code = self._find_module()
            sys.argv[0] = path
        else:
            path, spec, code = os.path.join(os.getcwd(), self._name), None, None  # the script may go elsewhere
            sys.argv, sys.path[0] = [self._name, *self._arguments], os.path.dirname(os.path.realpath(path))
        module.__dict__.update(
            __file__=path,
            __builtins__=sys.modules["builtins"],
            __loader__=SourceFileLoader("__main__", path) if spec is None else spec.loader,
            __spec__=spec,
            __package__=None if spec is None else spec.parent,
            __cached__=None if spec is None else spec.cached,
        )
        sys.modules["__main__"] = module
        try:
            exec(_code_of(path) if code is None else code, module.__dict__)
        except passed:
            raise
        except SystemExit as stop:
            return _exit_code(stop)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Without the frame that started the script.
            own = error.__traceback__ and error.__traceback__.tb_next
            sys.excepthook(type(error), error.with_traceback(own), own)
            return 1
        return 0

    def _find_module(self) -> tuple[str, ModuleSpec, CodeType]:
        """The path of the module's file, its spec and its code."""
        spec = _spec_of(self._name)
        code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        if spec is None or code is None or spec.origin is None:
            raise ConfigError(
                f"module is {self._name}, but there is no such module in Python, nor a package with a __main__; give "
                f"the name under which it would be imported from {os.getcwd()}"
            )
        return spec.origin, spec, code


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _spec_of(name: str) -> ModuleSpec | None:
    """The spec of a module that has code; of a package's `__main__`."""
    if name.startswith("."):
        return None
    try:
        spec = find_spec(name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return find_spec(f"{name}.__main__") if is_package else spec
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is None or f"{name}.".startswith(f"{missing}."):
            return None
        raise  # a package around the module lacks something that it imports


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1
