"""Pages of reference that are made from the code when the site is built: API, command line, configuration."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "reference"
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Note", "Example")
_HELP_WITH_COMMANDS = {"infer": ("plan",)}
"""Commands whose own subcommands have a help of their own."""


def pages() -> dict[str, str]:
    """Markdown by place in the site."""
    made = {f"{FOLDER}/cli.md": _command_line(), f"{FOLDER}/configuration.md": _configuration()}
    return made | {place_of(name): _package(name) for name in _make_api().PACKAGES}


def menu() -> list[dict[str, Any]]:
    """Entries for the menu."""
    packages = [{name: place_of(name)} for name in _make_api().PACKAGES]
    return [
        {"Command line": f"{FOLDER}/cli.md"},
        {"Configuration of training": f"{FOLDER}/configuration.md"},
        {"API": packages},
    ]


def linked_names(markdown: str) -> str:
    """The page of public names, with a link from each name to its signature and docstring."""
    package = ""
    lines = []
    for line in markdown.splitlines():
        if found := re.match(r"## (laconic[\w.]*)$", line):
            package = found[1]
        if name := re.match(r"\| `(\w+)` \|", line):
            line = f"| [`{name[1]}`]({place_of(package)}#{name[1].lower()}) |{line[name.end() :]}"
        lines.append(line)
    return "\n".join(lines)


def place_of(package: str) -> str:
    """Where the page of a package is."""
    return f"{FOLDER}/{package}.md"


def _make_api() -> Any:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- API ---


def _package(name: str) -> str:
    make_api, package = _make_api(), importlib.import_module(name)
    parts = [f"# {name}\n", _docstring(inspect.getdoc(package) or "")]
    for public in sorted(make_api._public(package), key=str.lower):
        parts.append(_entry(make_api, package, public))
    return "\n".join(parts)


def _entry(make_api: Any, package: ModuleType, name: str) -> str:
    value = getattr(package, name)
    head = f"## {name} {{ #{name.lower()} }}\n"
    if inspect.ismodule(value):
        return f"{head}\nModule `{value.__name__}`.\n\n{_docstring(inspect.getdoc(value) or '')}"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"{head}\n{_docstring(make_api._constant_doc(package, name))}"
    home = f"*{'class' if inspect.isclass(value) else 'function'} of `{value.__module__}`*\n"
    parts = [head, home, _signature(name, value), _docstring(_own_doc(value))]
    if inspect.isclass(value):
        parts += [_method(name, each, member, doc) for each, (member, doc) in _members(value).items()]
    return "\n".join(parts)


def _own_doc(value: Any) -> str:
    """The docstring that a class has itself, and that of its constructor."""
    if not inspect.isclass(value):
        return inspect.getdoc(value) or ""
    own = inspect.cleandoc(value.__dict__.get("__doc__") or "")
    constructor = value.__dict__.get("__init__")
    return "\n\n".join(filter(None, [own, inspect.cleandoc(getattr(constructor, "__doc__", None) or "")]))


def _members(cls: type) -> dict[str, tuple[Any, str]]:
    """Methods and properties of the class and its laconic bases, with the first docstring; the class's own first."""
    found: dict[str, tuple[Any, str]] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "laconic":
            for name, member in base.__dict__.items():
                if not name.startswith("_"):
                    first, doc = found.get(name, (member, ""))
                    found[name] = first, doc or _member_doc(member)
    return {name: (member, doc) for name, (member, doc) in found.items() if doc}


def _member_doc(member: Any) -> str:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if not (inspect.isroutine(member) or isinstance(member, property)):
        return ""
    return inspect.cleandoc(member.__doc__ or "")


def _method(owner: str, name: str, member: Any, doc: str) -> str:
    function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    shown = f"```python\n{name}  # a property\n```\n" if isinstance(member, property) else _signature(name, function)
    return f"### {owner}.{name} {{ #{owner.lower()}.{name.lower()} }}\n\n{shown}\n{_docstring(doc, 3)}"


def _signature(name: str, value: Any) -> str:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    signature = re.sub(r"<(?:function|class|object) ?'?([\w.<>]+)[^>]*>", r"\1", signature)
    signature = re.sub(r" at 0x[0-9a-f]+", "", signature).replace("'", "")
    if len(name + signature) > 88:
        signature = _broken(signature)
    return f"```python\n{name}{signature}\n```\n"


def _broken(signature: str) -> str:
    """A signature with a line for each argument."""
    depth, lines, line = 0, [], ""
    for place, letter in enumerate(signature[1:], 1):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return (
                "(\n" + "".join(f"    {each.strip()},\n" for each in [*lines, line] if each.strip()) + signature[place:]
            )
        if letter == "," and depth == 0:
            lines, line = [*lines, line], ""
        else:
            line += letter
    return signature


