"""A comparison of plans as text, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from laconic.errors import ConfigError
from laconic.infer.bench.compare import SHARES, Comparison, PlanResult
from laconic.text_columns import columns


def report_text(comparison: Comparison) -> str:
    """Return the tables: medians over the rounds, and lowest to highest."""
    requests = comparison.num_requests
    lines = [
        f"{requests} requests, {comparison.num_prompt_tokens} tokens of prompts, {comparison.num_new_tokens} new"
        " tokens; median of the rounds (lowest to highest)",
        "",
        "all at once",
        columns(
            ["plan", "tokens/s", "", "answers as the first plan's"],
            [
                [str(each.plan), *_cells(each.tokens_per_second, "{:.0f}"), f"{each.same_answers} of {requests}"]
                for each in comparison.results
            ],
            left="all",
            rule=False,
        ),
    ]
    for rate in comparison.results[0].latency:
        lines += ["", f"Poisson arrivals, {rate:g} requests/s, milliseconds"]
        header = ["plan", *(f"{name} p{share}" for name in ("TTFT", "TPOT") for share in SHARES)]
        rows = [
            [
                str(each.plan),
                *(
                    " ".join(cell for cell in _cells([1e3 * one for one in samples], "{:.1f}") if cell)
                    for name in ("first_token", "per_token")
                    for samples in _percentile_samples(each, rate, name)
                ),
            ]
            for each in comparison.results
        ]
        lines.append(columns(header, rows, left="all", rule=False))
    return "\n".join(lines)


def report_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything as JSON can hold it; seconds, and samples of all rounds."""
    return {
        "requests": comparison.num_requests,
        "prompt_tokens": comparison.num_prompt_tokens,
        "new_tokens": comparison.num_new_tokens,
        "tried_tokens_per_second": comparison.swept,
        "percentiles": list(SHARES),
        "plans": [
            {
                "name": str(each.plan),
                "kind": each.plan.kind,
                "plan": asdict(each.plan.plan),
                "tokens_per_second": each.tokens_per_second,
                "same_answers": each.same_answers,
                "latency": [
                    {
                        "requests_per_second": rate,
                        "first_token_seconds": [list(one.first_token) for one in found],
                        "per_token_seconds": [list(one.per_token) for one in found],
                    }
                    for rate, found in each.latency.items()
                ],
            }
            for each in comparison.results
        ],
    }


def check_plots() -> None:
    """Check that pictures can be made; ConfigError without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the picture of --output needs matplotlib ({error}): pip install 'laconic[plots]'"
        ) from error


def save_report(comparison: Comparison, folder: Path, about: dict[str, Any]) -> list[Path]:
    """Write bench_infer.json, with what `about` says of the run, and bench_infer.png; returns both."""
    from matplotlib.figure import Figure

    values = folder / "bench_infer.json"
    values.write_text(json.dumps(about | report_json(comparison), indent=2) + "\n", encoding="utf-8")

    figure = Figure(figsize=(13, 4), layout="constrained")
    throughput, *latencies = figure.subplots(1, 3)
    names = [str(each.plan).replace(" ", "\n", 1) for each in comparison.results]
    middles = [median(each.tokens_per_second) for each in comparison.results]
    spreads = [
        [middle - min(each.tokens_per_second) for middle, each in zip(middles, comparison.results, strict=True)],
        [max(each.tokens_per_second) - middle for middle, each in zip(middles, comparison.results, strict=True)],
    ]
    colors = [f"C{number}" for number in range(len(names))]
    throughput.bar(names, middles, yerr=spreads, capsize=4, color=colors)
    throughput.set(title="All requests at once", ylabel="tokens per second")
    throughput.tick_params(axis="x", labelsize=8)
    for axes, name, title in zip(
        latencies, ("first_token", "per_token"), ("First token", "Time per output token"), strict=True
    ):
        for color, each in zip(colors, comparison.results, strict=True):
            rates = sorted(each.latency)
            for number, style in enumerate(("-", "--", ":")):
                samples = [_percentile_samples(each, rate, name)[number] for rate in rates]
                if all(samples):
                    values_ms = [1e3 * median(one) for one in samples]
                    label = f"{each.plan}" if number == 0 else None
                    axes.plot(rates, values_ms, style, marker="o", markersize=3, color=color, label=label)
        axes.set(
            title=title, xlabel="requests per second", ylabel="milliseconds (p50 -, p90 --, p99 :)", ylim=(0, None)
        )
    latencies[0].legend(fontsize=8, frameon=False)
    picture = folder / "bench_infer.png"
    figure.savefig(picture, dpi=150)
    return [values, picture]


def _percentile_samples(result: PlanResult, rate: float, name: str) -> list[list[float]]:
    """Return, for each of SHARES, the value of every round that has one."""
    rounds = [getattr(one, name) for one in result.latency[rate]]
    return [[one[number] for one in rounds if one] for number in range(len(SHARES))]


def _cells(samples: Sequence[float], form: str) -> list[str]:
    if not samples:
        return ["-", ""]
    return [form.format(median(samples)), f"({form.format(min(samples))} to {form.format(max(samples))})"]
