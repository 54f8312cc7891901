"""What a benchmark is: a named function from options to Markdown tables.

Times are only comparable within one run, because machines drift and share their memory with others. So every table
times its cases in turn, round after round, and reports medians and ratios within the run.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

__all__ = ["BENCHMARKS", "Options", "Table", "benchmark", "processor", "seconds_of"]


@dataclass(frozen=True)
class Options:
    """What a run is told."""

    threads: int
    """CPU threads of torch, of this library and of its peers."""
    elements: int
    """Size of the tensors of the kernel benchmarks."""
    rounds: int
    """Timed rounds; every case runs once in each."""
    num_hosts: Sequence[int] = ()
    """Hosts of the benchmarks over slow links; empty: their own choice."""
    rates: Sequence[float] = ()
    """Bits per second of their links; empty: their own choice."""
    profile: bool = False
    """Whether `laconic profile` measures each network first; choices otherwise rest on a brief measurement."""


@dataclass(frozen=True)
class Table:
    """One Markdown table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def render(self) -> str:
        """The table as Markdown, with its title above and its note below."""
        lines = [f"## {self.title}", "", _row(self.header), _row(["---"] * len(self.header))]
        lines += [_row(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


Benchmark = Callable[[Options], list[Table]]

BENCHMARKS: dict[str, Benchmark] = {}
"""Every benchmark by its name on the command line."""


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register a benchmark under a name."""

    def register(function: Benchmark) -> Benchmark:
        BENCHMARKS[name] = function
        return function

    return register


def seconds_of(cases: Mapping[str, Callable[[], object]], rounds: int, warm_ups: int = 0) -> dict[str, float]:
    """Median seconds of each case over `rounds` rounds that take every case in turn; a first round is not counted.

    With `warm_ups` a case runs that often before each time that counts, so that it does not pay for the caches that
    another one left.
    """
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        for name, case in cases.items():
            for _ in range(warm_ups):
                case()
            started = time.perf_counter()
            case()
            if round_number:
                taken[name].append(time.perf_counter() - started)
    return {name: median(seconds) for name, seconds in taken.items()}


def processor() -> str:
    """Name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
