"""What a benchmark is: a named function from options to Markdown tables."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TypeVar

import torch

from laconic.ops import kernels_in_use

SMOKE_ELEMENTS = 1 << 12
"""Elements of a tiny case that only shows that a benchmark runs."""

SMALL_ELEMENTS = 1 << 16
"""Elements of a small case, whose models are small, too."""

Row = TypeVar("Row")


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
    only: Sequence[str] = ()
    """The cases to run, of a benchmark that names its own; empty: all."""

    memory_nbytes: int | None = None
    """Of a process that trains, for the benchmark that looks for the largest model; None: its own choice."""

    out: Path | None = None
    """The report's file, for benchmarks that draw a picture beside it."""

    @property
    def smoke(self) -> bool:
        """Whether a tiny case is enough."""
        return self.elements <= SMOKE_ELEMENTS

    @property
    def small(self) -> bool:
        """Whether models and tables without a size of their own should be small."""
        return self.elements < 1 << 20

    @property
    def thread_text(self) -> str:
        """1 thread, 2 threads."""
        return f"{self.threads} thread{'s' * (self.threads > 1)}"

    def sizes(self, sizes: Sequence[int], smoke: Sequence[int]) -> list[int]:
        """Bytes of messages: those of at most 4 x `elements`, or the few of a tiny case."""
        return list(smoke) if self.smoke else [size for size in sizes if size <= 4 * self.elements]


@dataclass(frozen=True)
class Table:
    """One Markdown table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    failed: Sequence[str] = ()
    """Rows that have no result though they should; the run ends with an error that names them."""

    @classmethod
    def of(
        cls,
        title: str,
        rows: Iterable[Row],
        columns: Sequence[tuple[str, Callable[[Row], str]]],
        note: str = "",
        failed: Sequence[str] = (),
    ) -> Table:
        """A table from what its rows are about, and columns that each say their heading and their cell of a row."""
        header = [heading for heading, _ in columns]
        return cls(title, header, [[cell(row) for _, cell in columns] for row in rows], note, failed)

    def render(self) -> str:
        """The table as Markdown, with its title above and its note below."""
        lines = [f"## {self.title}", "", _row(self.header), _row(["---"] * len(self.header))]
        lines += [_row(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])


@dataclass(frozen=True)
class Text:
    """A piece of a report that is Markdown already."""

    markdown: str

    def render(self) -> str:
        """The piece itself."""
        return self.markdown


Benchmark = Callable[[Options], Iterable[Table | Text]]
"""What a benchmark yields is written as it comes."""

BENCHMARKS: dict[str, Benchmark] = {}
"""Every benchmark by its name on the command line."""


CASES: dict[str, Sequence[str]] = {}
"""The cases that can be run alone, for every benchmark; () for one that always runs whole."""


def benchmark(name: str, *, cases: Iterable[str] = ()) -> Callable[[Benchmark], Benchmark]:
    """Register a benchmark under a name, with the cases that `--only` may choose."""

    def register(function: Benchmark) -> Benchmark:
        BENCHMARKS[name] = function
        CASES[name] = tuple(cases)
        return function

    return register


def report_head(name: str, command: str) -> str:
    """What stands above the tables of a report: the command, the day, the processor."""
    return f"# Benchmark: {name}\n\n`{command}`\n\n{date.today()}, {processor()}, torch {torch.__version__}\n"


def took(began: float) -> str:
    """What a report ends with, and `how_long` reads, of a benchmark that began at `began` (time.monotonic)."""
    return f"All of it took {(time.monotonic() - began) / 60:.1f} minutes."


def how_long(name: str, command: str, reports: Path = Path(__file__).parent / "results") -> str:
    """How long a benchmark took when a report was made: one of the same command, else another, with its command."""
    found = []
    for path in sorted(reports.glob("*.md"), reverse=True):
        text = path.read_text(encoding="utf-8")
        minutes = re.search(r"^All of it took (\d.*)\.$", text, re.MULTILINE)
        if minutes and text.startswith(f"# Benchmark: {name}\n"):
            made_by = re.search(r"^`(.*)`$", text, re.MULTILINE)
            found.append((path.name, minutes[1], made_by[1] if made_by else "another command"))
    if not found:
        return f"no report of {name} says how long it takes; tables come as they are ready, and --smoke only tries it"
    same = [one for one in found if _asked(one[2]) == _asked(command)]
    report, minutes, made_by = (same or found)[0]
    by = "" if same else f" by `{made_by}`"
    return f"{name} took {minutes} when {report} was made{by}; tables come as they are ready"


def _asked(command: str) -> str:
    """A command without the file that it writes."""
    return re.sub(r" --out \S+", "", command)


def processor() -> str:
    """Name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def kernels_note() -> str:
    """Which of this library's CPU kernels were measured."""
    return f"C++ kernels: {kernels_in_use()['cpu']['isa'] or 'none, plain torch'}."


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
