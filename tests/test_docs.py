"""What pages show is there: Python that compiles, names and arguments that exist, links."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from types import FunctionType
from typing import Any

import pytest

from tests.distributed.processes import ROOT
from tests.scripts import load_script

TEXTS = {page.name: page.read_text() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def imported(tree: ast.AST) -> dict[str, Any]:
    """The names that a program imports from laconic and netlab. Raises ImportError and AttributeError."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("laconic", "netlab"):
            module = importlib.import_module(str(node.module))
            found |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return found


def meant_by(node: ast.expr, names: dict[str, Any]) -> Any:
    """What of laconic's an expression like a.b.c names; None if nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := meant_by(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", TEXTS)
def test_python_of_a_page_imports_and_calls_what_is_there(page: str) -> None:
    names: dict[str, Any] = {"laconic": importlib.import_module("laconic")}
    for language, program in _BLOCK.findall(TEXTS[page]):
        if language != "python":
            continue
        tree = ast.parse(program)
        names |= imported(tree)
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            called = meant_by(call.func, names)
            if called is None or any(isinstance(argument, ast.Starred) for argument in call.args):
                continue
            given = [argument for argument in call.args if ast.unparse(argument) != "..."]
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            try:
                inspect.signature(called).bind_partial(*given, **keywords)
            except TypeError as error:
                pytest.fail(f"{page}: {ast.unparse(call)}: {error}")


def test_links_of_a_page_lead_to_files() -> None:
    for page, text in TEXTS.items():
        folder = ROOT if (ROOT / page).exists() else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#\s]+)", _BLOCK.sub("", text)):
            assert target.startswith("http") or (folder / target).exists(), (page, target)


def test_results_that_pages_name_are_there() -> None:
    there = {file.name for file in ROOT.glob("benchmarks/results/*")}
    for page, text in TEXTS.items():
        missing = set(re.findall(r"\b[a-z]\w+_20\d{4}\.\w+", text)) - there
        assert not missing, (page, missing)


def test_a_page_over_two_screens_shows_something() -> None:
    """Two windows of 1280 by 800 hold 600 words of prose; in more there has to be a block, a table or a picture."""
    for page, text in TEXTS.items():
        shows = _BLOCK.search(text) or re.search(r"^\|[ -]|^ {4}\S|!\[", text, re.MULTILINE)
        assert shows or len(text.split()) <= 600 or page == "CHANGELOG.md", page


def test_the_reference_says_what_the_code_says() -> None:
    make_api = load_script(ROOT / "docs" / "make_api.py")
    assert TEXTS["api.md"] == make_api.page(), "run: python docs/make_api.py"


def test_no_member_of_a_public_class_is_left_out_of_the_reference() -> None:
    reference, make_api = (load_script(ROOT / path) for path in ("tools/site_reference.py", "docs/make_api.py"))
    packages = map(importlib.import_module, make_api.PACKAGES)
    public = [getattr(package, name) for package in packages for name in make_api._public(package)]
    for cls in filter(inspect.isclass, public):
        shown = reference._members(cls)
        for base in (base for base in cls.__mro__ if base.__module__.startswith("laconic")):
            for name, member in vars(base).items():
                if name[0] != "_" and isinstance(member, FunctionType | property | staticmethod | classmethod):
                    assert name in shown, f"{cls.__name__}.{name} and what it overrides have no docstring"
