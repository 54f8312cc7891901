"""The quick part of the tests with other versions of Python, torch and transformers, a cell each, as a table.

    python tools/matrix.py                                      # every cell of an interpreter that is here
    python tools/matrix.py --cells 3.11-2.11-5.1 3.13-2.13-newest --out docs/compatibility.md

A cell is PYTHON-TORCH-TRANSFORMERS; `5.1` means the newest 5.1.x, `newest` what constraints.txt pins. Each gets an
environment of its own: laconic from this checkout or --wheel, the others from a package index. torch's default build on
Linux brings gigabytes of CUDA; before a cell is installed, a dry run says what it would bring, and one with CUDA's
libraries is left out unless --cuda is given: name an index with CPU builds by PIP_EXTRA_INDEX_URL instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from interpreters import find_interpreter

ROOT = Path(__file__).resolve().parents[1]
PYTHONS, TORCHES, TRANSFORMERS = ("3.11", "3.12", "3.13"), ("2.11", "2.12", "2.13", "2.14", "2.15"), ("5.1", "newest")
TESTS = [
    "tests/ops/test_native.py",
    "tests/formats/test_blockwise.py",
    "tests/activations/test_report.py",
    "tests/gradients/test_store.py",
    "tests/optim/test_convert.py",
    "tests/train/test_loop.py",
    "tests/integrations/test_huggingface.py",
    "tests/cli/test_main.py",
]
"""Kernels against the reference, sites of models, gradients, optimizer, trainer, Hugging Face's Trainer, commands."""
TOOLS = ("accelerate", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
_PINNED_BY_CELL = ("torch", "transformers", "triton", "tokenizers", "huggingface_hub")


@dataclass(frozen=True)
class Cell:
    """Versions that are tried together."""

    python: str
    torch: str
    transformers: str

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raise SystemExit if `text` is not PYTHON-TORCH-TRANSFORMERS."""
        parts = text.split("-")
        if len(parts) != 3:
            raise SystemExit(f"--cells has {text!r}, but a cell is PYTHON-TORCH-TRANSFORMERS, e.g. 3.11-2.11-5.1")
        return cls(*parts)

    def requirements(self) -> list[str]:
        """What pip installs beside laconic."""
        pins = (ROOT / "constraints.txt").read_text()
        newest = re.search(r"^transformers==(\S+)$", pins, re.MULTILINE)
        assert newest is not None
        transformers = newest[1] if self.transformers == "newest" else f"{self.transformers}.*"
        return [f"torch=={self.torch}.*", f"transformers=={transformers}"]


def constraints(folder: Path) -> Path:
    """constraints.txt without what a cell chooses."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in _PINNED_BY_CELL]
    (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
    return folder / "constraints.txt"


def output(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside of this one's environment; standard error comes with standard output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=variables, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False)


def tried(cell: Cell, wheel: Path | None, tests: list[str], minutes: float, *, cuda: bool) -> tuple[str, str]:
    """The versions that a cell resolved to, and what came of it."""
    interpreter = find_interpreter(cell.python)
    if interpreter is None:
        return "-", f"left out: no Python {cell.python} here"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output(interpreter, "-m", "venv", "venv", cwd=folder)
        python = folder / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-c", constraints(folder))
        laconic = f"laconic[train,plan] @ {(wheel or ROOT).resolve().as_uri()}"
        wanted = [*cell.requirements(), laconic, *TOOLS]
        dry = output(*pip, "--dry-run", "--quiet", "--report", "report.json", *wanted, cwd=folder)
        if dry.returncode != 0:
            return "-", f"does not resolve: {_last_line(dry.stdout)}"
        brought = [one["metadata"] for one in json.loads((folder / "report.json").read_text())["install"]]
        versions = ", ".join(
            f"{one['name']} {one['version']}" for one in brought if one["name"] in ("torch", "transformers")
        )
        if not cuda and (of_cuda := [one["name"] for one in brought if one["name"].startswith(("nvidia-", "cuda-"))]):
            return versions, f"left out: torch brings {len(of_cuda)} packages of CUDA; name an index with CPU builds"
        done = output(*pip, *wanted, cwd=folder)
        if done.returncode != 0:
            return versions, f"does not install: {_last_line(done.stdout)}"
        began = time.monotonic()
        limit = ("timeout", f"{minutes * 60:.0f}")
        options = (
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
        )
        done = output(*limit, python, "-m", "pytest", *options, *(ROOT / test for test in tests), cwd=ROOT)
        print(done.stdout[-6000:], flush=True)
        ended = "longer than the limit" if done.returncode == 124 else _last_line(done.stdout).strip("= ")
        return versions, f"{ended} ({time.monotonic() - began:.0f} s)" if done.returncode == 124 else ended


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def table(rows: list[tuple[Cell, str, str]]) -> str:
    """The cells as Markdown."""
    lines = ["| Python | torch | transformers | resolved to | result |", "|---|---|---|---|---|"]
    lines += [f"| {c.python} | {c.torch} | {c.transformers} | {found} | {result} |" for c, found, result in rows]
    return "\n".join(lines)


def main() -> int:
    """Try the cells; 1 if tests of one fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", help="PYTHON-TORCH-TRANSFORMERS each (default: all)")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="test files to run")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of a cell's tests (default: %(default)s)")
    parser.add_argument("--cuda", action="store_true", help="install builds of torch that bring CUDA, too")
    parser.add_argument("--out", type=Path, help="Markdown file to write the table to")
    options = parser.parse_args()
    every = [f"{python}-{torch}-{hf}" for python in PYTHONS for torch in TORCHES for hf in TRANSFORMERS]
    rows = []
    for cell in map(Cell.parse, options.cells or every):
        print(f"--- Python {cell.python}, torch {cell.torch}, transformers {cell.transformers}", flush=True)
        found, result = tried(cell, options.wheel, options.tests, options.minutes, cuda=options.cuda)
        rows.append((cell, found, result))
        print(f"{found}: {result}", flush=True)
    print(table(rows))
    if options.out is not None:
        options.out.write_text(f"# Version matrix\n\n`make matrix`, {datetime.date.today()}.\n\n{table(rows)}\n")
    return 1 if any(re.search(r"failed|error|does not|limit", result) for _, _, result in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
