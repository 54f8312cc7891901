"""All-reduce and training steps over real slow links: fp32, bf16 and 8 bits.

Hosts are network namespaces on this machine (laconic.testing.netlab), one process and one thread each, and gloo between
them. The link is calibrated by one TCP transfer before anything is timed. Seconds are the slowest rank's, from a
barrier to the result in the caller's fp32 tensor, conversions and quantization included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import format_size, join, leave, run_ranks, seconds_of_all
from laconic.gradients import NATIVE_BELOW_NBYTES, all_reduce_q8, quantize_reduction
from laconic.testing.netlab import Lab, why_not

_NUM_HOSTS = (2, 4)
_RATES = (100e6, 1e9)
_SIZES = tuple(1 << power for power in (15, 16, 17, 18, 20, 22, 25, 26))
_KINDS = ("fp32", "bf16", "q8")
_SMOKE = 1 << 12
# What --smoke measures: one small network.
_SMOKE_HOSTS, _SMOKE_RATES, _SMOKE_SIZES = (2,), (1e9,), (1 << 15, 1 << 18)


@benchmark("network")
def network(options: Options) -> list[Table]:
    """All-reduce of 32 KB to 64 MB (at most `elements` fp32 numbers) and steps of a 10M-parameter model."""
    reason = why_not()
    if reason is not None:
        return [Table("Slow links", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    hosts = options.num_hosts or (_SMOKE_HOSTS if smoke else _NUM_HOSTS)
    rates = options.rates or (_SMOKE_RATES if smoke else _RATES)
    sizes = [size for size in _SIZES if size <= 4 * options.elements]
    task = {"sizes": _SMOKE_SIZES if smoke else sizes, "rounds": options.rounds, "hidden": 64 if smoke else 320}
    tables: list[Table] = []
    for num_hosts in hosts:
        for rate in rates:
            with Lab(num_hosts, rate) as lab:
                measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 2)))
                result = run_ranks(lab, "benchmarks.network", task)
            tables += _tables(num_hosts, rate, measured, result)
    return tables


def _tables(num_hosts: int, rate: float, measured: float, result: dict[str, Any]) -> list[Table]:
    where = f"{num_hosts} hosts, {rate / 1e6:g} Mbit/s each way (one TCP connection gets {measured / 1e6:.0f})"
    rows = []
    for size, seconds in result["all_reduce"]:
        ideal = 2 * (num_hosts - 1) / num_hosts * size * 8 / rate
        cells = [f"{seconds[kind] * 1e3:.1f}" for kind in _KINDS]
        gains = [f"{seconds[kind] / seconds['q8']:.2f}x" for kind in ("fp32", "bf16")]
        rows.append([format_size(size), f"{ideal * 1e3:.1f}", *cells, *gains])
    all_reduce = Table(
        f"All-reduce, {where}",
        ["fp32 tensor", "ring at full rate, ms", "fp32 ms", "bf16 ms", "q8 ms", "q8 over fp32", "q8 over bf16"],
        rows,
        f"Bytes alone: 3.88x over fp32, 1.94x over bf16. Below {format_size(NATIVE_BELOW_NBYTES)} `all_reduce_q8` takes"
        " the native collective unless told otherwise; here it never does.",
    )
    steps = result["steps"]
    rows = [[kind, f"{steps[kind]:.3f}", f"{steps['fp32'] / steps[kind]:.2f}x"] for kind in _KINDS]
    note = f"Llama, {result['num_parameters']:,} parameters, DDP, 128 tokens per rank; forward and backward alone"
    note += f" take {steps['alone']:.3f} s."
    return [all_reduce, Table(f"Training step, {where}", ["gradients", "s", "speed"], rows, note)]


# --- what each rank does ---


def _reduce_cases(x: Tensor) -> dict[str, Callable[[], object]]:
    def bf16() -> None:
        half = x.bfloat16()
        dist.all_reduce(half, dist.ReduceOp.AVG)
        x.copy_(half)

    return {
        "fp32": lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
        "bf16": bf16,
        "q8": lambda: all_reduce_q8(x, min_nbytes=0),
    }


def _all_reduces(sizes: list[int], rounds: int) -> list[tuple[int, dict[str, float]]]:
    found = []
    for size in sizes:
        x = torch.randn(size // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        repeat = max(1, min(rounds, (1 << 27) // size))
        found.append((size, seconds_of_all(_reduce_cases(x), repeat)))
    return found


def _model(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=6,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def _bf16_hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """torch's bf16_compress_hook, which refuses gloo."""
    buffer = bucket.buffer()
    half = buffer.bfloat16()
    work = dist.all_reduce(half, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: buffer.copy_(half))


# DDP wants classes as annotations, not strings.
_bf16_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _steps(hidden: int, rounds: int) -> tuple[dict[str, float], int]:
    from torch.nn.parallel import DistributedDataParallel

    ids = torch.randint(0, 2048, (1, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    found: dict[str, float] = {}
    num_parameters = 0
    for kind in ("alone", *_KINDS):
        model = _model(hidden)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if kind != "alone":
            model = DistributedDataParallel(model)
        if kind == "bf16":
            model.register_comm_hook(None, _bf16_hook)
        if kind == "q8":
            quantize_reduction(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        step()  # after its first step DDP cuts its buckets anew
        found |= seconds_of_all({kind: step}, min(rounds, 3))
    return found, num_parameters


def main() -> None:
    """What one rank measures."""
    task = join()
    all_reduce = _all_reduces(task["sizes"], task["rounds"])
    steps, num_parameters = _steps(task["hidden"], task["rounds"])
    leave({"all_reduce": all_reduce, "steps": steps, "num_parameters": num_parameters})


if __name__ == "__main__":
    main()
