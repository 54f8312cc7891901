"""No warning is muted but by its own words, or by its own logger, where a reader gets it otherwise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "laconic"

ALLOWED = {
    "activations/whole_model/report.py": set[str](),
    "advice/measure.py": {"logger.setLevel(logging.ERROR)", "logger.setLevel(level)"},  # SAVINGS_LOGGER alone
    "train/report/run_logger.py": {"logger.setLevel(logging.INFO)", "logger.setLevel(level)"},  # makes more heard
    # The agent's own log, which the launcher words anew; LOGLEVEL in the environment keeps it.
    "train/launch/launcher.py": {
        "logging.getLogger(name).setLevel(logging.CRITICAL)",
        "logging.getLogger(name).setLevel(level)",
    },
}
"""Files -> calls that change what is heard, and why."""


def mutes(code: str) -> Iterator[str]:
    """Calls that keep warnings from being heard, whatever they say."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name == "setLevel" or name.startswith("set_verbosity") or ast.unparse(node.func) == "logging.disable":
            yield ast.unparse(node)
        ignores = bool(node.args) and ast.unparse(node.args[0]) == "'ignore'"
        if (name == "simplefilter" and ignores) or (name == "filterwarnings" and ignores and "message" not in given):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    [
        "logger.setLevel(50)",
        "logging.set_verbosity_error()",
        "logging.disable(30)",
        "warnings.simplefilter('ignore')",
        "warnings.filterwarnings('ignore', category=UserWarning)",
    ],
)
def test_the_gate_finds_what_mutes(code: str) -> None:
    assert list(mutes(code)) == [code]
    assert list(mutes("warnings.filterwarnings('ignore', message='x'); warnings.simplefilter('error')")) == []


def test_no_warning_is_muted_by_the_way() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    done = {path.relative_to(SOURCE).as_posix(): set(mutes(path.read_text())) for path in files}
    assert {name: found for name, found in done.items() if found} == {k: v for k, v in ALLOWED.items() if v}
    assert "logging.getLogger(SAVINGS_LOGGER)" in (SOURCE / "advice/measure.py").read_text()
