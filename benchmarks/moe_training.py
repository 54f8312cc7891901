"""`laconic train` on mixtures of experts over slow links: plain expert parallelism, each system alone, all together.

    python -m benchmarks.moe_training --out benchmarks/results/moe_training_NAME

writes NAME.md, NAME.json (every step's loss and seconds) and NAME.png. A Qwen3-MoE and a Mixtral of 21 million
parameters learn bytes of the Python standard library, on 4 processes in 2 nodes: fast inside, slow between. Every
setting is a run of the trainer with the same weights, samples and order; the runs of a model and a link follow each
other in the same processes. About 12 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

import laconic.train.steps as training
from benchmarks.registry import SMOKE_ELEMENTS, Options, Table, benchmark, how_long, processor, report_head, took
from benchmarks.slow_links import as_rank, in_lab, networks, sent
from laconic.cost.moe.shape import LayerShape
from laconic.moe import Grid
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.train.config.toml import load_config
from laconic.train.distributed.world import World
from laconic.train.model import build_model
from laconic.train.report.metrics import read_metrics
from laconic.train.run import run as train
from laconic.train.signals import StopRequest
from laconic.train.trainer import StepResult, Trainer
from netlab import bits_per_second_of, why_not

_NUM_NODES, _RANKS_PER_NODE = 2, 2
_SLOW_RATE = 300e6
# Losses do not depend on the link: on a slow one a few steps say what they take, and links are measured with less care.
_STEPS, _SLOW_STEPS = 20, 4
_SEQUENCES, _SEQUENCE_LENGTH = 8, 128

_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_SIZES,
        "extra": {
            **{"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 208},
            **{"norm_topk_prob": True, "router_aux_loss_coef": 0.01},
        },
    },
    "mixtral": {
        **_SIZES,
        "intermediate_size": 832,
        "extra": {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01},
    },
}
_SMOKE_SIZES = {"hidden_size": 64, "num_hidden_layers": 1}
_SMOKE_LENGTH = 32

_EXACT = {"activations.bits": 16, "activations.attention": "exact", "activations.loss": "exact"}
_PLAIN = {"moe.expert_parallel": _NUM_NODES * _RANKS_PER_NODE, "moe.dispatch_codec": "raw", "zip": "off"}
_LEVELS = {"moe.dispatcher": "hierarchical"}
_SWAP = {**_LEVELS, "moe.swap_every": 2}
_CHUNKS = {"moe.chunks": (2,)}
_ALL = {**_SWAP, **_CHUNKS, "moe.overlap_grad_reduce": True, "moe.dispatch_codec": "exact", "zip": "auto"}
_AUTO = {"moe.dispatcher": "auto", "moe.swap_every": 2, "moe.dispatch_codec": "exact", "zip": "auto"}
_FOUR_BITS = {"activations.bits": 4, "activations.attention": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "levels": _LEVELS,
    "levels, swaps": _SWAP,
    "lossless rows": {"moe.dispatch_codec": "lossless"},
    "2 chunks, windows": {**_CHUNKS, "moe.overlap_grad_reduce": True},
    "4-bit activations": _FOUR_BITS,
    "all exact ones": _ALL,
    "autotune": _AUTO,
    "autotune, 4-bit activations": {**_AUTO, **_FOUR_BITS},
}
"""What each changes of `plain`: the model's blocks with one raw all-to-all there and one back. In the last three rows
are shortened where the cost model says that it pays; `all exact ones` has levels, swaps and chunks whether they pay or
not, `autotune` what is predicted to."""
_ON_SLOW = ("plain", "levels", "levels, swaps", "lossless rows", "2 chunks, windows", "autotune, 4-bit activations")


@benchmark("moe-training")
@in_lab("Training mixtures of experts over slow links")
def moe_training(options: Options) -> list[Table]:
    """Steps of a Qwen3-MoE and a Mixtral, 21M parameters each, with every system of laconic.moe alone and together."""
    return [table(found) for found in measure(options, [*MODELS][: 1 if options.smoke else None])]


def measure(options: Options, models: Sequence[str], settings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What happened, one dict for each model and link, ready for JSON."""
    found = []
    with TemporaryDirectory() as folder:
        for model in models:
            for network in networks(options, _NUM_NODES, (1e9, 100e6), ranks_per_host=_RANKS_PER_NODE):
                slow = network.rate < _SLOW_RATE
                steps = 2 if options.smoke else _SLOW_STEPS if slow else _STEPS
                task = {"model": model, "steps": steps, "folder": folder, "quick": options.smoke or slow}
                task |= {"settings": list(settings or (_ON_SLOW if slow else SETTINGS))}
                result = network.run("benchmarks.moe_training", task)
                found.append({"model": model, "rate": network.rate, "steps": steps, **result})
    return found


