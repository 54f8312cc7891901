"""Every collective of 4 B to 64 MB over gloo, and with `codec="auto"` by the functions and by the process group.

What is timed is a block of calls; blocks of the cases take turns in a changing order, and what counts is the median of
each round's quotients. Two groups have connections and threads of their own, and gloo is timed on both: the functions
call the one group, and the process group is made of the other, so each is compared with gloo over the connections that
carry it. By what gloo differs from itself groups differ. The functions are also called with every message coded:
"auto" should be within 3 % of the better of that and gloo, which is raw. Sizes are those of a rank's input, bf16 from a
normal distribution. A send is answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.kit.collective_calls import call, normal
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, format_size, in_lab, networks, slowest_rank

_SIZES = (4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
OPERATIONS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("broadcast", "gather", "scatter", "send and receive"),
)
_KINDS = ("gloo", "functions", "coded", "gloo of the group", "group")
_AGAINST = {"functions": "gloo", "group": "gloo of the group"}
"""By kind what carries the same bytes raw over the same connections."""
_SECONDS_PER_ROW, _SECONDS_PER_BLOCK = 2.4, 0.004
_MIN_ROUNDS, _MAX_ROUNDS = 3, 101
_WARM_UPS = 8
"""Calls of each case that do not count: rates are measured, first buffers made, raw and coded compared."""
_LEAST = 0.97


@benchmark("auto", cases=OPERATIONS)
@in_lab("auto")
def auto(options: Options) -> list[Table]:
    """What "auto" costs where it chooses raw and gains elsewhere, at most 4 x `elements` bytes."""
    task = {"sizes": options.sizes(_SIZES, smoke=(4, 1 << 16)), "operations": options.only or OPERATIONS}
    return [_table(network, network.run(__name__, task)) for network in networks(options, (2,), (1e9,))]


def _table(network: Network, result: dict[str, Any]) -> Table:
    found, made = result["rows"], result["made"]
    gains = [(row["gain"][kind], row, kind) for row in found for kind in _AGAINST]
    worst, row, kind = min(gains, key=lambda gain: gain[0])
    noise = [row["noise"] for row in found]
    below = sum(gain < _LEAST for gain, _, _ in gains)
    return Table.of(
        f"auto, {network.num_hosts} hosts, {network.rate_text} each way",
        found,
        [
            ("operation", lambda row: row["operation"]),
            ("tensor", lambda row: format_size(row["nbytes"])),
            *((f"{kind}, ms", lambda row, kind=kind: f"{row['seconds'][kind] * 1e3:.3f}") for kind in _KINDS),
            *((f"gloo / {kind}", lambda row, kind=kind: f"{row['gain'][kind]:.2f}x") for kind in _AGAINST),
            ("best / functions", lambda row: f"{row['best']:.2f}x"),
            ("gloo / gloo", lambda row: f"{row['noise']:.2f}x"),
            ("the functions took", lambda row: row["took"]),
        ],
        f"Least: {worst:.2f}x ({row['operation']}, {row['nbytes']} bytes, {kind}). {below} of {len(gains)} are below"
        f" {_LEAST}x; one gloo group against another is between {min(noise):.2f}x and {max(noise):.2f}x, and"
        f" {sum(gain < _LEAST for gain in noise)} of {len(noise)} are. To make a group took gloo"
        f" {made['gloo'] * 1e3:.0f} ms, laconic {made['first'] * 1e3:.0f} ms for the first and"
        f" {made['second'] * 1e3:.0f} ms for the second.",
    )


# --- what each rank does ---


def _block(num_calls: int) -> Callable[[Case], Callable[[], float]]:
    """The clock of one of several calls, after a few that do not count.

    Each group has connections of its own, and what the case before has used is faster by a tenth of a millisecond. And
    the link lets a burst through after a shorter message, by which 1 MB is faster by a millisecond.
    """

    def clock(case: Case) -> Callable[[], float]:
        for _ in range(max(1, min(num_calls - 1, _WARM_UPS))):
            case()
        whole = slowest_rank(lambda: [case() for _ in range(num_calls)])
        return lambda: whole() / num_calls

    return clock


def _row(operation: str, nbytes: int, groups: dict[str, Any], smoke: bool) -> dict[str, Any]:
    from laconic.collectives import Lossless, audit

    x = normal(max(dist.get_world_size(), nbytes // 2))
    cases = {
        "gloo": call(operation, x, group=groups["gloo"]),
        "functions": call(operation, x, codec="auto", group=groups["gloo"]),
        "coded": call(operation, x, codec=Lossless(), group=groups["gloo"]),
        "gloo of the group": call(operation, x, group=groups["second"]._backend_group),
        "group": call(operation, x, group=groups["second"]),
    }
    warm_ups = _WARM_UPS if nbytes < 1 << 24 else _WARM_UPS // 2
    before, entries = audit.snapshot(), ()
    for kind, case in cases.items():
        once = [slowest_rank(case)() for _ in range(warm_ups)][-1]
        if kind == "functions":
            entries = (audit.snapshot() - before).entries
    num_calls = max(1, min(50, int(_SECONDS_PER_BLOCK / once)))
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_SECONDS_PER_ROW / (len(cases) * once * num_calls))))
    seconds = seconds_of(cases, 2 if smoke else rounds, warm_up_rounds=0, shuffle=True, clock=_block(num_calls))
    return {
        "operation": operation,
        "nbytes": nbytes,
        "seconds": seconds,
        "gain": {kind: seconds[base].over(seconds[kind]) for kind, base in _AGAINST.items()},
        "best": min(seconds[kind].over(seconds["functions"]) for kind in ("gloo", "coded")),
        "noise": seconds["gloo"].over(seconds["gloo of the group"]),
        "took": "+".join(sorted({entry.codec for entry in entries})),
    }


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; the default group is gloo's."""
    import laconic.collectives.process_group  # noqa: F401  (what it takes to import is not what it takes to make one)

    groups, made = {}, {}
    backends = {"gloo": "gloo", "first": "laconic:gloo", "second": "laconic:gloo"}
    for name, backend in backends.items():
        dist.barrier()
        started = time.perf_counter()
        groups[name] = dist.new_group(backend=backend)
        made[name] = time.perf_counter() - started
    rows = [_row(operation, size, groups, task["smoke"]) for operation in task["operations"] for size in task["sizes"]]
    return {"rows": rows, "made": made}


if __name__ == "__main__":
    as_rank(measure)
