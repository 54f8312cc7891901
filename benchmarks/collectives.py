"""Collectives of bf16 tensors over real slow links: gloo, the same exchange without a codec, lossless, and chosen.

Seconds include encoding and decoding. Sizes are those of the whole tensor: what an all-gather gives, what the others
take. Weights are drawn from a normal distribution, gradients from Student's t with 4 degrees of freedom, whose tails
are as heavy as those of real gradients. What an all-gather and an all-to-all carry in training is of the first kind,
what reductions carry of the second; goals are stated for the first, so the reductions are timed with both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.collective_calls import call, normal
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, format_size, in_lab, networks, time_all

_SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
_GRADIENT_SIZES = (1 << 22, 1 << 24)
# A case runs again until it has taken about this long.
_SECONDS_PER_CASE = 0.5
_KINDS = ("gloo", "raw", "tiered", "auto")
# Two nodes of two hosts, without a limit inside: the same on one level and on two.
_NODE_KINDS = ("gloo", "raw", "tiered", "raw, two levels", "tiered, two levels")
_NODE_SIZES = (1 << 20, 1 << 24)
_CASES = (
    ("all_gather", "weights"),
    ("all_to_all", "weights"),
    ("reduce_scatter", "weights"),
    ("reduce_scatter", "gradients"),
    ("all_reduce", "weights"),
    ("all_reduce", "gradients"),
)


@benchmark("collectives")
@in_lab("Collectives over slow links")
def collectives(options: Options) -> list[Table]:
    """All-gather, all-to-all, reduce-scatter and all-reduce of 64 KB to 64 MB (at most 4 x `elements` bytes)."""
    sizes = options.sizes(_SIZES, smoke=(1 << 16,))
    tables = []
    for network in networks(options, (2, 4), (100e6, 1e9, 2.5e9)):
        tables.append(_table(network, network.run(__name__, {"sizes": sizes})))
        if network.num_hosts == 4:
            nodes = Network(4, network.rate, options, num_nodes=2)
            task = {"sizes": [size for size in sizes if size in _NODE_SIZES], "nodes": 2}
            tables.append(_node_table(nodes, nodes.run(__name__, task)))
    return tables


def _table(network: Network, found: dict[str, Any]) -> Table:
    def ideal(row: dict[str, Any]) -> float:
        return _sent_nbytes(row["operation"], row["nbytes"], network.num_hosts) * 8 / found["measured"]

    def milliseconds(kind: str) -> tuple[str, Callable[[dict[str, Any]], str]]:
        return f"{kind} ms", lambda row: f"{row['seconds'][kind] * 1e3:.1f}"

    def gain(slow: str, fast: str) -> tuple[str, Callable[[dict[str, Any]], str]]:
        return f"{slow} / {fast}", lambda row: f"{row['seconds'][slow] / row['seconds'][fast]:.2f}x"

    def used(row: dict[str, Any]) -> float:
        return row["seconds"]["raw"] / row["seconds"]["tiered"] / row["ratio"]

    return Table.of(
        network.where(found),
        found["rows"],
        [
            ("operation, data", lambda row: f"{row['operation']}, {row['data']}"),
            ("tensor", lambda row: format_size(row["nbytes"])),
            ("raw bytes at that rate, ms", lambda row: f"{ideal(row) * 1e3:.1f}"),
            *map(milliseconds, _KINDS),
            *(gain(slow, fast) for fast in ("tiered", "auto") for slow in ("gloo", "raw")),
            ("auto took", lambda row: row["chosen"]),
            ("ratio of bytes", lambda row: f"{row['ratio']:.3f}x"),
            ("of that ratio", lambda row: f"{used(row):.0%}"),
            ("interface / audit", lambda row: f"{row['interface']:.3f}"),
        ],
        "gloo is torch's own collective, raw ours with `codec=Raw()`, tiered ours with `Lossless('tiered')`. The ratio"
        " is that of all bytes which tiered sends, as the audit counts them; `of that ratio` is raw / tiered over it,"
        " 100 % where all of it became time. The interface counts headers and answers too. After a pause the link lets"
        " through at once what it carries in 1 ms: messages of that size are faster than the link.",
    )


def _node_table(network: Network, found: dict[str, Any]) -> Table:
    *others, best = _NODE_KINDS
    return Table.of(
        f"2 nodes of 2 hosts, {network.rate_text} each way between them ({found['measured'] / 1e6:.0f}),"
        " no limit inside",
        found["rows"],
        [
            ("operation, data", lambda row: f"{row['operation']}, {row['data']}"),
            ("tensor", lambda row: format_size(row["nbytes"])),
            *((f"{kind}, ms", lambda row, kind=kind: f"{row['seconds'][kind] * 1e3:.1f}") for kind in _NODE_KINDS),
            *(
                (f"{kind} / {best}", lambda row, kind=kind: f"{row['seconds'][kind] / row['seconds'][best]:.2f}x")
                for kind in others
            ),
        ],
    )


def _is_timed(operation: str, data: str, nbytes: int) -> bool:
    """Reductions are timed over all sizes with one kind of data only: a run should not take more than ten minutes."""
    return not (operation in ("reduce_scatter", "all_reduce") and data == "gradients") or nbytes in _GRADIENT_SIZES


def _sent_nbytes(operation: str, nbytes: int, num_hosts: int) -> float:
    """What each rank sends at least."""
    return (2 if operation == "all_reduce" else 1) * nbytes * (num_hosts - 1) / num_hosts


# --- what each rank does ---


def _heavy_tailed(numel: int) -> Tensor:
    """bf16 [numel], different on each rank: a normal number over the root of a chi-square one over 4."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(numel, generator=generator)
    squares = sum(torch.randn(numel, generator=generator).square_() for _ in range(4))
    return (1e-3 * x / (squares / 4).sqrt_()).bfloat16()


