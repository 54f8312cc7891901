"""Small residual networks on Fashion-MNIST: attention over a stage's levels beside its rivals, exact and in 4 bits.

    python -m benchmarks.afi --out benchmarks/results/afi_NAME --seeds 3

writes NAME.json, one entry per training and appended after each, and from it NAME.md and NAME.png. The same command
again trains only what is missing, so a stop loses one training; `--most 2` trains two and leaves the others for later.
All networks of a seed start from the same weights where they have the same parameters, see the same images in the same
order and train as long. The images are those of Debian's package dataset-fashion-mnist; FASHION_MNIST names the folder
of its files if that is another. About a minute of one core for each seed and network.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from benchmarks.afi_networks import AFI_FAST, AFI_NAME, AT_BUDGET, NETWORKS, REDUCTION, build, stages
from benchmarks.fashion_mnist import Images, fashion_mnist, random_images
from benchmarks.registry import Options, Table, benchmark, report_head
from laconic.activations import SavedTensorTracker
from laconic.errors import DataError
from laconic.vision import Integrated, count_macs

_BATCH = 64
_RATE = 0.1
_LEVEL = 0.95
_PACKED = (AT_BUDGET, AFI_NAME)
"""Networks that are trained with 4-bit activations, too."""
_AFIS = (AFI_NAME, AFI_FAST)


@dataclass(frozen=True)
class Setup:
    """What all trainings of a file have in common."""

    train_images: int = 15_000
    test_images: int = 10_000
    epochs: int = 4
    random_images: bool = False


_SMOKE = Setup(2 * _BATCH, _BATCH, 1, random_images=True)


@dataclass(frozen=True)
class Training:
    """One training and what came of it.

    Attributes:
        network, seed, bits: what was trained; 32 bits are exact activations.
        accuracy: per cent of the test images.
        cpu_seconds: of the training, as the processor's clock counts them.
        kept_nbytes: what autograd keeps for backward, per image.
        attention: of an AFI, for each stage the a_ij [levels, levels], mean over test images and channels, and their
            deviation; None for others.
    """

    network: str
    seed: int
    bits: int
    accuracy: float
    cpu_seconds: float
    kept_nbytes: float
    attention: list[dict[str, list[list[float]]]] | None = None


def planned(seeds: int) -> list[tuple[str, int, int]]:
    """Network, seed and bits of every training, in order."""
    exact = [(network, seed, 32) for seed in range(seeds) for network in NETWORKS]
    return exact + [(network, seed, 4) for seed in range(seeds) for network in _PACKED]


def train(network: str, seed: int, bits: int, data: tuple[Images, Images], epochs: int) -> Training:
    """Train one network with SGD on a one-cycle schedule, and test it."""
    training, test = data
    model = build(network, seed).to(memory_format=torch.channels_last)
    # Copies: what is kept of a view is counted as all that it is a view of.
    example = {"pixel_values": training.pixels[:_BATCH].clone(), "labels": training.labels[:_BATCH].clone()}
    if bits < 32:
        # "sites" would leave what the integration keeps between layers exact.
        laconic.compress_activations(model, bits, mode="combined", example_inputs=example)
    twin = copy.deepcopy(model)
    with SavedTensorTracker(twin) as tracker:
        twin(**example)
    optimizer = torch.optim.SGD(_groups(model, 100 if network == AFI_FAST else 1), momentum=0.9, nesterov=True)
    steps = epochs * (len(training) // _BATCH)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=steps, pct_start=0.2)
    order = torch.Generator().manual_seed(seed)
    started = time.process_time()
    model.train()
    for _ in range(epochs):
        shuffled = torch.randperm(len(training), generator=order)
        for batch in shuffled[: len(shuffled) // _BATCH * _BATCH].split(_BATCH):
            pixels = training.pixels[batch].to(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(pixels).logits, training.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(pixels).logits.argmax(1) for pixels in test.pixels.split(500)])
    return Training(
        network,
        seed,
        bits,
        accuracy=100 * (guesses == test.labels).double().mean().item(),
        cpu_seconds=seconds,
        kept_nbytes=tracker.nbytes / len(example["labels"]),
        attention=_attention(model, test.pixels[:500]) if network in _AFIS else None,
    )


def _groups(model: nn.Module, attention_factor: int) -> list[dict[str, Any]]:
    """Weight decay for matrices and filters only; attention over levels at a multiple of the rate and without decay."""
    factors = {p for stage in stages(model) for p in stage.afi.parameters()} if attention_factor != 1 else set()
    others = [p for p in model.parameters() if p not in factors]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "lr": _RATE, "weight_decay": 5e-4},
        {"params": [p for p in others if p.dim() == 1], "lr": _RATE, "weight_decay": 0.0},
    ]
    if factors:
        # In the model's order, for the same updates in every run.
        attention = [p for p in model.parameters() if p in factors]
        groups.append({"params": attention, "lr": attention_factor * _RATE, "weight_decay": 0.0})
    return groups


def _attention(model: nn.Module, pixels: Tensor) -> list[dict[str, list[list[float]]]]:
    """The weights of all levels of all stages, from the scores that the stages' AFIs give to these images."""
    scores: dict[nn.Module, list[Tensor]] = {stage.afi: [] for stage in stages(model)}

    def note(afi: nn.Module, arguments: tuple[Tensor, Integrated | None]) -> None:
        scores[afi].append(afi.score(arguments[0]))  # type: ignore[operator]

    hooks = [afi.register_forward_pre_hook(note) for afi in scores]
    with torch.no_grad():
        model(pixels)
    for hook in hooks:
        hook.remove()
    found = []
    for of_stage in scores.values():
        means, deviations = [], []
        for levels in range(1, len(of_stage) + 1):
            weights = torch.softmax(torch.stack(of_stage[:levels]), 0).flatten(1)
            padding = [0.0] * (len(of_stage) - levels)
            means.append(weights.mean(1).tolist() + padding)
            deviations.append(weights.std(1).tolist() + padding)
        found.append({"mean": means, "deviation": deviations})
    return found


