"""The page with pictures of the main results, drawn from the committed tables in benchmarks/results."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = "benchmarks_pictures.md"
_INK = "#7b858f"
"""Of text and axes: read on white and on the dark theme's slate."""
_COLORS = ("#8a8f98", "#d9822b", "#0f9d8c", "#5a7fd6", "#b259b0", "#7aa93c")


@dataclass(frozen=True)
class Table:
    """A table of a file of results.

    Attributes:
        title: the heading above it.
        rows: from the first cell of a row to the cells by the head of their column.
    """

    title: str
    rows: dict[str, dict[str, str]]

    def number(self, row: str, column: str) -> float:
        """The number that a cell begins with."""
        found = re.match(r"-?[\d.,]+", self.rows[row][column])
        assert found is not None, f"{self.title}: {row}, {column} is {self.rows[row][column]!r}"
        return float(found[0].replace(",", ""))


def tables(name: str) -> list[Table]:
    """All tables of benchmarks/results/NAME.md."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if len(cells) > 2:
            head = _distinct(cells[0])
            found.append(Table(title.strip(), {row[0]: dict(zip(head, row, strict=True)) for row in cells[2:]}))
    return found


def _distinct(head: list[str]) -> list[str]:
    """Heads that occur twice begin with the quantity left of them: "step of exact", "peak of exact"."""
    pairs = zip(["", *head], head, strict=False)
    return [f"{left.partition(',')[0]} {name}" if head.count(name) > 1 else name for left, name in pairs]


def _time_and_peak(axes: Any) -> None:
    rows = ("checkpointing", "laconic, 4 bits", "laconic, 4 bits, chunked loss")
    found = [table for table in tables("model_step_xeon_202611") if "1 thread" in table.title]
    for color, row in zip(_COLORS[1:], rows, strict=False):
        times = [table.number(row, "step of exact") for table in found]
        axes.scatter(times, [table.number(row, "peak of exact") for table in found], label=row, color=color, s=42)
    axes.scatter([1], [1], label="exact", color=_COLORS[0], marker="s", s=42)
    axes.set_xlabel("time of a step, of the exact step's")
    axes.set_ylabel("peak memory, of the exact step's")
    axes.set_ylim(0, 1.08)


def _training_steps(axes: Any) -> None:
    found = tables("zip_training_xeon_202611")
    labels = [re.sub(r", (\d+) hosts?, (\d+) Mbit/s.*", r"\n\1 hosts, \2 Mbit/s", table.title) for table in found]
    names = {"gloo": "gloo", "raw": "uncoded", "auto": "laconic, auto"}
    _bars(axes, labels, {label: [table.number(row, "step, s") for table in found] for row, label in names.items()})
    axes.set_ylabel("seconds of a training step")


def _dispatch(axes: Any) -> None:
    found = [table for table in tables("moe_dispatch_xeon_202611") if table.title.startswith("Balanced")][:2]
    labels = [re.sub(r"Balanced routing, (.*?), (\d+ \wbit/s).*", r"\1,\n\2", table.title) for table in found]
    names = {
        "flat": "all-to-all",
        "dedup, 2 levels": "in levels",
        "dedup, 2 levels, lossless": "in levels, lossless",
        "dedup, 2 levels, int8": "in levels, 8 bits",
    }
    _bars(axes, labels, {label: [table.number(row, "ms") for table in found] for row, label in names.items()})
    axes.set_ylabel("ms for dispatch and combine")
    axes.set_yscale("log")


def _vision(axes: Any) -> None:
    found = tables("vision_step_xeon_202611")
    markers = ("o", "s", "^", "D", "v")
    rows = ("exact", "laconic, 8 bits", "laconic, 4 bits", "checkpointing of blocks", "checkpointing of stages")
    for color, row in zip((_COLORS[0], *_COLORS[2:4], *_COLORS[1:2], _COLORS[4]), rows, strict=True):
        for number, table in enumerate(found):
            if row in table.rows:
                share = table.number(row, "kept, MB") / table.number("exact", "kept, MB")
                label = row if number == 0 else None
                axes.scatter(
                    table.number(row, "over exact"), share, color=color, marker=markers[number], label=label, s=42
                )
    axes.set_xlabel("time of a step, of the exact step's")
    axes.set_ylabel("kept for backward, of exact")
    axes.set_ylim(0, 1.08)


def _bars(axes: Any, labels: Sequence[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axes.bar(places, values, width * 0.92, label=label, color=_COLORS[number])
    axes.set_xticks(range(len(labels)), labels)


@dataclass(frozen=True)
class _Chart:
    title: str
    name: str
    draw: Callable[[Any], None]
    source: str
    about: str


_CHARTS = (
    _Chart(
        "Memory against time",
        "model_step",
        _time_and_peak,
        "model_step_xeon_202611",
        "Whole steps of Llama, Qwen3 and GPT-NeoX in three sizes, one thread; a point is a model. Low and left is"
        " better.",
    ),
    _Chart(
        "Training over slow links",
        "zip_training",
        _training_steps,
        "zip_training_xeon_202611",
        "FSDP2 on four hosts (network namespaces on two cores): torch's gloo, laconic's collectives uncoded, and coded"
        " where that pays.",
    ),
    _Chart(
        "Tokens to experts",
        "moe_dispatch",
        _dispatch,
        "moe_dispatch_xeon_202611",
        "Top-8 of 128 experts, two nodes of four ranks, on a logarithmic scale.",
    ),
    _Chart(
        "Images",
        "vision_step",
        _vision,
        "vision_step_xeon_202611",
        "Convolutional networks, fp32, one thread; the shape of a point is the network. Low and left is better.",
    ),
)


def pages() -> dict[str, str | bytes]:
    """The page and its pictures (SVG) by place in the site."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    made: dict[str, str | bytes] = {}
    parts = [
        "# Benchmarks in pictures\n\nThe main results, drawn from the tables that the benchmarks wrote. CPUs and"
        " emulated networks; no GPU yet. Numbers and what did not gain: [benchmarks](benchmarks.md).\n"
    ]
    style = {name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "laconic", "font.size": 11}):
        for chart in _CHARTS:
            figure = Figure(figsize=(7.2, 4.0), layout="constrained")
            axes = figure.subplots()
            chart.draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=9)
            out = io.BytesIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
            made[f"charts/{chart.name}.svg"] = out.getvalue()
            link = f"[{chart.source}](files/benchmarks/results/{chart.source}.md)"
            parts.append(
                f"## {chart.title}\n\n{chart.about}\n\n![{chart.title}](charts/{chart.name}.svg)\n\nFrom {link}.\n"
            )
    parts.append(_loss_curves())
    return made | {PAGE: "\n".join(parts)}


def sources() -> list[str]:
    """Files of the repository that the page links to or shows."""
    names = [f"{chart.source}.md" for chart in _CHARTS] + [f"{name}.png" for name in _SHOWN]
    return [f"benchmarks/results/{name}" for name in names]


_SHOWN = {
    "quality_50m_xeon_202611": "Everything in 8 and 4 bits beside exact training, 50 million parameters",
    "quality_adamw_10m_xeon_202611": "8-bit AdamW beside exact AdamW, 10 million parameters",
    "moe_training_xeon_202611": "Mixtures of experts over slow links",
    "afi_202611": "Attention of an AFI-Net over its levels",
}


def _loss_curves() -> str:
    picture = "files/benchmarks/results/{}.png"
    shown = [f"### {about}\n\n![{about}]({picture.format(name)})\n" for name, about in _SHOWN.items()]
    return "## Training\n\n" + "\n".join(shown)
