"""The parts of the day, in order of worth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _module_command(name: str, rehearses: bool) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_day", name, *(["--rehearse"] if rehearses else [])]


@dataclass(frozen=True)
class DayPart:
    """One process of the day."""

    name: str
    title: str
    seconds: float
    """It is killed after that; a rehearsal allows ten times as much, since it interprets kernels."""
    call: int
    """1 or 2: in which of the two calls it runs."""
    command: Callable[[str, bool], Sequence[str]] = _module_command
    """From its name and whether this is a rehearsal."""


PARTS = (
    DayPart("bits", "Doctor, and the bits of every op", 170, 1),
    DayPart("tests", "Tests marked gpu, and those of ops and activations on the device", 180, 1),
    DayPart("layer", "A Llama 8B layer: device and host time", 130, 1),
    DayPart("kernels", "Every kernel as a share of copy bandwidth", 60, 1),
    DayPart("training", "Training steps of a 1B and a 3B Llama", 160, 2),
    DayPart("exchange", "Lossless codec, and two processes on one device", 110, 2),
    DayPart("rooms", "Experts, offload, CUDA graphs, inference engine", 120, 2),
    DayPart("sanitizer", "compute-sanitizer and ncu", 150, 2),
)
"""The limits of the parts of each call add up to nine minutes at most."""