# --- the file of all trainings ---


def load(path: Path, setup: Setup) -> list[Training]:
    """The trainings that a file holds; none if there is no file.

    Raises:
        DataError: the file's trainings were made with another setup.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["setup"] != asdict(setup):
        raise DataError(f"{path} holds trainings with {found['setup']}, but these have {asdict(setup)}; name another")
    return [Training(**each) for each in found["trainings"]]


def extend(path: Path, setup: Setup, seeds: int, most: int | None = None) -> list[Training]:
    """Do at most `most` of the trainings that a file lacks, write each when it is done, and return all there are."""
    trainings = load(path, setup)
    done = {(each.network, each.seed, each.bits) for each in trainings}
    missing = [each for each in planned(seeds) if each not in done][:most]
    if missing:
        print(f"{len(missing)} trainings to do, of about a minute of one core each", file=sys.stderr, flush=True)
        data = _data(setup)
        for network, seed, bits in missing:
            trainings.append(train(network, seed, bits, data, setup.epochs))
            print(f"{network}, seed {seed}, {bits} bits: {trainings[-1].accuracy:.2f} %", file=sys.stderr, flush=True)
            found = {"setup": asdict(setup), "trainings": [asdict(each) for each in trainings]}
            whole = path.with_suffix(".json.new")
            whole.write_text(json.dumps(found, indent=1) + "\n")
            whole.replace(path)  # a stop while writing leaves the file of before
    return trainings


def _data(setup: Setup) -> tuple[Images, Images]:
    if setup.random_images:
        torch.manual_seed(0)
        return random_images(setup.train_images), random_images(setup.test_images)
    return fashion_mnist("train", setup.train_images), fashion_mnist("t10k", setup.test_images)


# --- tables and picture ---


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half the width of its 95 % interval by Student's t; NaN for a single value."""
    if len(values) < 2:
        return mean(values), float("nan")
    from scipy.stats import t as student

    return mean(values), student.ppf((1 + _LEVEL) / 2, len(values) - 1) * stdev(values) / sqrt(len(values))


def tables(trainings: Sequence[Training], setup: Setup) -> list[Table]:
    """Accuracy of the networks, and what 4-bit activations change; of the seeds that have all trainings of a table."""
    by_key = {(each.network, each.seed, each.bits): each for each in trainings}
    found = []
    complete = _seeds_with(by_key, [(network, 32) for network in NETWORKS])
    if complete:
        found.append(_accuracy_table(by_key, complete, setup))
    complete = _seeds_with(by_key, [(network, bits) for network in _PACKED for bits in (32, 4)])
    if complete:
        found.append(_bits_table(by_key, complete))
    return found


_Trainings = Mapping[tuple[str, int, int], Training]


def _seeds_with(by_key: _Trainings, needed: Sequence[tuple[str, int]]) -> list[int]:
    seeds = sorted({seed for _, seed, _ in by_key})
    return [seed for seed in seeds if all((network, seed, bits) in by_key for network, bits in needed)]


def _accuracy_table(by_key: _Trainings, seeds: Sequence[int], setup: Setup) -> Table:
    afi = [by_key[AFI_NAME, seed, 32].accuracy for seed in seeds]
    rows = []
    for name in NETWORKS:
        model = NETWORKS[name]()
        own = [by_key[name, seed, 32].accuracy for seed in seeds]
        center, half = interval([a - b for a, b in zip(afi, own, strict=True)])
        verdict = "better" if center > half else "worse" if center < -half else "no difference shown"
        rows.append(
            [
                name,
                f"{sum(p.numel() for p in model.parameters()):,}",
                f"{count_macs(model, 1, 1, 28, 28) / 1e6:.2f}",
                " ".join(f"{a:.2f}" for a in own),
                f"{mean(own):.2f}",
                "-" if name == AFI_NAME else f"{center:+.2f} +- {half:.2f}",
                "-" if name == AFI_NAME else verdict,
            ]
        )
    images = "random images (no result)" if setup.random_images else "Fashion-MNIST"
    return Table(
        f"Accuracy on {images}, seeds {seeds[0]} to {seeds[-1]}",
        ["network", "parameters", "MMAC", "accuracy by seed, %", "mean", "AFI minus this", "AFI is"],
        rows,
        f"Trained on {setup.train_images:,} images for {setup.epochs} epochs, tested on {setup.test_images:,}; basic "
        f"blocks of 16, 32, 64 channels; AFI and squeeze and excitation reduce by {REDUCTION}. +- is half of the "
        f"{_LEVEL:.0%} interval of the paired difference (Student's t over seeds), without a correction for "
        f"{len(NETWORKS) - 1} comparisons: the difference that this study could have shown.",
    )


