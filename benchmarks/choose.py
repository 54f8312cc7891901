"""What choosing costs where it chooses raw, and gains elsewhere: a sweep of sizes over a slow link.

First `laconic profile` measures the lab; then each collective is timed raw, raw a second time (the difference is
noise), with both codes forced, and as chosen. What auto costs against raw is the median of the quotients of each round.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit.collective_calls import call, normal
from benchmarks.kit.timing import in_rounds, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, format_size, in_lab, networks, slowest_rank

_SIZES = tuple(1 << power for power in range(10, 27, 2))
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_KINDS = ("raw", "auto", "raw again", "window", "tiered")
# A case runs at least `rounds` times, and until it has taken about this long, but no more often than this.
_SECONDS_PER_CASE, _MAX_ROUNDS = 0.3, 51


@benchmark("choose")
@in_lab("Choosing")
def choose(options: Options) -> list[Table]:
    """bf16 tensors of 1 KB to 64 MB (at most 4 x `elements` bytes): never much slower than raw."""
    task = {"sizes": options.sizes(_SIZES, smoke=(1 << 12, 1 << 18))}
    return [_table(network, network.run(__name__, task)) for network in networks(options, (2,), (1e9,))]


def _table(network: Network, result: dict[str, Any]) -> Table:
    found = result["rows"]
    worst = max(found, key=lambda row: _slower(row, "auto"))
    noise = max(_slower(row, "raw again") for row in found)
    left = [row for row in found if row["chosen"].startswith("raw")]
    missed = max((_gain(row) for row in left), default=0.0)
    return Table.of(
        f"Choosing, {network.num_hosts} hosts, {network.rate_text} each way",
        found,
        [
            ("operation", lambda row: row["operation"]),
            ("tensor", lambda row: format_size(row["nbytes"])),
            *((f"{kind}, ms", lambda row, kind=kind: f"{row['seconds'][kind] * 1e3:.2f}") for kind in _KINDS),
            ("raw / auto", lambda row: f"{1 / row['over raw']['auto']:.2f}x"),
            ("auto slower by", lambda row: f"{_slower(row, 'auto'):+.1%}"),
            ("raw again slower by", lambda row: f"{_slower(row, 'raw again'):+.1%}"),
            ("predicted, ms", lambda row: f"{row['predicted'] * 1e3:.2f}"),
            ("auto took", lambda row: row["chosen"]),
        ],
        f"Worst regression of auto: {_slower(worst, 'auto'):+.1%} ({worst['operation']}, {worst['nbytes']} bytes); raw"
        f" against itself differs by up to {noise:+.1%}. {len(found) - len(left)} of {len(found)} cases were coded; the"
        f" largest gain that was left out by choosing raw is {missed:.1%}. The profile took"
        f" {result['profile_seconds']:.0f} s.",
    )


def _slower(row: dict[str, Any], kind: str) -> float:
    """Share of time more than raw."""
    return float(row["over raw"][kind]) - 1


def _gain(row: dict[str, Any]) -> float:
    return max(0.0, 1 / min(row["over raw"]["window"], row["over raw"]["tiered"]) - 1)


# --- what each rank does ---


def _row(operation: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """The input is what counts as the tensor, but for an all-gather, where the output is."""
    from laconic.collectives import Lossless, Raw
    from laconic.collectives.policy.selector import choose

    world = dist.get_world_size()
    numel = max(1, nbytes // 2 // world) * (1 if operation == "all_gather" else world)
    x = normal(numel)
    codecs = (Raw(), "auto", Raw(), Lossless("window"), Lossless("tiered"))
    cases = {kind: call(operation, x, codec=codec) for kind, codec in zip(_KINDS, codecs, strict=True)}
    once = max(read() for (read,) in in_rounds(cases, 1, slowest_rank).values())
    rounds = min(_MAX_ROUNDS, max(rounds, int(_SECONDS_PER_CASE / once)))
    # Two rounds more before: codecs' first observations.
    seconds = seconds_of(cases, rounds, warm_up_rounds=3, clock=slowest_rank)
    choice = choose(operation, numel, torch.bfloat16, dist.group.WORLD)
    return {
        "operation": operation,
        "nbytes": nbytes,
        "seconds": seconds,
        "over raw": {kind: timing.over(seconds["raw"]) for kind, timing in seconds.items()},
        "predicted": choice.predicted_seconds,
        "chosen": f"{choice.codec}, {choice.num_chunks} chunks: {choice.reason}",
    }


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    from laconic.collectives.cluster_profile import profile
    from laconic.collectives.policy.selector import use_rates

    started = time.perf_counter()
    use_rates(profile(torch.device("cpu"), quick=task["smoke"]))
    profile_seconds = time.perf_counter() - started
    rows = [_row(operation, nbytes, task["rounds"]) for operation in _OPERATIONS for nbytes in task["sizes"]]
    return {"rows": rows, "profile_seconds": profile_seconds}


if __name__ == "__main__":
    as_rank(measure)
