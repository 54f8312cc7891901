"""Held-out loss after training with moments in fewer bits, against exact AdamW with the same seed, over twelve seeds.

    python -m benchmarks.run optim-parity --threads 2 --out benchmarks/results/optim_parity_NAME.md
    python -m benchmarks.run optim-parity --only "laconic, AdamW8bit" "bitsandbytes, AdamW8bit"

A seed decides weights and batches, which all contenders share; the learning rate is the same. The first row is exact
training with each batch summed in two halves: as far as rounding alone leads a run astray. As many runs as `--threads`
take place beside each other, one thread each.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from math import sqrt
from multiprocessing import get_context
from statistics import mean, stdev

import torch

from benchmarks.contenders import text
from benchmarks.contenders.activations import batch_in_halves
from benchmarks.contenders.optimizers import adamw4bit, adamw8bit, coded_gradients, peer_adamw
from benchmarks.contenders.training import EXACT, Contender, not_installed
from benchmarks.registry import Options, Table, Text, benchmark

BOUND = 0.006
"""Nats per byte by which a mean may lie above exact training's."""
_SEEDS = 12


def contenders() -> list[Contender]:
    """The rows of the table, after exact training."""
    eight, four = [adamw8bit()], [adamw4bit()]
    return [
        Contender("exact, the batch in two halves", [batch_in_halves]),
        Contender("laconic, AdamW8bit", eight),
        Contender("laconic, AdamW4bit", four),
        Contender("laconic, AdamW8bit, gradients in 8 bits", [*eight, coded_gradients(8)]),
        Contender("laconic, AdamW4bit, gradients in 8 bits", [*four, coded_gradients(8)]),
        Contender("bitsandbytes, AdamW8bit", [peer_adamw("bitsandbytes.optim", "AdamW8bit")], package="bitsandbytes"),
        Contender("torchao, AdamW8bit", [peer_adamw("torchao.optim", "AdamW8bit")], package="torchao"),
        Contender("torchao, AdamW4bit", [peer_adamw("torchao.optim", "AdamW4bit")], package="torchao"),
    ]


def _train(name: str, run: text.Run, seed: int) -> float:
    torch.set_num_threads(1)
    contender = next(one for one in [Contender(EXACT), *contenders()] if one.name == name)
    return text.train(contender, run, seed)[0]


@benchmark("optim-parity", cases=[contender.name for contender in contenders()])
def optim_parity(options: Options) -> Iterator[Table | Text]:
    """One table."""
    run = text.Run.of(options.small, options.smoke)
    seeds = range(2 if options.smoke else _SEEDS)
    chosen = [one for one in contenders() if not options.only or one.name in options.only]
    missing = {one.name: part for one in chosen if (part := not_installed(one)) is not None}
    with ProcessPoolExecutor(options.threads, get_context("spawn")) as pool:
        waiting = {
            name: [pool.submit(_train, name, run, seed) for seed in seeds]
            for name in (EXACT, *(one.name for one in chosen if one.name not in missing))
        }
        found = {name: [future.result() for future in futures] for name, futures in waiting.items()}
    exact = found.pop(EXACT)
    rows = [[EXACT, f"{mean(exact):.4f}", "", "", "", ""]]
    for name, losses in found.items():
        apart = [mine - theirs for mine, theirs in zip(losses, exact, strict=True)]
        error = stdev(apart) / sqrt(len(apart))
        holds = "yes" if mean(apart) <= BOUND else "no"
        spread = f"{min(apart):+.4f} to {max(apart):+.4f}"
        rows.append([name, f"{mean(losses):.4f}", f"{mean(apart):+.4f}", f"{error:.4f}", spread, holds])
    rows += [[name, part.failure, "", "", "", ""] for name, part in missing.items()]
    model = text.llama(run.hidden, run.layers, text.corpus().vocab_size)
    count = sum(parameter.numel() for parameter in model.parameters())
    yield Table(
        f"Held-out loss, {len(seeds)} seeds",
        ["", "nats per byte", "from exact", "standard error", "smallest to largest", f"at most {BOUND} above"],
        rows,
        f"Llama of {count:,} parameters, fp32, {run.steps} steps of {run.batch_size} x {text.LENGTH} bytes. The "
        "standard error is that of the mean difference from exact training, paired by seed.",
        failed=list(missing),
    )
