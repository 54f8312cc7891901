"""Held-out loss of small Llamas trained exactly and with everything that laconic changes, over several seeds.

    python -m benchmarks.quality formats --out benchmarks/results/quality_NAME

trains one model per setting and seed with `laconic train` (byte-level text, the Python standard library) and writes
NAME.md (means, differences from exact by seed) and NAME.png (loss curves). Comparisons: `formats` (how activations are
kept), `attention` (how attention is kept), `parts` (activations, optimizer and gradients, alone and together),
`optimizer` (bits of AdamW's moments). Runs
that are complete under --runs are read and not repeated, others go on from their last checkpoint: an interrupted
benchmark continues where it stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from laconic.train.report.metrics import read_metrics

BOUND = 0.006
"""How much worse than exact the mean over seeds may be, in nats per byte."""

_EXACT = ["--recipe", "exact"]
_A = ["--activations.bits", "4"]
_O = ["--optimizer.kind", "adamw8bit"]
# Two processes and two micro-batches each, so that gradients are both accumulated and reduced in their codes.
_G = ["--nproc", "2", "--accumulation", "2", "--gradients.reduce", "q8", "--gradients.bits"]

COMPARISONS: dict[str, dict[str, list[str]]] = {
    "formats": {
        "exact": _EXACT,
        "nf4": [*_EXACT, "--activations.bits", "4", "--activations.format", "nf4"],
        "e2m1": [*_EXACT, "--activations.bits", "4", "--activations.format", "e2m1"],
        "int4": [*_EXACT, "--activations.bits", "4", "--activations.format", "int4"],
        "int5": [*_EXACT, "--activations.bits", "5"],
        "int6": [*_EXACT, "--activations.bits", "6"],
        "int8": [*_EXACT, "--activations.bits", "8"],
    },
    "attention": {
        "exact": _EXACT,
        "nf4, attention exact": [*_EXACT, *_A, "--activations.attention", "exact"],
        "nf4, attention int8": [*_EXACT, *_A, "--activations.attention", "int8"],
        "nf4, attention nf4": [*_EXACT, *_A, "--activations.attention", "nf4"],
        "nf4, attention nf4 with a saved statistic": [*_EXACT, *_A, "--activations.attention", "exact"],
    },
    "parts": {
        "exact": _EXACT,
        # The same sums in another order: how far a run goes astray by rounding alone.
        "exact, reordered": [*_EXACT, "--accumulation", "2"],
        "A": [*_EXACT, *_A, "--activations.attention", "int8"],
        "O": [*_EXACT, *_O],
        "G": [*_EXACT, *_G, "8"],
        "A+O": [*_EXACT, *_A, "--activations.attention", "int8", *_O],
        "A+O+G": [*_EXACT, *_A, "--activations.attention", "int8", *_O, *_G, "8"],
    },
    "optimizer": {
        "exact": _EXACT,
        "8 bits": [*_EXACT, *_O],
        "4 bits": [*_EXACT, "--optimizer.kind", "adamw4bit"],
    },
}
"""What is compared with "exact", which comes first: by setting the flags of `laconic train`; all else is the same."""


@dataclass(frozen=True)
class Size:
    """A model and the length of its training."""

    parameters: str
    flags: tuple[str, ...]
    batch_size: int
    steps: int
    eval_sequences: int = 1024
    eval_every: int = 100


SIZES = {
    "brief": Size("0.9 million", (), 4, 150, eval_sequences=128, eval_every=150),
    "small": Size("0.9 million", (), 16, 600),
    "medium": Size(
        "10 million",
        (
            *("--model.hidden-size", "320", "--model.intermediate-size", "864"),
            *("--model.num-hidden-layers", "8", "--model.num-attention-heads", "5"),
            *("--optimizer.learning-rate", "1e-3"),
        ),
        8,
        400,
    ),
    "large": Size(
        "50 million",
        (
            *("--model.hidden-size", "640", "--model.intermediate-size", "1728"),
            *("--model.num-hidden-layers", "10", "--model.num-attention-heads", "10"),
            *("--optimizer.learning-rate", "6e-4", "--optimizer.warmup-steps", "50"),
        ),
        4,
        1000,
        eval_sequences=512,
        eval_every=250,
    ),
}
_SEQUENCE_LENGTH = 128


def chosen(options: argparse.Namespace) -> dict[str, list[str]]:
    """The settings that are compared, and their flags."""
    settings = COMPARISONS[options.comparison]
    return {name: flags for name, flags in settings.items() if name == "exact" or name in (options.only or settings)}


def run_dir(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Where the run of a setting and seed is."""
    directory: Path = options.runs / options.size / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}"
    return directory


def train(options: argparse.Namespace, name: str, seed: int) -> None:
    """Trains one model unless it has been trained."""
    directory = run_dir(options, name, seed)
    if (directory / "summary.json").exists():
        return
    size = SIZES[options.size]
    shape = ["--batch-size", str(size.batch_size), "--sequence-length", str(_SEQUENCE_LENGTH), *size.flags]
    shape += ["--eval-sequences", str(size.eval_sequences), "--eval-every", str(size.eval_every)]
    shape += ["--checkpoint.every", "50", "--checkpoint.keep", "1"]
    module = "benchmarks.saved_statistic" if "saved statistic" in name else "laconic"
    command = [sys.executable, "-m", module, "train", "--steps", str(size.steps)]
    command += [*shape, "--seed", str(seed), "--run-dir", str(directory), *COMPARISONS[options.comparison][name]]
    if "--nproc" not in command:
        command += ["--nproc", "1"]
    if (directory / "checkpoints" / "latest").exists():
        command.append("--resume")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    loss, minutes = final_loss(directory), _minutes(directory)
    print(f"{name} seed {seed}: validation loss {loss:.4f}, {minutes:.1f} minutes of steps", flush=True)