def _docstring(text: str, level: int = 2) -> str:
    """Google's sections as lists with bold heads; everything else is Markdown already."""
    out: list[str] = []
    section = False
    lines = text.splitlines()
    for line in lines:
        head = re.fullmatch(r"(\w+):", line)
        if head and head[1] in _SECTIONS:
            out += ["", f"**{head[1]}**", ""]
            section = True
        elif section and (item := re.match(r"    (\*{0,2}[\w.,*` ]+): (.*)", line)):
            out.append(f"- `{item[1]}`: {item[2]}")
        elif section and re.match(r"    \S", line):
            out.append(line[4:])
        elif section and line.startswith("        "):
            out.append("  " + line.strip())
        else:
            section = section and not line.strip()
            out.append(line)
    return _plain("\n".join(out)) + "\n"


def _plain(text: str) -> str:
    """Brackets of shapes are not links, and names of dtypes in angle brackets are not HTML."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"<(?=\w)", "&lt;", piece.replace("[", r"\[").replace("__", r"\_\_"))
        for piece in pieces
    )


# --- command line ---


def _command_line() -> str:
    from laconic.cli.main import COMMANDS

    parts = [
        "# Command line\n",
        "What every command says of itself with `--help`.\n",
        f"```{{ .text .help }}\n{_help()}```\n",
    ]
    for name, summary in COMMANDS.items():
        parts.append(
            f"## laconic {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n```{{ .text .help }}\n{_help(name)}```\n"
        )
        for inner in _HELP_WITH_COMMANDS.get(name, ()):
            parts.append(f"### laconic {name} {inner}\n\n```{{ .text .help }}\n{_help(name, inner)}```\n")
    return "\n".join(parts)


def _help(*command: str) -> str:
    """Printed for a terminal of 100 columns, without its frames and colors."""
    from laconic.cli.main import main

    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main([*command, "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    lines = [_unframed(line) for line in out.getvalue().splitlines()]
    return "\n".join(line for line in lines if line is not None).strip() + "\n"


def _unframed(line: str) -> str | None:
    if title := re.match(r"╭─ (.+?) ─+╮", line):
        return f"\n{title[1]}:"
    if re.match(r"[╰│] ?─+ ?[╯│]| -{20,}$", line):
        return None
    if inside := re.match(r"│ (.*?)\s*│$", line):
        return f"  {inside[1]}"
    return line.rstrip()


# --- configuration ---


def _configuration() -> str:
    from laconic.train.config.toml import json_schema

    schema = json_schema()
    parts = [
        "# Configuration of training\n",
        "Every field of a configuration file of [`laconic train`](../training.md), from the schema that `laconic"
        " train --schema` prints for editors. A field `name` of a table `[table]` is the flag `--table.name`.\n",
        "```toml\nsteps = 2000\n\n[activations]\nbits = 4\n```\n",
        _fields("", schema, schema),
    ]
    return "\n".join(parts)


def _fields(table: str, node: dict[str, Any], schema: dict[str, Any]) -> str:
    rows, inner = [], []
    for name, field in node["properties"].items():
        field = _resolved(field, schema)
        if "properties" in field:
            inner.append(_fields(f"{table}.{name}".strip("."), field, schema))
            continue
        values = _values(field).replace("|", r"\|")
        text = str(field.get("description", "")).replace("|", r"\|").replace("\n", " ")
        default = "" if "default" not in field else f"`{_toml(field['default'])}`"
        rows.append(f"| `{name}` | {values} | {default} | {_plain(text)} |")
    title = f"## [{table}] {{ #{table} }}" if table else "## At the top { #top }"
    about = _plain(str(node.get("description", "")))
    head = f"{title}\n\n{about}\n\n| field | values | default | |\n|---|---|---|---|\n"
    return head.replace("## [", r"## \[") + "\n".join(rows) + "\n\n" + "\n".join(inner)


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in field:
        return schema["$defs"][field["$ref"].rpartition("/")[2]] | {k: v for k, v in field.items() if k != "$ref"}
    return field


def _values(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_values(each) for each in field["anyOf"])
    if "const" in field:
        return f"`{_toml(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{_toml(value)}`" for value in field["enum"])
    bounds = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
    limits = [text.format(field[name]) for name, text in bounds.items() if abs(field.get(name, 2**63)) < 2**31 - 1]
    kind = {"null": "nothing", "object": "table", "array": "list"}.get(field.get("type", ""), field.get("type", "any"))
    return " ".join([kind, *limits])


def _toml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "None"}[value]
    return str(value) if not isinstance(value, str) else f'"{value}"'