def _ways(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of each kind of call."""
    from torch.distributed.device_mesh import init_device_mesh

    from laconic.collectives import Lossless, Raw, TwoLevel

    codecs: dict[str, Any] = {"raw": Raw(), "tiered": Lossless("tiered")}
    ways = {"gloo": {}} | {kind: {"codec": codec} for kind, codec in codecs.items()}
    if "nodes" not in task:
        return ways | {"auto": {"codec": "auto"}}
    shape = task["nodes"], dist.get_world_size() // task["nodes"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cluster", "node"))
    levels = TwoLevel(node=mesh["node"].get_group(), cluster=mesh["cluster"].get_group())
    return ways | {f"{kind}, two levels": {"codec": codec, "group": levels} for kind, codec in codecs.items()}


def _row(
    operation: str, data: str, nbytes: int, task: dict[str, Any], ways: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    from laconic.collectives import audit

    world = dist.get_world_size()
    numel = nbytes // 2 // world * (1 if operation == "all_gather" else world)
    x = normal(numel) if data == "weights" else _heavy_tailed(numel)
    counted: dict[str, audit.Snapshot] = {}

    def audited(kind: str, case: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            before = audit.snapshot()
            case()
            counted[kind] = audit.snapshot() - before

        return run

    cases = {kind: audited(kind, call(operation, x, **way)) for kind, way in ways.items()}
    estimate = _sent_nbytes(operation, nbytes, world) * 8 / task["rate"]
    rounds = max(1, min(task["rounds"], int(_SECONDS_PER_CASE / estimate)))
    timed = time_all(cases, rounds, warm_up_rounds=1 if estimate < _SECONDS_PER_CASE else 0)
    return {
        "operation": operation,
        "data": data,
        "nbytes": nbytes,
        "seconds": {kind: timed[kind].seconds for kind in timed},
        "ratio": counted["tiered"].ratio,
        "interface": timed["tiered"].interface_nbytes / counted["tiered"].sent_nbytes,
        "chosen": "+".join(sorted({entry.codec for entry in counted["auto"].entries})) if "auto" in counted else "",
    }


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    ways = _ways(task)
    return {
        "rows": [_row(*case, size, task, ways) for case in _CASES for size in task["sizes"] if _is_timed(*case, size)]
    }


if __name__ == "__main__":
    as_rank(measure)
