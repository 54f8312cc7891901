"""torch.distributed's own calls over gloo and over the process group `laconic`, on real slow links.

Every case calls torch.distributed with a group: gloo's, laconic's with all messages coded, and laconic's as it is by
default. Values are normal, in bf16. A ring is an isend to the next rank and an irecv from the one before.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.kit.collective_calls import call, normal
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, format_size, in_lab, networks, slowest_rank

_SIZES = tuple(1 << power for power in (10, 14, 16, 18, 20, 22, 24))
_SECONDS_PER_CASE = 0.5
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "ring")


@benchmark("process-group")
@in_lab("The process group over slow links")
def process_group(options: Options) -> list[Table]:
    """Collectives and sends of 1 KB to 16 MB (at most 4 x `elements` bytes) through torch.distributed."""
    task = {"sizes": options.sizes(_SIZES, smoke=(1 << 10, 1 << 16))}
    return [_table(network, network.run(__name__, task)) for network in networks(options, (2, 4), (100e6, 1e9, 10e9))]


def _table(network: Network, found: dict[str, Any]) -> Table:
    kinds = ("gloo", "coded", "auto")
    return Table.of(
        f"{network.num_hosts} hosts, {network.rate_text} each way",
        found["rows"],
        [
            ("operation", lambda row: row["operation"]),
            ("tensor", lambda row: format_size(row["nbytes"])),
            *((f"{kind} ms", lambda row, kind=kind: f"{row['seconds'][kind] * 1e3:.2f}") for kind in kinds),
            ("gloo / coded", lambda row: f"{row['seconds']['gloo'] / row['seconds']['coded']:.2f}x"),
            ("gloo / auto", lambda row: f"{row['seconds']['gloo'] / row['seconds']['auto']:.2f}x"),
        ],
        "Sizes are those of a rank's input. Below 16 KB nothing is coded by default.",
    )


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; the default group is gloo's."""
    from laconic.collectives import Lossless, ProcessGroupOptions

    groups = {
        "gloo": None,
        "coded": dist.new_group(backend="laconic:gloo", pg_options=ProcessGroupOptions(Lossless(), min_nbytes=1)),
        "auto": dist.new_group(backend="laconic:gloo"),
    }
    rows = []
    for operation in _OPERATIONS:
        for nbytes in task["sizes"]:
            x = normal(nbytes // 2)
            cases = {kind: call(operation, x, group=group) for kind, group in groups.items()}
            rounds = max(1, min(task["rounds"], int(_SECONDS_PER_CASE / (2 * nbytes * 8 / task["rate"]))))
            # The first large message of a kind measures what it needs to choose.
            seconds = seconds_of(cases, rounds, warm_up_rounds=3, clock=slowest_rank)
            rows.append({"operation": operation, "nbytes": nbytes, "seconds": seconds})
    return {"rows": rows}


if __name__ == "__main__":
    as_rank(measure)
