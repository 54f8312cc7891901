"""What benchmarks over slow links share: starting the ranks of a lab, and timing what all of them do together."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from laconic.testing.netlab import Lab, finish

__all__ = ["Timed", "format_size", "join", "leave", "run_ranks", "seconds_of_all", "time_all"]

_LONGEST_SECONDS = 3600


def run_ranks(
    lab: Lab, module: str, task: Mapping[str, Any], profile: bool = False, ranks_per_host: int = 1
) -> dict[str, Any]:
    """Run `python -m module TASK` on every host of the lab and return what rank 0 printed last, as JSON.

    Choices rest on what `laconic profile` measures in the lab first, if so asked, else on what they measure themselves;
    never on a file that this machine has.

    Raises RuntimeError with its error output when a rank fails.
    """
    with TemporaryDirectory() as folder:
        environment = {"XDG_CACHE_HOME": folder}
        if profile:
            environment["LACONIC_WIRE_RATES"] = f"{folder}/wire_rates.json"
            profiling = ["-m", "laconic", "profile", "--out", environment["LACONIC_WIRE_RATES"]]
            _run(lab, profiling, environment, ranks_per_host)
        out = _run(lab, ["-m", module, json.dumps(task)], environment, ranks_per_host)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _run(lab: Lab, arguments: list[str], environment: dict[str, str], ranks_per_host: int) -> str:
    programs = lab.start_ranks([sys.executable, *arguments], environment, ranks_per_host=ranks_per_host)
    endings = finish(programs, _LONGEST_SECONDS)
    for rank, ending in enumerate(endings):
        if ending.code:
            raise RuntimeError(f"rank {rank} ended with {ending.code}:\n{ending.err}")
    return endings[0].out


def format_size(nbytes: int) -> str:
    """64 KB, 4 MB."""
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


# --- inside of a rank ---


def join() -> dict[str, Any]:
    """Become a rank with one thread; returns the task."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task: dict[str, Any] = json.loads(sys.argv[1])
    return task


def leave(result: Mapping[str, Any]) -> None:
    """Rank 0 prints the result; then all end."""
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter's


@dataclass(frozen=True)
class Timed:
    """One case over all rounds that count."""

    seconds: float
    """Median of the slowest rank's time."""
    interface_nbytes: float
    """Median of what left this host, headers of all layers included."""
    payload_nbytes: float
    """Median of that without the headers of packets, and so without acknowledgements."""
    cpu_seconds: float
    """Median of the processor time of all ranks together, their threads and the kernel's work for them included."""


_HEADERS_NBYTES = 66
"""Ethernet, IPv4 and TCP with time stamps. A packet that the interface cuts later counts once, as in its counters."""


def time_all(cases: Mapping[str, Callable[[], object]], rounds: int, warm_ups: int = 1) -> dict[str, Timed]:
    """Time cases that all ranks run together, from a barrier to the end; they take turns, round after round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, list[tuple[int, int]]] = {name: [] for name in cases}
    worked: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(-warm_ups, rounds):
        for name, case in cases.items():
            dist.barrier()
            before = _sent()
            dist.barrier()  # other ranks of this host have not begun when it is read
            worked_before, started = time.process_time(), time.perf_counter()
            case()
            slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            work = torch.tensor(time.process_time() - worked_before, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # when it is done, everybody has received everything
            after = _sent()
            dist.all_reduce(work)
            if round_number >= 0:
                seconds[name].append(slowest.item())
                nbytes, packets = (now - then for now, then in zip(after, before, strict=True))
                sent[name].append((nbytes, nbytes - packets * _HEADERS_NBYTES))
                worked[name].append(work.item())
    found = {}
    for name in cases:
        nbytes, payload = (median(counts) for counts in zip(*sent[name], strict=True))
        found[name] = Timed(median(seconds[name]), nbytes, payload, median(worked[name]))
    return found


def seconds_of_all(cases: Mapping[str, Callable[[], object]], rounds: int, warm_ups: int = 1) -> dict[str, float]:
    """The seconds of `time_all`."""
    return {name: timed.seconds for name, timed in time_all(cases, rounds, warm_ups).items()}


def _sent() -> tuple[int, int]:
    """Bytes and packets that have left this host so far."""
    counters = Path("/sys/class/net/eth0/statistics")
    nbytes, packets = (int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return nbytes, packets
