"""Where a part runs: on a CUDA device at full size, or on the CPU, tiny, with interpreted kernels."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import torch

import laconic.ops.triton
from benchmarks.gpu_day.record import Report
from benchmarks.kit.timing import Timing, in_rounds
from benchmarks.registry import Table

T = TypeVar("T")
_FATAL = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""Words of CUDA's errors, which Triton hands on as a RuntimeError."""
_HEAD_START_CYCLES = 20_000_000
"""About 10 ms of a device: more than the host takes to issue the work of a layer."""
_CACHE_NBYTES = 1 << 28
"""More than the second-level cache of any device so far."""


def is_fatal(error: BaseException) -> bool:
    """Whether a device fault ended all further work of this process; running out of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _FATAL)


def kernel_of(op: str) -> Callable[..., Any]:
    """The function that launches an op's Triton kernels, whatever the device; takes the op's arguments in order."""
    for module in pkgutil.iter_modules(laconic.ops.triton.__path__):
        found = getattr(_triton(module.name), op, None)
        if found is not None and found.__module__ == f"laconic.ops.triton.{module.name}":
            return found
    raise KeyError(f"no Triton kernel of {op}")


def _triton(name: str) -> ModuleType:
    return importlib.import_module(f"laconic.ops.triton.{name}")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`, computed on the CPU."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


@dataclass(frozen=True)
class Setting:
    """What a part is told."""

    rehearses: bool
    report: Report = field(default_factory=lambda: Report(is_fatal=is_fatal))

    @property
    def device(self) -> str:
        """ "cuda", or "cpu" in a rehearsal."""
        return "cpu" if self.rehearses else "cuda"

    def sized(self, full: T, tiny: T) -> T:
        """The size for a device, or that for a rehearsal."""
        return tiny if self.rehearses else full

    def table(self, table: Table) -> None:
        """Report a table; a later one with the same title takes its place."""
        self.report.table(table.render(), table.title)

    @cached_property
    def _cache(self) -> torch.Tensor:
        return torch.empty(self.sized(_CACHE_NBYTES, 1), dtype=torch.uint8, device=self.device)

    def device_seconds(self, call: Callable[[], object], before: Callable[[], object] | None = None) -> Timing:
        """Seconds on the device's clock, with cold caches and a host that is ahead; on the CPU those on the wall.

        Args:
            call: what is timed.
            before: called before each time, and not timed.
        """

        def prepare(_: str) -> None:
            if before is not None:
                before()
            self._cache.zero_()

        rounds, warm_ups = self.sized((20, 3), (1, 0))
        readings = in_rounds({"": call}, rounds, self._events, warm_up_rounds=warm_ups, before=prepare)
        return Timing([read() for read in readings[""]])

    def host_seconds(self, call: Callable[[], object], before: Callable[[], object] | None = None) -> Timing:
        """Seconds until the host has issued all work; on the CPU until the work is done. Arguments as above."""

        def read(case: Callable[[], object]) -> float:
            self.wait()
            started = time.perf_counter()
            case()
            return time.perf_counter() - started

        rounds, warm_ups = self.sized((20, 3), (1, 0))
        prepare = None if before is None else lambda _: before()
        return Timing(in_rounds({"": call}, rounds, read, warm_up_rounds=warm_ups, before=prepare)[""])

    def seconds_once(self, call: Callable[[], object]) -> float:
        """Seconds on the wall of one call and of all work that it gave the device."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def _events(self, case: Callable[[], object]) -> Callable[[], float]:
        if self.rehearses:
            started_at = time.perf_counter()
            case()
            taken = time.perf_counter() - started_at
            return lambda: taken
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)  # the host issues all launches meanwhile
        started.record()
        case()
        ended.record()

        def seconds() -> float:
            ended.synchronize()
            return started.elapsed_time(ended) / 1e3

        return seconds

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if not self.rehearses:
            torch.cuda.synchronize()

    def peak_nbytes(self, call: Callable[[], object]) -> int:
        """Most bytes that the allocator held while `call` ran, those before it included; 0 in a rehearsal."""
        if self.rehearses:
            call()
            return 0
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def free(self) -> None:
        """Give back the memory of what is no longer referenced, as after a case that ran out of it."""
        gc.collect()
        if not self.rehearses:
            torch.cuda.empty_cache()