def _bits_table(by_key: _Trainings, seeds: Sequence[int]) -> Table:
    rows = []
    for name in _PACKED:
        exact, packed = ([by_key[name, seed, bits] for seed in seeds] for bits in (32, 4))
        pairs = list(zip(exact, packed, strict=True))
        accuracy = interval([after.accuracy - before.accuracy for before, after in pairs])
        seconds = interval([after.cpu_seconds / before.cpu_seconds for before, after in pairs])
        kept = [each[0].kept_nbytes for each in (exact, packed)]
        rows.append(
            [
                name,
                f"{kept[0]:,.0f} -> {kept[1]:,.0f} ({kept[0] / kept[1]:.2f}x)",
                " ".join(f"{each.accuracy:.2f}" for each in exact),
                " ".join(f"{each.accuracy:.2f}" for each in packed),
                f"{accuracy[0]:+.2f} +- {accuracy[1]:.2f}",
                f"{seconds[0]:.2f} +- {seconds[1]:.2f}",
            ]
        )
    header = ["network", "kept bytes per image", "exact, %", "4 bits, %", "4 bits minus exact", "CPU time over exact"]
    note = "Kept: by autograd for backward, in a batch of 64. The same weights and batches in both; intervals as above."
    return Table(f"Exact and 4-bit activations, seeds {seeds[0]} to {seeds[-1]}", header, rows, note)


def draw(trainings: Sequence[Training], path: Path) -> None:
    """How much each level of each stage reads of each level: mean of the seeds, and deviation over channels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {name: [each.attention for each in trainings if each.network == name and each.bits == 32] for name in _AFIS}
    found = {name: attention for name, attention in found.items() if attention}
    if not found:
        return
    num_stages = len(next(iter(found.values()))[0] or ())
    size = (3.6 * num_stages, 4.8 * len(found))
    figure, axes = plt.subplots(len(found), num_stages, figsize=size, squeeze=False, layout="constrained")
    for row, (name, of_seeds) in zip(axes, found.items(), strict=True):
        for number, axis in enumerate(row):
            means, deviations = (
                torch.tensor([of[number][key] for of in of_seeds if of]).mean(0).tolist()
                for key in ("mean", "deviation")
            )
            levels = len(means)
            axis.imshow(means, vmin=0, vmax=1, cmap="Blues")
            for i in range(levels):
                for j in range(i + 1):
                    text = f"{means[i][j]:.3f}\n\N{PLUS-MINUS SIGN} {deviations[i][j]:.3f}"
                    axis.text(j, i, text, ha="center", va="center", color="white" if means[i][j] > 0.6 else "black")
            axis.set_xticks(range(levels), range(1, levels + 1))
            axis.set_yticks(range(levels), range(1, levels + 1))
            axis.set_title(f"{name}\nstage {number + 1}", fontsize=9)
        row[0].set_ylabel("level that reads, i")
    for axis in axes[-1]:
        axis.set_xlabel("level read, j")
    figure.suptitle("attention $a_{ij}$: mean and deviation over images and channels, mean of the seeds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


@benchmark("afi")
def afi(options: Options) -> list[Table]:
    """The tables of as many seeds as there are rounds; `python -m benchmarks.afi` keeps what it has trained."""
    setup = _SMOKE if options.smoke else Setup()
    data = _data(setup)
    return tables([train(*each, data, setup.epochs) for each in planned(options.rounds)], setup)


def main(arguments: Sequence[str]) -> int:
    """Train what is missing, and write tables and picture of what there is; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.afi", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the results, without .json, .md and .png")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, help="trainings to do now (default: all)")
    parser.add_argument("--smoke", action="store_true", help="a tiny case that only shows that the benchmark runs")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    setup = _SMOKE if chosen.smoke else Setup()
    trainings = extend(chosen.out.with_suffix(".json"), setup, chosen.seeds, chosen.most)
    draw(trainings, chosen.out.with_suffix(".png"))
    command = f"python -m benchmarks.afi --out {chosen.out} --seeds {chosen.seeds}"
    image = f"![attention over levels]({chosen.out.name}.png)\n"
    text = "\n".join([report_head("afi", command), *(table.render() for table in tables(trainings, setup)), image])
    chosen.out.with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
