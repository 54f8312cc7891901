"""What choosing costs where it chooses raw, and gains elsewhere: a sweep of sizes over a slow link.

Hosts are network namespaces on this machine, one process and one thread each. First `laconic profile` measures the lab;
then each collective is timed raw, raw a second time (the difference is noise), with both codes forced, and as chosen.
Seconds are the slowest rank's, from a barrier to the result; cases take turns, round after round, and medians count.
What auto costs against raw is the median of the quotients of each round, so that what disturbs both cancels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import format_size, join, leave, run_ranks
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS, _RATES = (2,), (1e9,)
_SIZES = tuple(1 << power for power in range(10, 27, 2))
_SMOKE = 1 << 12
_SMOKE_SIZES = (1 << 12, 1 << 18)
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_KINDS = ("raw", "auto", "raw again", "window", "tiered")
# A case runs at least `rounds` times, and until it has taken about this long, but no more often than this.
_SECONDS_PER_CASE, _MAX_ROUNDS = 0.3, 51


@benchmark("choose")
def choose(options: Options) -> list[Table]:
    """bf16 tensors of 1 KB to 64 MB (at most 4 x `elements` bytes): never much slower than raw."""
    reason = why_not()
    if reason is not None:
        return [Table("Choosing", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    sizes = _SMOKE_SIZES if smoke else [size for size in _SIZES if size <= 4 * options.elements]
    tables = []
    for num_hosts in options.num_hosts or _NUM_HOSTS:
        for rate in options.rates or _RATES:
            with Lab(num_hosts, rate) as lab:
                task = {"sizes": sizes, "rounds": options.rounds, "quick": smoke}
                tables.append(_table(num_hosts, rate, run_ranks(lab, "benchmarks.choose", task)))
    return tables


def _table(num_hosts: int, rate: float, result: dict[str, Any]) -> Table:
    found = result["rows"]
    rows = [
        [
            row["operation"],
            format_size(row["nbytes"]) if row["nbytes"] >= 1024 else f"{row['nbytes']} B",
            *(f"{row['seconds'][kind] * 1e3:.2f}" for kind in _KINDS),
            f"{1 / row['over raw']['auto']:.2f}x",
            f"{_slower(row, 'auto'):+.1%}",
            f"{_slower(row, 'raw again'):+.1%}",
            f"{row['predicted'] * 1e3:.2f}",
            row["chosen"],
        ]
        for row in found
    ]
    worst = max(found, key=lambda row: _slower(row, "auto"))
    noise = max(_slower(row, "raw again") for row in found)
    left = [row for row in found if row["chosen"].startswith("raw")]
    coded = [row for row in found if row not in left]
    missed = max((_gain(row) for row in left), default=0.0)
    took = f"{result['profile_seconds']:.0f} s"
    note = (
        f"Worst regression of auto: {_slower(worst, 'auto'):+.1%} ({worst['operation']}, {worst['nbytes']} bytes); raw"
        f" against itself differs by up to {noise:+.1%}. {len(coded)} of {len(found)} cases were coded; the"
        f" largest gain that was left out by choosing raw is {missed:.1%}. The profile took {took}."
    )
    header = ["operation", "tensor", *(f"{kind}, ms" for kind in _KINDS)]
    header += ["raw / auto", "auto slower by", "raw again slower by", "predicted, ms", "auto took"]
    return Table(f"Choosing, {num_hosts} hosts, {rate / 1e6:g} Mbit/s each way", header, rows, note)


def _slower(row: dict[str, Any], kind: str) -> float:
    """Share of time more than raw."""
    return float(row["over raw"][kind]) - 1


def _gain(row: dict[str, Any]) -> float:
    return max(0.0, 1 / min(row["over raw"]["window"], row["over raw"]["tiered"]) - 1)


# --- what each rank does ---


def _cases(operation: str, nbytes: int) -> list[Callable[[], object]]:
    """In the order of `_KINDS`. The input is what counts as the tensor, but for an all-gather, where the output is."""
    from laconic import collectives
    from laconic.collectives import Lossless, Raw

    world = dist.get_world_size()
    numel = _numel(nbytes, world)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = (0.02 * torch.randn(numel // world if operation == "all_gather" else numel, generator=generator)).bfloat16()
    codecs: dict[str, Any] = {"raw": Raw(), "raw again": Raw(), "auto": "auto"}
    codecs |= {code: Lossless(code) for code in ("window", "tiered")}
    function = getattr(collectives, operation)
    if operation == "all_reduce":
        out = torch.empty_like(x)
        return [lambda codec=codecs[kind]: function(out.copy_(x), codec=codec) for kind in _KINDS]
    out = torch.empty(numel // world if operation == "reduce_scatter" else numel, dtype=x.dtype)
    return [lambda codec=codecs[kind]: function(out, x, codec=codec) for kind in _KINDS]


def _numel(nbytes: int, world: int) -> int:
    return max(1, nbytes // 2 // world) * world


def main(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    from laconic.collectives.cluster_profile import profile
    from laconic.collectives.policy.microbench import Ranks
    from laconic.collectives.policy.selector import choose, use_rates

    started = time.perf_counter()
    use_rates(profile(torch.device("cpu"), quick=task["quick"]))
    profile_seconds = time.perf_counter() - started
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(group, torch.device("cpu"))
    rows = []
    for operation in _OPERATIONS:
        for nbytes in task["sizes"]:
            cases = _cases(operation, nbytes)
            (once,) = ranks.in_turn(cases, 1)
            rounds = min(_MAX_ROUNDS, max(task["rounds"], int(_SECONDS_PER_CASE / max(once))))
            ranks.in_turn(cases, 1)  # once more, for the first observations
            found = ranks.in_turn(cases, rounds)
            numel = _numel(nbytes, group.size()) // (group.size() if operation == "all_gather" else 1)
            choice = choose(operation, numel, torch.bfloat16, group)
            rows.append(
                {
                    "operation": operation,
                    "nbytes": nbytes,
                    "seconds": dict(zip(_KINDS, map(median, zip(*found, strict=True)), strict=True)),
                    "over raw": {
                        kind: median(one[place] / one[0] for one in found) for place, kind in enumerate(_KINDS)
                    },
                    "predicted": choice.predicted_seconds,
                    "chosen": f"{choice.codec}, {choice.num_chunks} chunks: {choice.reason}",
                }
            )
    return {"rows": rows, "profile_seconds": profile_seconds}


if __name__ == "__main__":
    leave(main(join()))
