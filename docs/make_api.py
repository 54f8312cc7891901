"""Write docs/api.md: every public name of every package, with the first sentence of its docstring.

    python docs/make_api.py            # write it
    python docs/make_api.py --check    # exit with 1 if it would change

A name is public if it is in the `__all__` of one of `PACKAGES`. Constants and type aliases are documented by the string
after their definition.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")

PACKAGES = (
    "laconic",
    "laconic.advice",
    "laconic.auditing",
    "laconic.activations",
    "laconic.gradients",
    "laconic.optim",
    "laconic.vision",
    "laconic.collectives",
    "laconic.moe",
    "laconic.moe.gates",
    "laconic.moe.huggingface",
    "laconic.schedule",
    "laconic.cost",
    "laconic.cost.moe",
    "laconic.cost.infer",
    "laconic.infer",
    "laconic.integrations",
    "laconic.integrations.accelerate",
    "laconic.integrations.huggingface",
    "laconic.integrations.lightning",
    "laconic.formats",
    "laconic.ops",
)

_HEAD = """# Public names

Every name that a package exports, with the first sentence of its docstring; `help(laconic.compress_activations)` shows
the rest: arguments, shapes, units and errors. Names of other modules are not for use from outside and may change.

This page is written by `python docs/make_api.py` and compared with the code by a test.
"""


def page() -> str:
    """Return the text of the page.

    Raises:
        LookupError: a public name has no docstring.
    """
    parts = [_HEAD]
    for name in PACKAGES:
        package = importlib.import_module(name)
        parts += [f"\n## {name}\n\n{_first_sentence(package.__doc__ or '')}\n"]
        rows = [f"| `{public}` | {_line(package, public)} |" for public in sorted(_public(package), key=str.lower)]
        parts += ["\n| name | |\n|---|---|\n", "\n".join(rows), "\n"]
    return "".join(parts)


def _public(package: ModuleType) -> list[str]:
    return [name for name in package.__all__ if not name.startswith("_")]


def _line(package: ModuleType, name: str) -> str:
    value = getattr(package, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        text = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    else:
        text = _constant_doc(package, name)
    if not text:
        raise LookupError(f"{package.__name__}.{name} has no docstring; give it one, or take it out of __all__")
    return _first_sentence(text).replace("|", r"\|")


def _constant_doc(module: ModuleType, name: str) -> str:
    """The string after the assignment to a name, where it is defined or in the module that it is imported from."""
    for node, after in _statements(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _constant_doc(importlib.import_module(node.module), alias.name)
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        is_it = any(isinstance(each, ast.Name) and each.id == name for each in names)
        if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return textwrap.dedent(str(after.value.value))
    return ""


@cache
def _statements(module: ModuleType) -> list[tuple[ast.stmt, ast.stmt | None]]:
    body = ast.parse(inspect.getsource(module)).body
    return list(zip(body, [*body[1:], None], strict=True))


def _first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s(?=[A-Z`\"])", paragraph)[0].rstrip(":")


def main() -> None:
    """Write or check the page."""
    new, old = page(), PAGE.read_text() if PAGE.exists() else ""
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == old else "docs/api.md is not what the code says; run: python docs/make_api.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
