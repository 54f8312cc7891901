"""torch.distributed's own calls over gloo and over the process group `laconic`, on real slow links.

Hosts are network namespaces on this machine (laconic.testing.netlab), one process and one thread each. Every case calls
torch.distributed with a group: gloo's, laconic's with all messages coded, and laconic's as it is by default. Values are
normal, in bf16. A ring is an isend to the next rank and an irecv from the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import format_size, join, leave, run_ranks, seconds_of_all
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS = (2, 4)
_RATES = (100e6, 1e9, 10e9)
_SIZES = tuple(1 << power for power in (10, 14, 16, 18, 20, 22, 24))
_SMOKE_RATES, _SMOKE_SIZES = (1e9,), (1 << 10, 1 << 16)
_SMOKE = 1 << 12
_SECONDS_PER_CASE = 0.5
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "ring")


@benchmark("process-group")
def process_group(options: Options) -> list[Table]:
    """Collectives and sends of 1 KB to 16 MB (at most 4 x `elements` bytes) through torch.distributed."""
    reason = why_not()
    if reason is not None:
        return [Table("The process group over slow links", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    tables = []
    for num_hosts in options.num_hosts or _NUM_HOSTS[: 1 if smoke else None]:
        for rate in options.rates or (_SMOKE_RATES if smoke else _RATES):
            sizes = _SMOKE_SIZES if smoke else [size for size in _SIZES if size <= 4 * options.elements]
            with Lab(num_hosts, rate) as lab:
                task = {"sizes": sizes, "rounds": options.rounds, "rate": rate}
                result = run_ranks(lab, "benchmarks.process_group", task)
            tables.append(_table(num_hosts, rate, result["rows"]))
    return tables


def _table(num_hosts: int, rate: float, found: list[dict[str, Any]]) -> Table:
    rows = []
    for row in found:
        gloo, coded, auto = (row["seconds"][kind] for kind in ("gloo", "coded", "auto"))
        milliseconds = [f"{seconds * 1e3:.2f}" for seconds in (gloo, coded, auto)]
        rows.append(
            [row["operation"], format_size(row["nbytes"]), *milliseconds, f"{gloo / coded:.2f}x", f"{gloo / auto:.2f}x"]
        )
    return Table(
        f"{num_hosts} hosts, {rate / 1e6:g} Mbit/s each way",
        ["operation", "tensor", "gloo ms", "coded ms", "auto ms", "gloo / coded", "gloo / auto"],
        rows,
        "Sizes are those of a rank's input. Below 16 KB nothing is coded by default.",
    )


# --- what each rank does ---


def _calls(operation: str, numel: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """One call over `group`, to be made again and again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = (0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).bfloat16()
    if operation in ("all_reduce", "broadcast"):
        out = torch.empty_like(x)
        arguments = {} if operation == "all_reduce" else {"src": 0}
        # A sum in place would grow and grow.
        return lambda: getattr(dist, operation)(out.copy_(x), group=group, **arguments)
    if operation == "ring":
        out = torch.empty_like(x)

        def ring() -> None:
            works = [
                dist.isend(x, group_dst=(rank + 1) % world, group=group),
                dist.irecv(out, group_src=(rank - 1) % world, group=group),
            ]
            for work in works:
                assert work is not None
                work.wait()

        return ring
    # torch 2.13 renamed these.
    if operation == "all_gather":
        out = x.new_empty(world * numel)
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    else:
        out = x.new_empty(numel // world)
        function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(function, out, x, group=group)


def main() -> None:
    """What one rank measures; the default group is gloo's."""
    from laconic.collectives import Lossless, ProcessGroupOptions

    task = join()
    groups = {
        "gloo": None,
        "coded": dist.new_group(backend="laconic:gloo", pg_options=ProcessGroupOptions(Lossless(), min_nbytes=1)),
        "auto": dist.new_group(backend="laconic:gloo"),
    }
    rows = []
    for operation in _OPERATIONS:
        for nbytes in task["sizes"]:
            cases = {kind: _calls(operation, nbytes // 2, group) for kind, group in groups.items()}
            rounds = max(1, min(task["rounds"], int(_SECONDS_PER_CASE / (2 * nbytes * 8 / task["rate"]))))
            # The first large message of a kind measures what it needs to choose.
            seconds = seconds_of_all(cases, rounds, warm_ups=3)
            rows.append({"operation": operation, "nbytes": nbytes, "seconds": seconds})
    leave({"rows": rows})


if __name__ == "__main__":
    main()
