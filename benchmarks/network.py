"""All-reduce and training steps over real slow links: fp32, bf16 and 8 bits.

Seconds of an all-reduce end when the result is in the caller's fp32 tensor, conversions and quantization included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.models import causal_model
from benchmarks.kit.timing import Case, Timing, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, format_size, in_lab, networks, slowest_rank
from laconic.gradients import NATIVE_BELOW_NBYTES, all_reduce_q8, quantize_reduction

_SIZES = tuple(1 << power for power in (15, 16, 17, 18, 20, 22, 25, 26))
_KINDS = ("fp32", "bf16", "q8")


@benchmark("network")
@in_lab("Slow links")
def network(options: Options) -> list[Table]:
    """All-reduce of 32 KB to 64 MB (at most `elements` fp32 numbers) and steps of a 10M-parameter model."""
    task = {"sizes": options.sizes(_SIZES, smoke=(1 << 15, 1 << 18)), "hidden": 64 if options.smoke else 320}
    tables: list[Table] = []
    for links in networks(options, (2, 4), (100e6, 1e9)):
        tables += _tables(links, links.run(__name__, task))
    return tables


def _tables(links: Network, found: dict[str, Any]) -> list[Table]:
    def ideal(size: int) -> float:
        return 2 * (links.num_hosts - 1) / links.num_hosts * size * 8 / links.rate

    all_reduce = Table.of(
        f"All-reduce, {links.where(found)}",
        found["all_reduce"],
        [
            ("fp32 tensor", lambda row: format_size(row[0])),
            ("ring at full rate, ms", lambda row: f"{ideal(row[0]) * 1e3:.1f}"),
            *((f"{kind} ms", lambda row, kind=kind: f"{row[1][kind] * 1e3:.1f}") for kind in _KINDS),
            *((f"q8 over {kind}", lambda row, kind=kind: f"{row[1][kind] / row[1]['q8']:.2f}x") for kind in _KINDS[:2]),
        ],
        f"Bytes alone: 3.88x over fp32, 1.94x over bf16. Below {format_size(NATIVE_BELOW_NBYTES)} `all_reduce_q8` takes"
        " the native collective unless told otherwise; here it never does.",
    )
    steps = found["steps"]
    step = Table.of(
        f"Training step, {links.where(found)}",
        _KINDS,
        [
            ("gradients", str),
            ("s", lambda kind: f"{steps[kind]:.3f}"),
            ("speed", lambda kind: f"{steps['fp32'] / steps[kind]:.2f}x"),
        ],
        f"Llama, {found['num_parameters']:,} parameters, DDP, 128 tokens per rank; forward and backward alone"
        f" take {steps['alone']:.3f} s.",
    )
    return [all_reduce, step]


# --- what each rank does ---


def _reduce_cases(x: Tensor) -> dict[str, Case]:
    def bf16() -> None:
        half = x.bfloat16()
        dist.all_reduce(half, dist.ReduceOp.AVG)
        x.copy_(half)

    return {
        "fp32": lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
        "bf16": bf16,
        "q8": lambda: all_reduce_q8(x, min_nbytes=0),
    }


def _all_reduces(sizes: list[int], rounds: int) -> list[tuple[int, dict[str, Timing]]]:
    found = []
    for size in sizes:
        x = torch.randn(size // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        repeats = max(1, min(rounds, (1 << 27) // size))
        found.append((size, seconds_of(_reduce_cases(x), repeats, clock=slowest_rank)))
    return found


def _bf16_hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """torch's bf16_compress_hook, which refuses gloo."""
    buffer = bucket.buffer()
    half = buffer.bfloat16()
    work = dist.all_reduce(half, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: buffer.copy_(half))


# DDP wants classes as annotations, not strings.
_bf16_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _steps(hidden: int, rounds: int) -> tuple[dict[str, Timing], int]:
    from torch.nn.parallel import DistributedDataParallel

    sizes = {"intermediate_size": 4 * hidden, "num_hidden_layers": 6, "vocab_size": 2048, "tie_word_embeddings": True}
    ids = torch.randint(0, 2048, (1, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    found: dict[str, Timing] = {}
    num_parameters = 0
    for kind in ("alone", *_KINDS):
        model = causal_model("llama", hidden, **sizes)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if kind != "alone":
            model = DistributedDataParallel(model)
        if kind == "bf16":
            model.register_comm_hook(None, _bf16_hook)
        if kind == "q8":
            quantize_reduction(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(model: Any = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        # After its first step DDP cuts its buckets anew.
        found |= seconds_of({kind: step}, min(rounds, 3), warm_up_rounds=2, clock=slowest_rank)
    return found, num_parameters


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    all_reduce = _all_reduces(task["sizes"], task["rounds"])
    steps, num_parameters = _steps(task["hidden"], task["rounds"])
    return {"all_reduce": all_reduce, "steps": steps, "num_parameters": num_parameters}


if __name__ == "__main__":
    as_rank(measure)
