"""Held-out loss of a small Llama with activations kept exactly and in every 4- and 8-bit format, over several seeds.

    python -m benchmarks.quality --out benchmarks/results/quality_NAME

trains one model per format and seed with `laconic train` (byte-level text, the Python standard library) and writes
NAME.md (means, differences from exact by seed) and NAME.png (loss curves). Runs that are complete under --runs are
read and not repeated, so an interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from laconic.train.metrics import read_metrics

FORMATS: dict[str, list[str]] = {
    "exact": ["--activations.bits", "16"],
    "nf4": ["--activations.format", "nf4"],
    "e2m1": ["--activations.format", "e2m1"],
    "int4": ["--activations.format", "int4"],
    "int8": ["--activations.bits", "8"],
}
"""What is compared, as flags of `laconic train`; everything else is the same."""

BOUND = 0.006
"""How much worse than exact the mean over seeds may be, in nats per byte."""


def run_dir(runs: Path, name: str, seed: int) -> Path:
    """Where the run of a format and seed is."""
    return runs / f"{name}-{seed}"


def train(options: argparse.Namespace, name: str, seed: int) -> None:
    """Trains one model unless it has been trained."""
    directory = run_dir(options.runs, name, seed)
    if (directory / "summary.json").exists():
        return
    sizes = ["--batch-size", "16", "--sequence-length", "128", "--eval-sequences", "1024", "--eval-every", "100"]
    command = [sys.executable, "-m", "laconic", "train", "--nproc", "1", "--steps", str(options.steps)]
    command += [*sizes, "--seed", str(seed), "--run-dir", str(directory), *FORMATS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"{name} seed {seed}: validation loss {final_loss(directory):.4f}", flush=True)


def final_loss(directory: Path) -> float:
    """The last validation loss of a run, nats per byte."""
    return [row["validation_loss"] for row in read_metrics(directory) if "validation_loss" in row][-1]


def table(options: argparse.Namespace) -> tuple[str, bool]:
    """The comparison as Markdown, and whether every format stays within the bound."""
    seeds = range(options.seeds)
    exact = [final_loss(run_dir(options.runs, "exact", seed)) for seed in seeds]
    saved = {name: read_metrics(run_dir(options.runs, name, 0))[0]["saved_nbytes"] for name in FORMATS}
    header = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| kept for backward | {header} | mean | from exact | standard error | bytes kept |",
        "|---|" + "---|" * (len(seeds) + 4),
    ]
    passed = True
    for name in FORMATS:
        losses = [final_loss(run_dir(options.runs, name, seed)) for seed in seeds]
        apart = [loss - reference for loss, reference in zip(losses, exact, strict=True)]
        difference = mean(apart)
        error = stdev(apart) / sqrt(len(apart)) if len(apart) > 1 else float("nan")
        passed &= difference <= BOUND
        cells = " | ".join(f"{loss:.4f}" for loss in losses)
        share = saved[name] / saved["exact"]
        lines.append(f"| {name} | {cells} | {mean(losses):.4f} | {difference:+.4f} | {error:.4f} | {share:.2f}x |")
    return "\n".join(lines), passed


def draw(options: argparse.Namespace, path: Path) -> None:
    """Training loss (smoothed, mean over seeds) and validation loss, and the difference from exact below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def curve(name: str, key: str) -> tuple[list[int], list[float]]:
        rows = [read_metrics(run_dir(options.runs, name, seed)) for seed in range(options.seeds)]
        picked = [{row["step"]: row[key] for row in run if key in row} for run in rows]
        steps = sorted(picked[0])
        return steps, [mean(values[step] for values in picked) for step in steps]

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.5), height_ratios=(3, 2), sharex=True)
    styles = {
        "exact": ("black", "-"),
        "nf4": ("C0", "-"),
        "e2m1": ("C1", "--"),
        "int4": ("C2", "-."),
        "int8": ("C3", ":"),
    }
    window = 25
    smooth_exact: list[float] = []
    for name, (color, line) in styles.items():
        steps, losses = curve(name, "loss")
        smooth = [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
        smooth_exact = smooth_exact or smooth
        top.plot(steps, smooth, color=color, linestyle=line, linewidth=1.2, label=name)
        top.plot(*curve(name, "validation_loss"), color=color, linestyle="none", marker="o", markersize=3)
        apart = [ours - exact for ours, exact in zip(smooth, smooth_exact, strict=True)]
        bottom.plot(steps[window:], apart[window:], color=color, linestyle=line, linewidth=1.2)
    top.set_ylabel("loss, nats per byte")
    top.set_ylim(top.get_ylim()[0], 3.2)
    top.set_title(f"Byte-level Llama, activations kept in five ways (mean of {options.seeds} seeds; dots: validation)")
    top.legend()
    bottom.axhspan(-BOUND, BOUND, color="0.92")
    bottom.set_ylabel("training loss minus exact")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, without .md and .png")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(train, options, name, seed) for seed in range(options.seeds) for name in FORMATS]
        for job in jobs:
            job.result()
    text, passed = table(options)
    draw(options, options.out.with_suffix(".png"))
    command = f"python -m benchmarks.quality --seeds {options.seeds} --steps {options.steps} --out {options.out}"
    lines = [
        "# Held-out loss by what is kept for backward",
        "",
        f"`{command}`",
        "",
        "Llama, 0.9 million parameters, bytes of the Python standard library, 16 x 128 bytes per step, fp32 on a CPU;",
        "final validation loss in nats per byte. A seed decides weights and order of data; formats share both.",
        "The standard error is that of the difference, from its spread over the seeds: runs of one seed part by chance",
        "while the curve is steep, so a difference within two of them says nothing.",
        "",
        text,
        "",
        f"No format more than {BOUND} worse than exact on the mean: {'true' if passed else 'FALSE'}.",
        "",
        f"![loss curves]({options.out.name}.png)",
    ]
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
