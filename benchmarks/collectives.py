"""Collectives of bf16 tensors over real slow links: gloo, the same exchange without a codec, lossless, and chosen.

Hosts are network namespaces on this machine (laconic.testing.netlab), one process and one thread each. The link is
calibrated by one TCP transfer before anything is timed. Seconds are the slowest rank's, from a barrier to the result,
encoding and decoding included. Sizes are those of the whole tensor: what an all-gather gives, what the others take.

Weights are drawn from a normal distribution, gradients from Student's t with 4 degrees of freedom, whose tails are as
heavy as those of real gradients. What an all-gather and an all-to-all carry in training is of the first kind, what
reductions carry of the second; goals are stated for the first, so the reductions are timed with both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import format_size, join, leave, run_ranks, time_all
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS = (2, 4)
_RATES = (100e6, 1e9, 2.5e9)
_SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
_GRADIENT_SIZES = (1 << 22, 1 << 24)
_SMOKE_RATES, _SMOKE_SIZES = (1e9,), (1 << 16,)
_SMOKE = 1 << 12
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
def collectives(options: Options) -> list[Table]:
    """All-gather, all-to-all, reduce-scatter and all-reduce of 64 KB to 64 MB (at most 4 x `elements` bytes)."""
    reason = why_not()
    if reason is not None:
        return [Table("Collectives over slow links", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    hosts = options.num_hosts or _NUM_HOSTS[: 1 if smoke else None]
    rates = options.rates or (_SMOKE_RATES if smoke else _RATES)
    sizes = _SMOKE_SIZES if smoke else [size for size in _SIZES if size <= 4 * options.elements]
    tables = []
    for num_hosts in hosts:
        for rate in rates:
            with Lab(num_hosts, rate) as lab:
                measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 1)))
                task = {"sizes": sizes, "rounds": options.rounds, "rate": rate}
                result = run_ranks(lab, "benchmarks.collectives", task, options.profile)
            tables.append(_table(num_hosts, rate, measured, result["rows"]))
            if num_hosts == 4:
                with Lab(num_hosts, rate, num_nodes=2) as lab:
                    measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 1)), sender=2)
                    task |= {"sizes": [size for size in sizes if size in _NODE_SIZES], "nodes": 2}
                    result = run_ranks(lab, "benchmarks.collectives", task, options.profile)
                tables.append(_node_table(rate, measured, result["rows"]))
    return tables


def _table(num_hosts: int, rate: float, measured: float, found: list[dict[str, Any]]) -> Table:
    rows = []
    for row in found:
        seconds = row["seconds"]
        ideal = _sent_nbytes(row["operation"], row["nbytes"], num_hosts) * 8 / measured
        rows.append(
            [
                f"{row['operation']}, {row['data']}",
                format_size(row["nbytes"]),
                f"{ideal * 1e3:.1f}",
                *(f"{seconds[kind] * 1e3:.1f}" for kind in _KINDS),
                *(f"{seconds[other] / seconds['tiered']:.2f}x" for other in ("gloo", "raw")),
                *(f"{seconds[other] / seconds['auto']:.2f}x" for other in ("gloo", "raw")),
                row["chosen"],
                f"{row['ratio']:.3f}x",
                f"{seconds['raw'] / seconds['tiered'] / row['ratio']:.0%}",
                f"{row['interface']:.3f}",
            ]
        )
    return Table(
        f"{num_hosts} hosts, {rate / 1e6:g} Mbit/s each way (one TCP connection gets {measured / 1e6:.0f})",
        [
            *("operation, data", "tensor", "raw bytes at that rate, ms", "gloo ms", "raw ms", "tiered ms", "auto ms"),
            *("gloo / tiered", "raw / tiered", "gloo / auto", "raw / auto", "auto took"),
            *("ratio of bytes", "of that ratio", "interface / audit"),
        ],
        rows,
        _NOTE,
    )


def _node_table(rate: float, measured: float, found: list[dict[str, Any]]) -> Table:
    rows = []
    for row in found:
        seconds = [row["seconds"][kind] for kind in _NODE_KINDS]
        cells = [f"{taken * 1e3:.1f}" for taken in seconds] + [f"{taken / seconds[-1]:.2f}x" for taken in seconds[:-1]]
        rows.append([f"{row['operation']}, {row['data']}", format_size(row["nbytes"]), *cells])
    return Table(
        f"2 nodes of 2 hosts, {rate / 1e6:g} Mbit/s each way between them ({measured / 1e6:.0f}), no limit inside",
        [
            *("operation, data", "tensor", *(f"{kind}, ms" for kind in _NODE_KINDS)),
            *(f"{kind} / tiered, two levels" for kind in _NODE_KINDS[:-1]),
        ],
        rows,
    )


_NOTE = (
    "gloo is torch's own collective, raw ours with `codec=Raw()`, tiered ours with `Lossless('tiered')`. The ratio is"
    " that of all bytes which tiered sends, as the audit counts them; `of that ratio` is raw / tiered over it, 100 %"
    " where all of it became time. The interface counts headers and answers too. After a pause the link lets through at"
    " once what it carries in 1 ms: messages of that size are faster than the link."
)


def _is_timed(operation: str, data: str, nbytes: int) -> bool:
    """Reductions are timed over all sizes with one kind of data only: a run should not take more than ten minutes."""
    return not (operation in ("reduce_scatter", "all_reduce") and data == "gradients") or nbytes in _GRADIENT_SIZES


def _sent_nbytes(operation: str, nbytes: int, num_hosts: int) -> float:
    """What each rank sends at least."""
    return (2 if operation == "all_reduce" else 1) * nbytes * (num_hosts - 1) / num_hosts


# --- what each rank does ---


def _values(data: str, numel: int) -> Tensor:
    """bf16 [numel], different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(numel, generator=generator)
    if data == "gradients":
        # Student's t with 4 degrees of freedom: a normal number over the root of a chi-square one over 4.
        squares = sum(torch.randn(numel, generator=generator).square_() for _ in range(4))
        return (1e-3 * x / (squares / 4).sqrt_()).bfloat16()
    return (0.02 * x).bfloat16()


