"""How long to wait on this machine: timeouts of tests, stretched by how busy it is.

A timeout of a test is there to end a hang, and on a busy machine every process is as much slower as others take of its
processors. `patient(seconds)` is what a test waits at most where `seconds` do on a quiet machine; these should be at
least 20 times what the test takes there. Timeouts that are what a test is about (of a process group that has to notice
a silent peer) are not stretched.
"""

from __future__ import annotations

import os
import time

__all__ = ["measure", "patient", "slowness"]

_VARIABLE = "LACONIC_TESTS_SLOWNESS"
"""Holds what the first process has measured, for all that it starts."""
_WORK_SECONDS = 0.1
_MOST = 30.0
"""Beyond that a hang would take hours to be seen."""


def measure() -> float:
    """Measure how many seconds pass for one of this process's own, and keep it for `slowness`; at least 1."""
    if _VARIABLE not in os.environ:
        began, used = time.perf_counter(), time.process_time()
        while time.process_time() - used < _WORK_SECONDS:
            sum(range(1000))
        os.environ[_VARIABLE] = f"{max(1.0, (time.perf_counter() - began) / _WORK_SECONDS):.2f}"
    return float(os.environ[_VARIABLE])


def slowness() -> float:
    """How much slower than quiet this machine is: as measured at the start, or by its load now if that is more."""
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(_MOST, max(measure(), waiting))


def patient(seconds: float) -> float:
    """The timeout for what is given `seconds` on a quiet machine."""
    return seconds * slowness()
