"""All-reduce and training steps over real slow links: fp32, bf16 and 8 bits.

Hosts are network namespaces on this machine (laconic.testing.netlab), one process and one thread each, and gloo between
them. The link is calibrated by one TCP transfer before anything is timed. Seconds are the slowest rank's, from a
barrier to the result in the caller's fp32 tensor, conversions and quantization included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from laconic.gradients import NATIVE_BELOW_NBYTES, all_reduce_q8, quantize_reduction
from laconic.testing.netlab import Lab, finish, why_not

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
    hosts, rates = (_SMOKE_HOSTS, _SMOKE_RATES) if smoke else (_NUM_HOSTS, _RATES)
    sizes = [size for size in _SIZES if size <= 4 * options.elements]
    task = {"sizes": _SMOKE_SIZES if smoke else sizes, "rounds": options.rounds, "hidden": 64 if smoke else 320}
    tables: list[Table] = []
    for num_hosts in hosts:
        for rate in rates:
            with Lab(num_hosts, rate) as lab:
                measured = lab.measured_bits_per_second(int(rate / 8 * (0.2 if smoke else 2)))
                result = _run_ranks(lab, task)
            tables += _tables(num_hosts, rate, measured, result)
    return tables


def _run_ranks(lab: Lab, task: dict[str, Any]) -> dict[str, Any]:
    endings = finish(lab.start_ranks([sys.executable, "-m", "benchmarks.network", json.dumps(task)]), 3600)
    for rank, ending in enumerate(endings):
        if ending.code:
            raise RuntimeError(f"rank {rank} ended with {ending.code}:\n{ending.err}")
    result: dict[str, Any] = json.loads(endings[0].out.splitlines()[-1])
    return result


def _tables(num_hosts: int, rate: float, measured: float, result: dict[str, Any]) -> list[Table]:
    where = f"{num_hosts} hosts, {rate / 1e6:g} Mbit/s each way (one TCP connection gets {measured / 1e6:.0f})"
    rows = []
    for size, seconds in result["all_reduce"]:
        ideal = 2 * (num_hosts - 1) / num_hosts * size * 8 / rate
        cells = [f"{seconds[kind] * 1e3:.1f}" for kind in _KINDS]
        gains = [f"{seconds[kind] / seconds['q8']:.2f}x" for kind in ("fp32", "bf16")]
        rows.append([_nbytes(size), f"{ideal * 1e3:.1f}", *cells, *gains])
    all_reduce = Table(
        f"All-reduce, {where}",
        ["fp32 tensor", "ring at full rate, ms", "fp32 ms", "bf16 ms", "q8 ms", "q8 over fp32", "q8 over bf16"],
        rows,
        f"Bytes alone: 3.88x over fp32, 1.94x over bf16. Below {_nbytes(NATIVE_BELOW_NBYTES)} `all_reduce_q8` takes the"
        " native collective unless told otherwise; here it never does.",
    )
    steps = result["steps"]
    rows = [[kind, f"{steps[kind]:.3f}", f"{steps['fp32'] / steps[kind]:.2f}x"] for kind in _KINDS]
    note = f"Llama, {result['num_parameters']:,} parameters, DDP, 128 tokens per rank; forward and backward alone"
    note += f" take {steps['alone']:.3f} s."
    return [all_reduce, Table(f"Training step, {where}", ["gradients", "s", "speed"], rows, note)]


def _nbytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


# --- what each rank does ---


def _seconds(case: Callable[[], object], rounds: int) -> float:
    """Median over rounds of the slowest rank's time; a first round is not counted."""
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        case()
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(slowest.item())
    return median(taken[1:])


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
        found.append((size, {kind: _seconds(case, repeat) for kind, case in _reduce_cases(x).items()}))
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
    found, num_parameters = {}, 0
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
        found[kind] = _seconds(step, min(rounds, 3))
    return found, num_parameters


def main(task: dict[str, Any]) -> None:
    """What one rank measures; rank 0 prints it as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_reduce = _all_reduces(task["sizes"], task["rounds"])
    steps, num_parameters = _steps(task["hidden"], task["rounds"])
    if dist.get_rank() == 0:
        print(json.dumps({"all_reduce": all_reduce, "steps": steps, "num_parameters": num_parameters}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter's


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
