"""Local steps (DiLoCo): held-out losses beside DDP's at equal tokens, bytes on the wire, and steps over slow links.

Losses are those of `laconic train` on two processes of this machine, over three seeds: a small Llama on the bytes of
the Python standard library, the same tokens for every kind. Seconds are measured between two hosts whose link is 10 or
100 Mbit/s, a larger model's, with a synchronization in each case; the kinds take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.kit.models import causal_model
from benchmarks.registry import Options, Table, Text, benchmark
from benchmarks.slow_links import Network, as_rank, networks, time_all
from netlab import why_not

_WORLD = 2
_SEEDS = (0, 1, 2)
_BATCH, _LENGTH = 8, 64
_STEPS = 300


def _apart(every: int, bits: int, **outer: float) -> dict[str, Any]:
    return {"local_steps": every, "outer.bits": bits, **{f"outer.{name}": value for name, value in outer.items()}}


KINDS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, gradients in 8 bits": {"gradients.reduce": "q8"},
    **{f"H = {every}, {bits} bits": _apart(every, bits) for every in (10, 50, 100) for bits in (32, 8, 4)},
    **{
        f"H = {every}, 4 bits, outer rate 1, no momentum": _apart(every, 4, learning_rate=1.0, momentum=0.0)
        for every in (10, 50)
    },
    "H = 50, 4 bits, 4 fragments, 5 steps overlapped": _apart(50, 4, fragments=4, delay=5),
}
"""What is compared, by the settings of `laconic train`."""


@benchmark("local-steps", cases=("losses", "links"))
def local_steps(options: Options) -> Iterator[Table | Text]:
    """Losses, bytes and seconds of local steps beside DDP."""
    if not options.only or "losses" in options.only:
        yield _losses(options)
    if not options.only or "links" in options.only:
        if (reason := why_not()) is not None:
            yield Table("Steps over slow links", ["not measured"], [[reason]])
            return
        for network in networks(options, _WORLD, (100e6, 10e6)):
            yield _seconds(network)


# --- losses and bytes ---


def _losses(options: Options) -> Table:
    seeds, steps = (_SEEDS[:1], 12) if options.smoke else (_SEEDS, _STEPS)
    names = ["DDP", "H = 10, 4 bits"] if options.smoke else list(KINDS)
    with TemporaryDirectory() as folder:
        mp.spawn(_train_all, (folder, names, seeds, steps), nprocs=_WORLD)
        return losses_table(folder, names, seeds, steps)


def losses_table(folder: str, names: Sequence[str], seeds: Sequence[int], steps: int) -> Table:
    """The table of runs that are complete in a folder."""
    found = {
        (name, seed): json.loads((_run_dir(folder, name, seed) / "summary.json").read_text())
        for name in names
        for seed in seeds
    }
    tokens = _BATCH * _LENGTH // _WORLD  # of a process in a step

    def loss(name: str, seed: int) -> float:
        return float(found[name, seed]["validation_loss"])

    def away(name: str) -> str:
        if name == "DDP":
            return "-"
        each = [loss(name, seed) - loss("DDP", seed) for seed in seeds]
        return f"{mean(each):+.3f} ({', '.join(f'{one:+.3f}' for one in each)})"

    def sent(name: str) -> float:
        return mean(found[name, seed]["wire_nbytes_per_step"] for seed in seeds)

    return Table.of(
        f"Held-out loss after {steps} steps, {steps * _BATCH * _LENGTH:,} tokens",
        names,
        [
            ("kind", str),
            ("loss, nats per byte", lambda name: f"{mean(loss(name, seed) for seed in seeds):.3f}"),
            ("beyond DDP, mean (each seed)", away),
            ("bytes sent per token", lambda name: f"{sent(name) / tokens:,.1f}"),
            ("DDP's over these", lambda name: f"{sent('DDP') / sent(name):.1f}x"),
        ],
        f"Two processes, seeds {', '.join(map(str, seeds))}. Bytes: what a process sends, all steps, over the tokens"
        " that it trains on. Outer rate 0.7, momentum 0.9, but where it says otherwise; the last step of each run is a"
        " synchronization, too.",
    )


def _run_dir(folder: str, name: str, seed: int) -> Path:
    return Path(folder) / f"{name.replace(', ', '_').replace(' ', '')}-{seed}"


def _train_all(rank: int, folder: str, names: Iterable[str], seeds: Iterable[int], steps: int) -> None:
    """Train one kind after the other, as one of the processes."""
    from laconic.train.config.toml import load_config
    from laconic.train.distributed.world import World
    from laconic.train.run import run
    from laconic.train.signals import StopRequest

    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    if rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)  # the report is what is printed
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", _WORLD), rank=rank, world_size=_WORLD)
    world = World(rank=rank, size=_WORLD, local_rank=rank, device=torch.device("cpu"))
    small: dict[str, Any] = {
        **{"model.hidden_size": 64, "model.intermediate_size": 192, "model.num_hidden_layers": 2},
        **{"model.num_attention_heads": 2, "activations.bits": 16, "zip": "off", "audit": False, "verify.every": 0},
        **{"steps": steps, "batch_size": _BATCH, "sequence_length": _LENGTH, "eval_every": 0, "eval_sequences": 512},
        **{"log_every": steps, "data.cache_dir": f"{folder}/cache"},
    }
    for seed in seeds:
        for name in names:
            own = {"run_dir": str(_run_dir(folder, name, seed)), "seed": seed}
            run(load_config(None, small | own | KINDS[name]), world, StopRequest())
    world.leave()


# --- seconds ---


def _seconds(network: Network) -> Table:
    found = network.run(__name__, {"hidden": 64 if network.options.smoke else 192})
    seconds, nbytes = found["seconds"], found["interface"]
    return Table.of(
        f"Seconds per step, {network.where(found)}",
        list(seconds),
        [
            ("kind", str),
            ("step, s", lambda kind: f"{seconds[kind]:.3f}"),
            ("DDP's over this", lambda kind: f"{seconds['DDP'] / seconds[kind]:.1f}x"),
            ("MB on the interface per step", lambda kind: f"{nbytes[kind] / 1e6:.3f}"),
        ],
        f"{found['num_parameters']:,} parameters in fp32, {found['tokens']} tokens per rank and step. A case of H steps"
        " has one synchronization; its seconds are divided by H. Alone: no communication.",
    )


class _Training:
    """A model and its optimizer, trained by DDP, apart with local steps, or alone."""

    def __init__(self, hidden: int, kind: str, every: int = 0, bits: int = 4, delay: int = 0) -> None:
        import laconic
        from laconic.gradients import LocalSteps

        model = causal_model(
            "llama", hidden, intermediate_size=3 * hidden, num_hidden_layers=4, vocab_size=1024, use_cache=False
        )
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model: nn.Module = model
        self.local: LocalSteps | None = None
        if "DDP" in kind:
            self.model = nn.parallel.DistributedDataParallel(model)
            if "8 bits" in kind:
                laconic.quantize_reduction(self.model)
        elif every:
            self.local = LocalSteps(model, every=every, bits=bits, delay=delay)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, num: int) -> None:
        """Make `num` steps."""
        for _ in range(num):
            ids = torch.randint(0, 1024, (2, _LENGTH), generator=self._generator)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.local is not None:
                self.local.step()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    apart: dict[str, Mapping[str, int]] = {
        "H = 10, 32 bits": {"every": 10, "bits": 32},
        "H = 10, 8 bits": {"every": 10, "bits": 8},
        "H = 10, 4 bits": {"every": 10, "bits": 4},
        "H = 10, 4 bits, 5 steps overlapped": {"every": 10, "bits": 4, "delay": 5},
        "H = 50, 4 bits": {"every": 50, "bits": 4},
        "H = 100, 4 bits": {"every": 100, "bits": 4},
    }
    if task["smoke"]:
        apart = {name: how for name, how in apart.items() if name.startswith("H = 10, 4")}
    numbers = {
        "DDP": 1,
        "DDP, gradients in 8 bits": 1,
        **{name: how["every"] for name, how in apart.items()},
        "alone": 10,
    }
    runs = {kind: _Training(task["hidden"], kind, **apart.get(kind, {})) for kind in numbers}
    for kind, how in apart.items():  # so that what a case begins in the background, it also ends
        if "delay" in how:
            runs[kind].steps(how["every"] - how["delay"])
    cases = {kind: partial(runs[kind].steps, num) for kind, num in numbers.items()}
    timed = time_all(cases, rounds=min(task["rounds"], 3))
    return {
        "seconds": {kind: timed[kind].seconds / num for kind, num in numbers.items()},
        "interface": {kind: timed[kind].interface_nbytes / num for kind, num in numbers.items()},
        "num_parameters": runs["DDP"].num_parameters,
        "tokens": 2 * _LENGTH,
    }


if __name__ == "__main__":
    as_rank(measure)
