"""Memory, file descriptors and threads of processes over time, and the slopes that tell a leak from noise."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = ["KINDS", "Sample", "Sampler", "Slope", "slope_of", "watched"]

KINDS = ("rss_mb", "own_mb", "fds", "threads")
"""What is sampled: megabytes resident, megabytes that are no file's, numbers."""
_SIGMAS = 3.0


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    pid: int
    seconds: float
    rss_mb: float
    own_mb: float
    fds: float
    threads: float


@dataclass(frozen=True)
class Slope:
    """A least-squares line through samples of several processes, each with an intercept of its own."""

    kind: str
    per_minute: float
    error: float
    """Standard error of the slope, per minute."""
    bound: float
    """The largest slope that is no leak, per minute."""
    num_samples: int

    @property
    def leaks(self) -> bool:
        """Whether the slope is above the bound by more than three standard errors."""
        return self.per_minute - _SIGMAS * self.error > self.bound

    def __str__(self) -> str:
        return f"{self.kind} {self.per_minute:+.3g} ± {self.error:.2g} a minute (bound {self.bound:g})"


def slope_of(kind: str, samples: Sequence[Sample], bound: float, warm_up: float = 0.34) -> Slope:
    """The common slope of all processes in `samples`.

    The first `warm_up` of each process's time is left out, in which it imports, allocates its buffers and fills its
    caches. Samples follow each other closely, so what one has of noise the next has, too: the standard error counts
    only as many as the autocorrelation of their residuals, of lag one, leaves independent.
    """
    xs: list[float] = []
    ys: list[float] = []
    series: list[tuple[int, int]] = []
    for pid in sorted({sample.pid for sample in samples}):
        own = [sample for sample in samples if sample.pid == pid]
        start, end = own[0].seconds, own[-1].seconds
        own = [sample for sample in own if sample.seconds >= start + warm_up * (end - start)]
        if len(own) < 4:
            continue
        times, values = [s.seconds / 60 for s in own], [float(getattr(s, kind)) for s in own]
        series.append((len(xs), len(xs) + len(own)))
        xs += [t - sum(times) / len(own) for t in times]
        ys += [v - sum(values) / len(own) for v in values]
    spread = sum(x * x for x in xs)
    if not series or spread == 0:
        raise ValueError(f"no process has enough samples for a slope of {kind}")
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    residuals = [y - slope * x for x, y in zip(xs, ys, strict=True)]
    squares = sum(r * r for r in residuals)
    lagged = sum(residuals[i] * residuals[i + 1] for begin, end in series for i in range(begin, end - 1))
    correlation = min(0.95, max(0.0, lagged / squares)) if squares > 0 else 0.0
    freedom = max(1.0, (len(xs) - len(series)) * (1 - correlation) / (1 + correlation) - 1)
    error = math.sqrt(squares / freedom / spread) * math.sqrt(max(1.0, (len(xs) - len(series) - 1) / len(xs)))
    return Slope(kind, slope, error, bound, len(xs))


def _own_mb(pid: int) -> float:
    """Memory of a process that is no file's: what it shares with others, and when they end, does not move it."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 2**10


@dataclass
class Sampler:
    """Samples processes in a thread until it is stopped.

    Args:
        find: the processes to look at now; those that end are left out from then on.
        every_seconds: between two looks.
    """

    find: Callable[[], Iterable[int]]
    every_seconds: float
    samples: list[Sample] = field(default_factory=list)
    num_looks: int = 0

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        """Take one sample of each process."""
        for pid in self.find():
            with contextlib.suppress(psutil.Error, OSError, KeyError):  # one that has ended has no memory to speak of
                process = psutil.Process(pid)
                with process.oneshot():
                    found = (process.memory_info().rss / 2**20, _own_mb(pid), process.num_fds(), process.num_threads())
                self.samples.append(Sample(pid, time.monotonic() - self._began, *found))
        self.num_looks += 1

    def slopes(self, bounds: dict[str, float]) -> list[Slope]:
        """A slope for each kind in `bounds`."""
        return [slope_of(kind, self.samples, bound) for kind, bound in bounds.items()]

    def _run(self) -> None:
        while not self._done.wait(self.every_seconds):
            self.look()


@contextlib.contextmanager
def watched(find: Callable[[], Iterable[int]], every_seconds: float) -> Iterator[Sampler]:
    """Sample processes while the block runs."""
    sampler = Sampler(find, every_seconds)
    sampler._thread.start()
    try:
        yield sampler
    finally:
        sampler._done.set()
        sampler._thread.join()