def _ways(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of our collectives, by kind."""
    from torch.distributed.device_mesh import init_device_mesh

    from laconic.collectives import Lossless, Raw, TwoLevel

    codecs: dict[str, Any] = {"raw": Raw(), "tiered": Lossless("tiered")}
    if "nodes" not in task:
        return {kind: {"codec": codec} for kind, codec in (codecs | {"auto": "auto"}).items()}
    shape = task["nodes"], dist.get_world_size() // task["nodes"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cluster", "node"))
    levels = TwoLevel(node=mesh["node"].get_group(), cluster=mesh["cluster"].get_group())
    return {kind: {"codec": codec} for kind, codec in codecs.items()} | {
        f"{kind}, two levels": {"codec": codec, "group": levels} for kind, codec in codecs.items()
    }


def _cases(operation: str, data: str, nbytes: int, ways: dict[str, dict[str, Any]]) -> dict[str, Callable[[], object]]:
    """What is timed, by kind. A reduction in place would grow and grow, so each takes the same input again."""
    from laconic import collectives

    world = dist.get_world_size()
    numel = nbytes // 2 // world * world
    ours = getattr(collectives, operation)
    if operation == "all_reduce":
        x = _values(data, numel)
        out = torch.empty_like(x)

        def reduce(function: Callable[..., object], arguments: dict[str, Any]) -> Callable[[], object]:
            return lambda: function(out.copy_(x), **arguments)

        return {"gloo": reduce(dist.all_reduce, {})} | {kind: reduce(ours, way) for kind, way in ways.items()}
    x = _values(data, numel // world if operation == "all_gather" else numel)
    out = torch.empty(numel // world if operation == "reduce_scatter" else numel, dtype=x.dtype)
    # torch 2.13 renamed two of them.
    native = {
        "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
        "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }[operation]
    return {"gloo": partial(native, out, x)} | {kind: partial(ours, out, x, **way) for kind, way in ways.items()}


def _row(
    operation: str, data: str, nbytes: int, task: dict[str, Any], ways: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    from laconic.collectives import audit

    counted: dict[str, audit.Snapshot] = {}

    def audited(kind: str, case: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            before = audit.snapshot()
            case()
            counted[kind] = audit.snapshot() - before

        return run

    cases = {kind: audited(kind, case) for kind, case in _cases(operation, data, nbytes, ways).items()}
    estimate = _sent_nbytes(operation, nbytes, dist.get_world_size()) * 8 / task["rate"]
    rounds = max(1, min(task["rounds"], int(_SECONDS_PER_CASE / estimate)))
    timed = time_all(cases, rounds, warm_ups=1 if estimate < _SECONDS_PER_CASE else 0)
    return {
        "operation": operation,
        "data": data,
        "nbytes": nbytes,
        "seconds": {kind: timed[kind].seconds for kind in timed},
        "ratio": counted["tiered"].ratio,
        "interface": timed["tiered"].interface_nbytes / counted["tiered"].sent_nbytes,
        "chosen": "+".join(sorted({entry.codec for entry in counted["auto"].entries})) if "auto" in counted else "",
    }


def main() -> None:
    """What one rank measures."""
    task = join()
    ways = _ways(task)
    rows = [_row(*case, size, task, ways) for case in _CASES for size in task["sizes"] if _is_timed(*case, size)]
    leave({"rows": rows})


if __name__ == "__main__":
    main()
