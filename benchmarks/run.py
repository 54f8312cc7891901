"""Run a benchmark and write its tables.

    python -m benchmarks.run kernels --threads 1 2 --out benchmarks/results/kernels_NAME.md
    python -m benchmarks.run collectives --hosts 4 --rates 1gbit --elements 1048576     # a part of it
    python -m benchmarks.run vision-step --only ResNet-50                               # one of its tables

Every report begins with the command that made it and is written as its tables come. Every number of threads gets a
process of its own: the OpenMP runtimes that torch and its peers bring read their number of threads when they start.
`auto` wants a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.kit import timing
from benchmarks.registry import (
    BENCHMARKS,
    CASES,
    SMALL_ELEMENTS,
    SMOKE_ELEMENTS,
    Options,
    Table,
    how_long,
    report_head,
    took,
)
from laconic.cost.sizes import parse_nbytes
from netlab import bits_per_second_of


def modules() -> dict[str, str]:
    """The module of every benchmark by the name that its decorator gives it."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for name in re.findall(r'^@benchmark\("([\w-]+)"[,)]', file.read_text(), re.MULTILINE):
            found[name] = f"benchmarks.{file.stem}"
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments` name; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(modules()))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="one part of the report for each")
    parser.add_argument("--elements", type=int, default=1 << 24, help="size of the tensors of the kernel benchmarks")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; the median counts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[], help="over slow links: how many hosts")
    parser.add_argument("--rates", nargs="+", default=[], help="over slow links: their rates, as in 100mbit 2.5gbit")
    parser.add_argument("--profile", action="store_true", help="over slow links: run laconic profile on each first")
    parser.add_argument("--memory", type=parse_nbytes, metavar="SIZE", help="of largest: for example 3GB")
    parser.add_argument("--only", nargs="+", default=[], help="the cases to run, as their tables are titled")
    parser.add_argument("--small", action="store_true", help="small models and tensors, as for CI")
    parser.add_argument("--smoke", action="store_true", help="a tiny case that only shows that the benchmark runs")
    parser.add_argument("--out", type=Path, help="Markdown file to write as well")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part:
        _run_part(chosen)
        return 0
    if chosen.out is not None and not chosen.out.parent.is_dir():
        parser.error(f"--out is {chosen.out}, but the folder {chosen.out.parent} does not exist: make it first")
    write, began = _Report(chosen.out).write, time.monotonic()
    command = f"python -m benchmarks.run {shlex.join(arguments)}"
    if not chosen.smoke:
        print(how_long(chosen.name, command), file=sys.stderr, flush=True)
    head = report_head(chosen.name, command) + "\n"
    for threads in chosen.threads:
        # What comes last counts.
        part = [sys.executable, "-m", "benchmarks.run", *arguments, "--threads", str(threads), "--part"]
        if chosen.out is not None and len(chosen.threads) > 1:  # pictures of parts do not overwrite each other
            part += ["--out", str(chosen.out.with_stem(f"{chosen.out.stem}_{threads}_threads"))]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with subprocess.Popen(part, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                write(head + line)
                head = ""
                if line.startswith("## "):
                    print(f"{time.monotonic() - began:.0f} s: {line[3:].strip()}", file=sys.stderr, flush=True)
        if process.returncode:
            return process.returncode
        head = "\n"
    write(f"\n{took(began)}\n")
    return 0


class _Report:
    """Standard output and a file that is begun with the first line, so that a refused run leaves an old one alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._mode = "w"
        self._held = ""

    def write(self, text: str) -> None:
        """Write what has come; blank lines wait for what follows them, so that none ends the report."""
        self._held += text
        if not text.strip():
            return
        print(self._held, end="", flush=True)
        if self._path is not None:
            with self._path.open(self._mode) as file:
                file.write(self._held)
            self._mode = "a"
        self._held = ""


def unknown_case(chosen: argparse.Namespace) -> str | None:
    """What is wrong with --only; None if nothing is. Imports the benchmark."""
    importlib.import_module(modules()[chosen.name])
    cases = CASES[chosen.name]
    unknown = [case for case in chosen.only if case not in cases]
    if not unknown:
        return None
    known = f"its cases are {', '.join(map(repr, cases))}" if cases else "it always runs whole, leave --only out"
    return f"--only {unknown[0]!r}: {chosen.name} has no such case; {known}"


def _run_part(chosen: argparse.Namespace) -> None:
    """Print the tables for one number of threads, and how their times were taken."""
    (threads,) = chosen.threads
    torch.set_num_threads(threads)
    if (refused := unknown_case(chosen)) is not None:
        sys.exit(refused)
    elements, rounds = (SMOKE_ELEMENTS, 1) if chosen.smoke else (chosen.elements, chosen.rounds)
    if chosen.small:
        elements = min(elements, SMALL_ELEMENTS)
    rates = [bits_per_second_of(rate) for rate in chosen.rates]
    options = Options(
        threads, elements, rounds, chosen.hosts, rates, chosen.profile, chosen.only, chosen.memory, chosen.out
    )
    failed: list[str] = []
    for table in BENCHMARKS[chosen.name](options):
        print(table.render(), flush=True)
        if isinstance(table, Table):
            failed += table.failed
    if taken := timing.summary():
        print(taken, flush=True)
    if failed:
        sys.exit(f"{chosen.name}: no result for {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
