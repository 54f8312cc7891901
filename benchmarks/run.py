"""Run a benchmark and write its tables.

    python -m benchmarks.run kernels --threads 1 2 --out benchmarks/results/kernels_NAME.md
    python -m benchmarks.run activations --out benchmarks/results/activations_NAME.md
    python -m benchmarks.run compiled --out benchmarks/results/compiled_NAME.md
    python -m benchmarks.run gradients --threads 1 2 --out benchmarks/results/gradients_NAME.md
    python -m benchmarks.run loss --out benchmarks/results/loss_NAME.md
    python -m benchmarks.run lossless --threads 1 2 --out benchmarks/results/lossless_NAME.md
    python -m benchmarks.run files --threads 1 2 --rounds 5 --out benchmarks/results/files_NAME.md
    python -m benchmarks.run lossless-ratio --out benchmarks/results/lossless_ratio_NAME.md
    python -m benchmarks.run reduce --threads 1 2 --out benchmarks/results/reduce_NAME.md
    python -m benchmarks.run network --rounds 3 --out benchmarks/results/network_NAME.md
    python -m benchmarks.run collectives --out benchmarks/results/collectives_NAME.md
    python -m benchmarks.run collectives --hosts 4 --rates 1gbit --elements 1048576     # a part of it
    python -m benchmarks.run process-group --out benchmarks/results/process_group_NAME.md
    python -m benchmarks.run zip-training --out benchmarks/results/zip_training_NAME.md
    python -m benchmarks.run choose --rounds 5 --out benchmarks/results/choose_NAME.md
    python -m benchmarks.run auto --out benchmarks/results/auto_NAME.md     # the machine should be quiet
    python -m benchmarks.run moe-autotune --rounds 5 --out benchmarks/results/moe_autotune_NAME.md
    python -m benchmarks.run moe-dispatch --rounds 5 --out benchmarks/results/moe_dispatch_NAME.md
    python -m benchmarks.run planning --out benchmarks/results/planning_NAME.md
    python -m benchmarks.run moe-pipeline --out benchmarks/results/moe_pipeline_NAME.md
    python -m benchmarks.run moe-pipeline-lab --rounds 5 --out benchmarks/results/moe_pipeline_lab_NAME.md
    python -m benchmarks.run moe-layer --threads 1 2 --rounds 5 --out benchmarks/results/moe_layer_NAME.md
    python -m benchmarks.run moe-paths --rounds 5 --out benchmarks/results/moe_paths_NAME.md
    python -m benchmarks.run moe-hierarchy --out benchmarks/results/moe_hierarchy_NAME.md
    python -m benchmarks.run moe-parm --out benchmarks/results/moe_parm_NAME.md
    python -m benchmarks.run gpu --out benchmarks/results/gpu_NAME.md

Every number of threads gets a process of its own: the OpenMP runtimes that torch and its peers bring read their number
of threads when they start.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.registry import BENCHMARKS, Options, processor
from laconic.testing.netlab import bits_per_second_of

_MODULES = (
    "kernels",
    "activations",
    "compiled",
    "gradients",
    "loss",
    "lossless",
    "lossless_ratio",
    "optim",
    "gpu",
    "memory",
    "gradient_error",
    "network",
    "collectives",
    "auto",
    "choose",
    "process_group",
    "zip_training",
    "reduce",
    "moe_ablation",
    "moe_autotune",
    "moe_dispatch",
    "moe_training",
    "planning",
    "moe_pipeline",
    "moe_pipeline_lab",
    "moe_hierarchy",
    "moe_parm",
    "files",
    "moe_layer",
    "moe_paths",
)
_SMOKE_ELEMENTS = 1 << 12


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments` name; returns the exit code."""
    for module in _MODULES:
        importlib.import_module(f"benchmarks.{module}")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="one part of the report for each")
    parser.add_argument("--elements", type=int, default=1 << 24, help="size of the tensors of the kernel benchmarks")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; the median counts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[], help="over slow links: how many hosts")
    parser.add_argument("--rates", nargs="+", default=[], help="over slow links: their rates, as in 100mbit 2.5gbit")
    parser.add_argument("--profile", action="store_true", help="over slow links: run laconic profile on each first")
    parser.add_argument("--smoke", action="store_true", help="a tiny case that only shows that the benchmark runs")
    parser.add_argument("--out", type=Path, help="Markdown file to write as well")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)

    if chosen.part:
        (threads,) = chosen.threads
        torch.set_num_threads(threads)
        elements, rounds = (_SMOKE_ELEMENTS, 1) if chosen.smoke else (chosen.elements, chosen.rounds)
        rates = [bits_per_second_of(rate) for rate in chosen.rates]
        for table in BENCHMARKS[chosen.name](Options(threads, elements, rounds, chosen.hosts, rates, chosen.profile)):
            print(table.render())
        return 0

    command = f"python -m benchmarks.run {' '.join(arguments)}"
    parts = [f"# Benchmark: {chosen.name}\n\n`{command}`\n\n{date.today()}, {processor()}, torch {torch.__version__}\n"]
    for threads in chosen.threads:
        part = [chosen.name, "--elements", str(chosen.elements), "--rounds", str(chosen.rounds)]
        part += ["--hosts", *map(str, chosen.hosts)] * bool(chosen.hosts)
        part += ["--rates", *chosen.rates] * bool(chosen.rates)
        part += ["--profile"] * chosen.profile
        part += ["--smoke"] * chosen.smoke + ["--threads", str(threads), "--part"]
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.run", *part],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode:
            return result.returncode
        parts.append(result.stdout)
    report = "\n".join(parts).rstrip() + "\n"
    print(report, end="")
    if chosen.out is not None:
        chosen.out.write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