def table(found: Mapping[str, Any]) -> Table:
    """One model on one link."""
    runs = found["runs"]
    plain = next(iter(runs.values()))
    return Table.of(
        f"{found['model']}, {found['rate'] / 1e6:g} Mbit/s between nodes (one TCP connection gets"
        f" {found['measured'] / 1e6:.0f})",
        runs.items(),
        [
            ("setting", lambda row: row[0]),
            ("step, s", lambda row: f"{seconds_of_step(row[1]):.3f}"),
            ("faster than plain", lambda row: f"{seconds_of_step(plain) / seconds_of_step(row[1]):.2f}x"),
            ("MB out of a node per step", lambda row: f"{row[1]['interface_nbytes'] / 1e6:.1f}"),
            ("last loss", lambda row: f"{row[1]['losses'][-1]:.4f}"),
            ("losses against plain", lambda row: agreement(row[1]["losses"], plain["losses"])),
            ("schedule of the last step", lambda row: row[1]["schedule"]),
        ],
        f"{found['num_parameters']:,} parameters, fp32, {_NUM_NODES} nodes of {_RANKS_PER_NODE} processes with a thread"
        f" each, {_SEQUENCES} x {_SEQUENCE_LENGTH} bytes per step, {found['steps']} steps. Without the first step:"
        " median seconds, and the mean of the bytes that left a node's interface. Rates were measured before, in"
        f" {found['measuring_seconds']:.0f} s.",
    )


def seconds_of_step(run: Mapping[str, Any]) -> float:
    """The median, without the first step, in which links and memory are measured."""
    return median(run["seconds"][1:] or run["seconds"])


def agreement(losses: Sequence[float], others: Sequence[float]) -> str:
    """How far two curves are apart."""
    apart = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    first = next((step for step, each in enumerate(apart, 1) if each), None)
    return "the same bits" if first is None else f"within {max(apart):.1e}, from step {first} on"


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Losses by step, one curve on top of the other, and step times by link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(one["model"] for one in found))
    figure, axes = plt.subplots(2, len(models), figsize=(6 * len(models), 8), squeeze=False)
    for column, model in enumerate(models):
        of_model = [one for one in found if one["model"] == model]
        top, bottom = axes[0][column], axes[1][column]
        longest = max(of_model, key=lambda one: one["steps"])
        names = list(longest["runs"])
        for number, (name, run) in enumerate(longest["runs"].items()):
            steps = range(1, len(run["losses"]) + 1)
            top.plot(steps, run["losses"], label=name, linestyle=("-", "--", "-.", ":")[number % 4])
        top.set_title(f"{model}, {longest['num_parameters'] / 1e6:.0f}M parameters")
        top.set_xlabel("step")
        top.set_ylabel("loss, nats per byte")
        top.legend(fontsize=7)
        width = 0.8 / len(of_model)
        for number, one in enumerate(of_model):
            speed = [
                seconds_of_step(next(iter(one["runs"].values()))) / seconds_of_step(r) for r in one["runs"].values()
            ]
            places = [place + number * width for place in range(len(speed))]
            bottom.barh(places, speed, width, label=f"{one['rate'] / 1e6:g} Mbit/s")
        bottom.axvline(1.0, color="0.4", linewidth=0.8)
        bottom.set_yticks([place + 0.4 - width / 2 for place in range(len(names))], names)
        bottom.invert_yaxis()
        bottom.set_xlabel("steps per second over plain's")
        bottom.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# --- what each rank does ---


