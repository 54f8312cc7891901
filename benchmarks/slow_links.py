"""What benchmarks over slow links share: networks, the ranks in them, and timing what all ranks do together.

Hosts are network namespaces on this machine (netlab), a process and a thread each unless a benchmark says otherwise,
and gloo between them. The link is calibrated by one TCP transfer before anything is timed. Seconds are the slowest
rank's, from a barrier to the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit import timing
from benchmarks.kit.timing import Case, Timing
from benchmarks.registry import Benchmark, Options, Table, Text
from netlab import Lab, finish, why_not

_LONGEST_SECONDS = 3600


def in_lab(title: str) -> Callable[[Benchmark], Benchmark]:
    """For a benchmark that needs a lab: where none can be built, its only table says why."""

    def decorate(function: Benchmark) -> Benchmark:
        @wraps(function)
        def run(options: Options) -> Iterable[Table | Text]:
            reason = why_not()
            return function(options) if reason is None else [Table(title, ["not measured"], [[reason]])]

        return run

    return decorate


@dataclass(frozen=True)
class Network:
    """Hosts and their links, which are slow between nodes if there are nodes; and how a benchmark runs in them."""

    num_hosts: int
    rate: float
    options: Options
    num_nodes: int | None = None
    ranks_per_host: int = 1

    @property
    def rate_text(self) -> str:
        """100 Mbit/s."""
        return f"{self.rate / 1e6:g} Mbit/s"

    def where(self, found: Mapping[str, Any]) -> str:
        """The network in a title, with what was measured in it."""
        calibrated = f"(one TCP connection gets {found['measured'] / 1e6:.0f})"
        return f"{self.num_hosts} hosts, {self.rate_text} each way {calibrated}"

    def run(self, module: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """What rank 0 returned from `python -m module TASK`; "measured" is added, what one connection gets in bit/s."""
        with Lab(self.num_hosts, self.rate, num_nodes=self.num_nodes) as lab:
            other_node = 1 if self.num_nodes is None else self.num_hosts // self.num_nodes
            calibration_seconds = 0.2 if self.options.smoke else 1
            measured = lab.measured_bits_per_second(int(self.rate / 8 * calibration_seconds), sender=other_node)
            task = {"rate": self.rate, "rounds": self.options.rounds, "smoke": self.options.smoke} | dict(task)
            found = run_ranks(lab, module, task, self.options.profile, self.ranks_per_host)
        return found | {"measured": measured}


def networks(options: Options, hosts: Sequence[int] | int, rates: Sequence[float], **how: Any) -> Iterator[Network]:
    """The networks that the options name, else those given; hosts that are one number stay. A tiny case has one."""
    numbers = [hosts] if isinstance(hosts, int) else options.num_hosts or hosts[: 1 if options.smoke else None]
    for num_hosts in numbers:
        for rate in options.rates or ((1e9,) if options.smoke else rates):
            yield Network(num_hosts, rate, options, **how)


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
    timing.protocols += [timing.Protocol(**protocol) for protocol in result.pop("protocols")]
    return result


def _run(lab: Lab, arguments: list[str], environment: dict[str, str], ranks_per_host: int) -> str:
    programs = lab.start_ranks([sys.executable, *arguments], environment, ranks_per_host=ranks_per_host)
    endings = finish(programs, _LONGEST_SECONDS)
    for rank, ending in enumerate(endings):
        if ending.code:
            raise RuntimeError(f"rank {rank} ended with {ending.code}:\n{ending.err}")
    return endings[0].out


def format_size(nbytes: int) -> str:
    """4 B, 64 KB, 4 MB."""
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


# --- inside of a rank ---


def as_rank(measure: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Be a rank of a lab: take the task, measure, and hand the result over."""
    leave(measure(join()))


def join() -> dict[str, Any]:
    """Become a rank with one thread; returns the task."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task: dict[str, Any] = json.loads(sys.argv[1])
    return task


def leave(result: Mapping[str, Any]) -> None:
    """Rank 0 prints the result; then all end."""
    if dist.get_rank() == 0:
        protocols = [asdict(protocol) for protocol in timing.protocols]
        print(json.dumps(dict(result) | {"protocols": protocols}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter's


def slowest_rank(case: Case) -> Callable[[], float]:
    """The clock of a lab: seconds from a barrier to the end of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    case()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item


@dataclass(frozen=True)
class Timed:
    """One case over all rounds that count."""

    seconds: Timing
    """Of the slowest rank."""
    interface_nbytes: float
    """Median of what left this host, headers of all layers included."""
    payload_nbytes: float
    """Median of that without the headers of packets, and so without acknowledgements."""
    cpu_seconds: float
    """Median of the processor time of all ranks together, their threads and the kernel's work for them included."""


_HEADERS_NBYTES = 66
"""Ethernet, IPv4 and TCP with time stamps. A packet that the interface cuts later counts once, as in its counters."""


def time_all(cases: Mapping[str, Case], rounds: int, warm_up_rounds: int = 1) -> dict[str, Timed]:
    """Time cases that all ranks run together, with what leaves this host and what the processors work meanwhile."""

    def read(case: Case) -> tuple[float, int, int, float]:
        dist.barrier()
        nbytes, packets = sent()  # the barrier of the clock: other ranks of this host have not begun when it is read
        work = torch.zeros((), dtype=torch.float64)

        def working() -> None:
            before = time.process_time()
            case()
            work.fill_(time.process_time() - before)

        seconds = slowest_rank(working)  # when it returns, everybody has received everything
        nbytes_after, packets_after = sent()
        dist.all_reduce(work)
        return seconds(), nbytes_after - nbytes, packets_after - packets, work.item()

    timed = {}
    for name, found in timing.in_rounds(cases, rounds, read, warm_up_rounds=warm_up_rounds).items():
        seconds, nbytes, packets, work = zip(*found, strict=True)
        payload = [size - count * _HEADERS_NBYTES for size, count in zip(nbytes, packets, strict=True)]
        timed[name] = Timed(Timing(seconds), median(nbytes), median(payload), median(work))
    timing.note({name: one.seconds for name, one in timed.items()}, warm_up_rounds, 0)
    return timed


def sent() -> tuple[int, int]:
    """Bytes and packets that have left this host so far."""
    counters = Path("/sys/class/net/eth0/statistics")
    nbytes, packets = (int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return nbytes, packets
