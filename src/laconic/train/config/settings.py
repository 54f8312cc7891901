"""Settings as data, read from the fields of a section: what flags, messages, docs and completion are made from."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

IS_PATH = "is a path"
"""Marks, in `Annotated`, a text that names a file or a directory."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a section, or another flag of a command."""

    name: str
    """Dotted."""
    kind: type
    """bool, int, float or str, also of the entries of a list; dict: a table with free names; or a section's class."""
    text: str = ""
    """Documentation, in one line."""
    choices: tuple[Any, ...] = ()
    """The only values; empty: any."""
    is_list: bool = False
    can_be_none: bool = False
    is_path: bool = False

    @property
    def is_section(self) -> bool:
        """Whether it has settings of its own."""
        return dataclasses.is_dataclass(self.kind)


@cache
def settings(cls: type, prefix: str = "") -> tuple[Setting, ...]:
    """List the settings of a section in order, each section followed by its own."""
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    found: list[Setting] = []
    for field in dataclasses.fields(cls):
        one = _setting(prefix + field.name, hints[field.name], docs.get(field.name, ""))
        found.append(one)
        if one.is_section:
            found += settings(one.kind, f"{one.name}.")
    return tuple(found)


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a section, as one line of text; empty where the source is not at hand."""
    return _docs_of_module(cls.__module__).get(cls.__name__, {})


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Docstrings of fields by class; pydantic's own extraction reads the source anew for each class."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except OSError:
        return {}
    return {node.name: _docs_of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return docs


def _setting(name: str, hint: Any, text: str) -> Setting:
    """Read the type of a field: Annotated, tuple, Literal, dict or `| None` around a plain type or a section."""
    found: dict[str, Any] = {}
    while True:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            found |= {"is_path": True} if IS_PATH in hint.__metadata__ else {}
            hint = hint.__origin__
        elif origin in (Union, types.UnionType):
            found["can_be_none"] = True
            (hint,) = (one for one in arguments if one is not type(None))
        elif origin is tuple:
            found["is_list"] = True
            hint = arguments[0]
        elif origin is Literal:
            return Setting(name, type(arguments[0]), text, choices=arguments, **found)
        else:
            return Setting(name, origin or hint, text, **found)