def work(task: Mapping[str, Any]) -> dict[str, Any]:
    """Train with one setting after the other; what rank 0 saw."""
    training.Trainer = _Counting  # type: ignore[misc]  # the one that the run makes
    length = _SMOKE_LENGTH if task["smoke"] else _SEQUENCE_LENGTH
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    world = World(rank, size, rank % _RANKS_PER_NODE, torch.device("cpu"))
    folder = Path(task["folder"]) / f"{task['model']}-{task['rate']:g}"
    sizes = MODELS[task["model"]] | (_SMOKE_SIZES if task["smoke"] else {})
    common = {
        **{f"model.{name}": value for name, value in sizes.items()},
        **{"model.family": task["model"], "data.cache_dir": f"{task['folder']}/cache", "steps": task["steps"]},
        **{"batch_size": _SEQUENCES, "sequence_length": length, "eval_sequences": 0, "eval_every": 0},
        **{"optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 5, "nproc": size},
    }
    started = time.monotonic()
    rates = _measured_rates(task, world)
    measuring_seconds = time.monotonic() - started
    found: dict[str, Any] = {}
    for number, name in enumerate(task["settings"]):
        values = {**common, **_EXACT, **_PLAIN, **SETTINGS[name], "run_dir": str(folder / str(number))}
        if "moe.swap_every" in values:  # by which autotune decides as well
            values["moe.rates"] = rates
        _Counting.sent_nbytes = []
        train(load_config(None, values), world, StopRequest())
        counts = _Counting.sent_nbytes
        if world.is_main:
            rows = [row for row in read_metrics(folder / str(number)) if "loss" in row]
            summary = json.loads((folder / str(number) / "summary.json").read_text())
            found[name] = {
                "losses": [row["loss"] for row in rows],
                "seconds": [row["step_seconds"] for row in rows],
                "interface_nbytes": (counts[-1] - counts[0]) / (len(counts) - 1),
                "schedule": rows[-1]["moe_schedule"],
                "autotune": summary["moe"]["autotune"],
                **{key: rows[-1][key] for key in rows[-1] if key.startswith("moe_") and key != "moe_schedule"},
            }
            print(f"{name}: {seconds_of_step(found[name]):.3f} s", file=sys.stderr, flush=True)
    return {"runs": found, "num_parameters": _num_parameters(common), "measuring_seconds": measuring_seconds}


class _Counting(Trainer):
    """Notes what has left this node after every step."""

    sent_nbytes: ClassVar[list[int]] = []

    def step(self, step: int, stop: StopRequest, record: bool = False) -> StepResult:
        result = super().step(step, stop, record)
        self.sent_nbytes.append(sent()[0])
        return result


def _measured_rates(task: Mapping[str, Any], world: World) -> str:
    """A file with the rates of this lab, by which swaps and autotune decide; measured for the first model."""
    path = Path(task["folder"]) / f"rates-{task['rate']:g}-{world.rank}.json"  # the hosts of a lab share a disk
    if path.is_file():
        return str(path)
    sizes = MODELS[task["model"]]
    extra, hidden = sizes["extra"], _SMOKE_SIZES["hidden_size"] if task["smoke"] else sizes["hidden_size"]
    shape = LayerShape(
        num_tokens=_SEQUENCES * _SEQUENCE_LENGTH // world.size,
        model_dim=hidden,
        hidden_dim=extra.get("moe_intermediate_size", sizes.get("intermediate_size")),
        num_experts=extra.get("num_experts", extra.get("num_local_experts")),
        top_k=extra["num_experts_per_tok"],
        item_nbytes=4,
    )
    grid = Grid(ep=world.size, levels=(_NUM_NODES,), device_type="cpu")
    measure_moe(grid, shape, dtype=torch.float32, quick=task["quick"]).save(path)
    return str(path)


def _num_parameters(common: Mapping[str, Any]) -> int:
    model = build_model(load_config(None, dict(common)).model, 257, _SEQUENCE_LENGTH, 0)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """As a rank of a lab: train. Otherwise: the whole benchmark, with its files."""
    if "RANK" in os.environ:
        as_rank(work)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, without .md, .json and .png")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=[], help="only these; the first is compared with"
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="of the link between the nodes")
    parser.add_argument("--smoke", action="store_true", help="a tiny case that only shows that the benchmark runs")
    chosen = parser.parse_args()
    reason = why_not()
    if reason is not None:
        parser.exit(2, f"{reason}\n")
    rates = [bits_per_second_of(rate) for rate in chosen.rates]
    options = Options(1, SMOKE_ELEMENTS if chosen.smoke else 1 << 24, 1, rates=rates)
    command = f"python -m benchmarks.moe_training {' '.join(sys.argv[1:])}"
    if not chosen.smoke:
        print(how_long("moe-training", command), file=sys.stderr, flush=True)
    began = time.monotonic()
    found = measure(options, chosen.models, chosen.settings)
    facts = {"command": command, "date": str(date.today()), "processor": processor(), "torch": str(torch.__version__)}
    chosen.out.with_suffix(".json").write_text(json.dumps({**facts, "results": found}, indent=1) + "\n")
    draw(found, chosen.out.with_suffix(".png"))
    tables = [table(one).render() for one in found]
    image = f"![losses and step times]({chosen.out.name}.png)\n"
    text = "\n".join([report_head("moe-training", command), *tables, image, took(began) + "\n"])
    chosen.out.with_suffix(".md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
