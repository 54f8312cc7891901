"""What shipped code must not do, whatever it is given: run bytes from outside, and tell secrets."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.train.config.toml import save_config
from tests.distributed.processes import ForkedCommand, environment
from tests.train.runs import tiny_config

SOURCE = Path(__file__).resolve().parents[1] / "src" / "laconic"

ALLOWED = {
    "formats/dcp.py": {"pickle.Unpickler", "pickle.UnpicklingError"},  # its find_class knows a dozen passive records
    "run/script.py": {"compile", "exec"},  # runs the user's own script, as python does
}
"""Files -> what they may do, and why."""

_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "marshal.loads",
    "marshal.load",
    "yaml.load",
}
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def findings(code: str) -> Iterator[str]:
    """Calls and names by which bytes from outside could become code."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _MODULES:
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in _CALLS:
            yield name
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        if name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle", "False") != "False":
            yield "numpy.load with pickles"
        if given.get("shell", "False") != "False":
            yield f"{name} with a shell"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle; pickle.loads(x)", "pickle.loads"),
        ("from pickle import load", "pickle.load"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("np.load(path, allow_pickle=True)", "numpy.load with pickles"),
        ("subprocess.run(text, shell=True)", "subprocess.run with a shell"),
        ("os.system(text)", "os.system"),
        ("eval(text)", "eval"),
        ("def f():\n    return exec(text)", "exec"),
        ("yaml.load(text)", "yaml.load"),
    ],
)
def test_the_gate_finds_what_it_is_for(code: str, found: str) -> None:
    assert list(findings(textwrap.dedent(code))) == [found]


def test_the_gate_lets_the_harmless_pass() -> None:
    harmless = "model.eval(); torch.load(p, weights_only=True); np.load(p); subprocess.run([a], check=True)"
    assert list(findings(harmless)) == []


def test_bytes_from_outside_never_become_code() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    done = {path.relative_to(SOURCE).as_posix(): set(findings(path.read_text())) for path in files}
    assert {name: found for name, found in done.items() if found} == ALLOWED


SECRETS = {
    "LACONIC_SECRET": "s3cret-of-the-run-0123456789",
    "LACONIC_API_KEY": "s3cret-of-the-server-0123456789",
    "HF_TOKEN": "s3cret-of-the-hub-0123456789",
    "WANDB_API_KEY": "s3cret-of-the-tracker-0123456789",
}


@pytest.mark.parametrize("refused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_secrets_of_the_environment_are_neither_logged_nor_written(tmp_path: Path, refused: bool) -> None:
    """Of a run over two processes that trains, saves and reports, and of one that fails by name."""
    config = tiny_config(
        tmp_path, "run", {"nproc": 2, "checkpoint.every": 3, "tensorboard": True, "gradients.bits": 8, "steps": 3}
    )
    save_config(config, tmp_path / "config.toml")
    flags = ["--batch-size", "3"] if refused else []
    command = ["train", "--config", str(tmp_path / "config.toml"), *flags]
    ending = ForkedCommand(command, tmp_path / "out", environment(**SECRETS)).finish()
    assert ending.code == (2 if refused else 0), ending.err
    told = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert not told
    assert refused or (tmp_path / "run" / "metrics.jsonl").exists()
