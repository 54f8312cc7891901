"""Every collective of 4 B to 64 MB over gloo, and with `codec="auto"` by the functions and by the process group.

Hosts are network namespaces on this machine, one process and one thread each. What is timed is a block of calls, from a
barrier to the last result on the slowest rank; blocks of the cases take turns in a changing order, and what counts is
the median of each round's quotients, so that what disturbs a round disturbs all of its cases. gloo is timed twice: what
it differs from itself is noise. Sizes are those of a rank's input, bf16 from a normal distribution. A send is answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import format_size, join, leave, run_ranks
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS, _RATES = (2,), (1e9,)
_SIZES = (4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_SMOKE = 1 << 12
_SMOKE_SIZES = (4, 1 << 16)
_OPERATIONS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("broadcast", "gather", "scatter", "send and receive"),
)
_KINDS = ("gloo", "functions", "group", "gloo again")
_SECONDS_PER_ROW, _SECONDS_PER_BLOCK = 2.4, 0.004
_MIN_ROUNDS, _MAX_ROUNDS = 3, 101
_WARM_UPS = 8
"""Calls of each case that do not count: rates are measured, first buffers made, raw and coded compared."""
_LEAST = 0.97


@benchmark("auto")
def auto(options: Options) -> list[Table]:
    """What "auto" costs where it chooses raw and gains elsewhere, at most 4 x `elements` bytes."""
    reason = why_not()
    if reason is not None:
        return [Table("auto", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    sizes = _SMOKE_SIZES if smoke else [size for size in _SIZES if size <= 4 * options.elements]
    tables = []
    for num_hosts in options.num_hosts or _NUM_HOSTS:
        for rate in options.rates or _RATES:
            with Lab(num_hosts, rate) as lab:
                task = {"sizes": sizes, "smoke": smoke}
                tables.append(_table(num_hosts, rate, run_ranks(lab, "benchmarks.auto", task, options.profile)))
    return tables


def _table(num_hosts: int, rate: float, result: dict[str, Any]) -> Table:
    found = result["rows"]
    rows = [
        [
            row["operation"],
            format_size(row["nbytes"]) if row["nbytes"] >= 1024 else f"{row['nbytes']} B",
            *(f"{row['seconds'][kind] * 1e3:.3f}" for kind in _KINDS[:3]),
            *(f"{row['gain'][kind]:.2f}x" for kind in _KINDS[1:]),
            row["took"],
        ]
        for row in found
    ]
    gains = [(row["gain"][kind], row, kind) for row in found for kind in ("functions", "group")]
    worst, row, kind = min(gains, key=lambda gain: gain[0])
    noise = [row["gain"]["gloo again"] for row in found]
    below = sum(gain < _LEAST for gain, _, _ in gains)
    note = (
        f"Least: {worst:.2f}x ({row['operation']}, {row['nbytes']} bytes, {kind}). {below} of {len(gains)} are below"
        f" {_LEAST}x; gloo against itself is between {min(noise):.2f}x and {max(noise):.2f}x, and"
        f" {sum(gain < _LEAST for gain in noise)} of {len(noise)} are. To make a group took gloo"
        f" {result['made']['gloo'] * 1e3:.0f} ms, laconic {result['made']['first'] * 1e3:.0f} ms for the first and"
        f" {result['made']['second'] * 1e3:.0f} ms for the second."
    )
    header = ["operation", "tensor", *(f"{kind}, ms" for kind in _KINDS[:3])]
    header += [f"gloo / {kind}" for kind in _KINDS[1:]]
    return Table(
        f"auto, {num_hosts} hosts, {rate / 1e6:g} Mbit/s each way", [*header, "the functions took"], rows, note
    )


# --- what each rank does ---


def _native(operation: str, x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """A call through torch.distributed."""
    rank, world, n = dist.get_rank(), dist.get_world_size(), max(1, x.numel() // dist.get_world_size())
    whole, part = x.new_empty(world * x.numel()), x.new_empty(n)
    rows, out = x.repeat(world)[: world * n], torch.empty_like(x)
    first = rank == 0
    if operation == "send and receive":

        def answer() -> None:
            if first:
                dist.send(x, 1, group=group)
                dist.recv(out, 1, group=group)
            elif rank == 1:
                dist.recv(out, 0, group=group)
                dist.send(x, 0, group=group)

        return answer
    # torch 2.13 renamed two of them.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gathered, scattered = list(whole.chunk(world)) if first else None, list(rows.chunk(world)) if first else None
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather(whole, x, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, rows, group=group),
        # A sum in place would grow and grow.
        "all_reduce": lambda: dist.all_reduce(out.copy_(x), group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(rows), rows, group=group),
        "broadcast": lambda: dist.broadcast(out.copy_(x), 0, group=group),
        "gather": lambda: dist.gather(x, gathered, 0, group=group),
        "scatter": lambda: dist.scatter(part, scattered, 0, group=group),
    }
    return calls[operation]


def _ours(operation: str, x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """The same through laconic's functions."""
    from laconic import collectives

    rank, world, n = dist.get_rank(), dist.get_world_size(), max(1, x.numel() // dist.get_world_size())
    whole, part = x.new_empty(world * x.numel()), x.new_empty(n)
    rows, out = x.repeat(world)[: world * n], torch.empty_like(x)
    first = rank == 0
    if operation == "send and receive":

        def answer() -> None:
            if first:
                collectives.send(x, 1, group)
                collectives.recv(out, 1, group)
            elif rank == 1:
                collectives.recv(out, 0, group)
                collectives.send(x, 0, group)

        return answer
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: collectives.all_gather(whole, x, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(part, rows, group),
        "all_reduce": lambda: collectives.all_reduce(out.copy_(x), group),
        "all_to_all": lambda: collectives.all_to_all(torch.empty_like(rows), rows, group=group),
        "broadcast": lambda: collectives.broadcast(out.copy_(x), 0, group),
        "gather": lambda: collectives.gather(whole if first else None, x, 0, group),
        "scatter": lambda: collectives.scatter(part, rows if first else None, 0, group),
    }
    return calls[operation]


def _block(case: Callable[[], object], num_calls: int) -> float:
    """Seconds of one of several calls, on the slowest rank, after a few short ones that do not count.

    Each group has connections of its own, and what the case before has used is faster by a tenth of a millisecond.
    """
    for _ in range(min(num_calls - 1, _WARM_UPS)):
        case()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_calls):
        case()
    taken = torch.tensor((time.perf_counter() - started) / num_calls, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _row(operation: str, nbytes: int, groups: dict[str, dist.ProcessGroup], smoke: bool) -> dict[str, Any]:
    from laconic.collectives import audit

    world = dist.get_world_size()
    numel = max(world, nbytes // 2)
    x = (0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))).bfloat16()
    cases = {
        "gloo": _native(operation, x, groups["gloo"]),
        "functions": _ours(operation, x, groups["functions"]),
        "group": _native(operation, x, groups["group"]),
    }
    cases["gloo again"] = cases["gloo"]
    once = 0.0
    before = audit.snapshot()
    for kind, case in cases.items():
        for _ in range(_WARM_UPS if nbytes < 1 << 24 else _WARM_UPS // 2):
            once = max(_block(case, 1), 0.0)
        if kind == "functions":
            entries = (audit.snapshot() - before).entries
    num_calls = max(1, min(50, int(_SECONDS_PER_BLOCK / once)))
    rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_SECONDS_PER_ROW / (len(cases) * once * num_calls))))
    taken: dict[str, list[float]] = {kind: [] for kind in cases}
    for number in range(2 if smoke else rounds):
        kinds = list(cases)
        turn = number % len(kinds)
        for kind in [*kinds[turn:], *kinds[:turn]]:
            taken[kind].append(_block(cases[kind], num_calls))
    gains = {
        kind: median(gloo / ours for gloo, ours in zip(taken["gloo"], taken[kind], strict=True)) for kind in _KINDS[1:]
    }
    return {
        "operation": operation,
        "nbytes": nbytes,
        "seconds": {kind: median(values) for kind, values in taken.items()},
        "gain": gains,
        "took": "+".join(sorted({entry.codec for entry in entries})),
    }


def main() -> None:
    """What one rank measures; the default group is gloo's."""
    import laconic.collectives.process_group  # noqa: F401  (what it takes to import is not what it takes to make one)

    task = join()
    groups, made = {}, {}
    for name, backend in (
        ("functions", "gloo"),
        ("gloo", "gloo"),
        ("first", "laconic:gloo"),
        ("second", "laconic:gloo"),
    ):
        dist.barrier()
        started = time.perf_counter()
        groups[name] = dist.new_group(backend=backend)
        made[name] = time.perf_counter() - started
    groups["group"] = groups["second"]
    rows = [_row(operation, size, groups, task["smoke"]) for operation in _OPERATIONS for size in task["sizes"]]
    leave({"rows": rows, "made": made})


if __name__ == "__main__":
    main()