def final_loss(directory: Path) -> float:
    """The last validation loss of a run, nats per byte."""
    return [row["validation_loss"] for row in read_metrics(directory) if "validation_loss" in row][-1]


def _minutes(directory: Path) -> float:
    """What the steps of a run took, over all of its starts."""
    return sum(row.get("step_seconds", 0.0) for row in read_metrics(directory)) / 60


def table(options: argparse.Namespace) -> str:
    """The comparison as Markdown, with what is further from exact than the bound named below."""
    seeds = range(options.seeds)
    settings = chosen(options)
    exact = [final_loss(run_dir(options, "exact", seed)) for seed in seeds]
    saved = {
        name: read_metrics(run_dir(options, name, 0))[0]["saved_nbytes"] * _micro_batches(flags)
        for name, flags in settings.items()
    }
    header = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| setting | {header} | mean | from exact | standard error | activation bytes |",
        "|---|" + "---|" * (len(seeds) + 4),
    ]
    worse = []
    for name in settings:
        losses = [final_loss(run_dir(options, name, seed)) for seed in seeds]
        apart = [loss - reference for loss, reference in zip(losses, exact, strict=True)]
        difference = mean(apart)
        error = f"{stdev(apart) / sqrt(len(apart)):.4f}" if len(apart) > 1 else "one seed"
        if difference > BOUND:
            worse.append(f"{name} ({difference:+.4f}, standard error {error})")
        cells = " | ".join(f"{loss:.4f}" for loss in losses)
        share = saved[name] / saved["exact"]
        lines.append(f"| {name} | {cells} | {mean(losses):.4f} | {difference:+.4f} | {error} | {share:.2f}x |")
    verdict = f"More than {BOUND} worse than exact on the mean: {', '.join(worse) if worse else 'none'}."
    minutes = sum(_minutes(run_dir(options, name, seed)) for name in settings for seed in seeds)
    return "\n".join(
        [*lines, "", verdict, "", f"Steps of all runs took {minutes:.0f} minutes, one thread per process."]
    )


def _micro_batches(flags: list[str]) -> int:
    """Into how many pieces a batch is cut, over processes and in time."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    return int(given.get("--nproc", 1)) * int(given.get("--accumulation", 1))


def draw(options: argparse.Namespace, path: Path) -> None:
    """Training loss (smoothed, mean over seeds) and validation loss, and the difference from exact below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def curve(name: str, key: str) -> tuple[list[int], list[float]]:
        rows = [read_metrics(run_dir(options, name, seed)) for seed in range(options.seeds)]
        picked = [{row["step"]: row[key] for row in run if key in row} for run in rows]
        steps = sorted(picked[0])
        return steps, [mean(values[step] for values in picked) for step in steps]

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.5), height_ratios=(3, 2), sharex=True)
    window = 25
    smooth_exact: list[float] = []
    for number, name in enumerate(chosen(options)):
        color = "black" if number == 0 else f"C{(number - 1) % 10}"
        line = ("-", "--", "-.", ":")[max(number - 1, 0) % 4]
        steps, losses = curve(name, "loss")
        smooth = [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
        smooth_exact = smooth_exact or smooth
        top.plot(steps, smooth, color=color, linestyle=line, linewidth=1.2, label=name)
        top.plot(*curve(name, "validation_loss"), color=color, linestyle="none", marker="o", markersize=3)
        apart = [ours - exact for ours, exact in zip(smooth, smooth_exact, strict=True)]
        bottom.plot(steps[window:], apart[window:], color=color, linestyle=line, linewidth=1.2)
    top.set_ylabel("loss, nats per byte")
    top.set_ylim(top.get_ylim()[0], 3.2)
    top.set_title(
        f"Byte-level Llama, {SIZES[options.size].parameters} parameters: {options.comparison} "
        f"({'one seed' if options.seeds == 1 else f'mean of {options.seeds} seeds'}; dots: validation)"
    )
    top.legend()
    bottom.axhspan(-BOUND, BOUND, color="0.92")
    bottom.set_ylabel("training loss minus exact")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--out", type=Path, help="the results, without .md and .png; none: only train what is missing")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="where the runs are kept")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="only these settings beside exact")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    options = parser.parse_args()
    names = [(name, seed) for seed in range(options.seeds) for name in chosen(options)]
    left = sum(not (run_dir(options, name, seed) / "summary.json").exists() for name, seed in names)
    print(
        f"{left} of {len(names)} runs are to do, of {SIZES[options.size].steps} steps each; each says how long it took",
        flush=True,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(train, options, name, seed) for name, seed in names]
        for job in jobs:
            job.result()
    if options.out is None:
        return
    text = table(options)
    draw(options, options.out.with_suffix(".png"))
    size = SIZES[options.size]
    command = f"python -m benchmarks.quality {options.comparison} --size {options.size} --seeds {options.seeds}"
    if options.only:
        command += " --only " + " ".join(f"'{name}'" for name in options.only)
    lines = [
        f"# Held-out loss: {options.comparison}, {size.parameters} parameters",
        "",
        f"`{command} --out {options.out}`",
        "",
        f"Llama, {size.parameters} parameters, bytes of the Python standard library, {size.batch_size} x "
        f"{_SEQUENCE_LENGTH} bytes per step, {size.steps} steps,",
        "fp32 on a CPU; final validation loss in nats per byte. A seed decides weights and order of data, which all",
        "settings share. The standard error is that of the difference, from its spread over the seeds: runs of one",
        "seed part by chance while the curve is steep, so a difference within two of them says nothing.",
        "",
        text,
        "",
        f"![loss curves]({options.out.name}.png)",
    ]
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(text)


if __name__ == "__main__":
    main()
