"""Memory against time, one panel a group."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

# Okabe and Ito's colours, which stay apart for colour-blind eyes; markers differ, too.
_STYLES = {
    "laconic": ("#0072B2", "o"),
    "exact": ("#000000", "*"),
    "torch": ("#D55E00", "s"),
}
_OTHERS = ("#009E73", "^")


@dataclass(frozen=True)
class Point:
    """One contender."""

    name: str
    time: float
    """Of exact."""
    memory: float
    """Of exact."""


def draw(panels: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw a panel for each group; lower and further left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7.2 * columns, 5.2 * lines), squeeze=False)
    for axis, (title, points) in zip(axes.flat, panels.items(), strict=False):
        low, high = min(point.time for point in points), max(point.time for point in points)
        if high > 4 * low:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        at = _apart([point.memory for point in points], 0.052 * _span(points))
        for point, height in zip(points, at, strict=True):
            color, marker = _style(point.name)
            axis.plot(point.time, point.memory, marker, color=color, markersize=11 if marker == "*" else 7)
            axis.annotate(
                point.name,
                (point.time, point.memory),
                (1.02, height),
                textcoords=axis.get_yaxis_transform(),
                fontsize=8,
                color=color,
                va="center",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)},
            )
        axis.set_title(title)
        axis.set_xlabel("step time, of exact" + (" (log)" if high > 4 * low else ""))
        axis.set_ylabel("peak of a step beside the weights, of exact")
        axis.set_ylim(bottom=min(0.0, min(at)), top=max(1.05 * max(point.memory for point in points), max(at)))
        axis.grid(alpha=0.25)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    line = "\n" if columns == 1 else " "
    figure.suptitle(f"Circles laconic, squares torch, triangles other peers;{line}lower and further left is better")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.05 / lines))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _style(name: str) -> tuple[str, str]:
    """Colour and marker; what is laconic's in combination with another counts as laconic's."""
    words = re.split(r"[ ,.]+", name)
    return _STYLES.get("laconic" if "laconic" in words else words[0], _OTHERS)


def _span(points: Sequence[Point]) -> float:
    return 1.05 * max(point.memory for point in points)


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights moved as little as it takes to be `least` apart, in the order they were in."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    # What has to be moved together stays around its own middle: pool neighbours whose offsets do not rise.
    pools: list[list[float]] = []
    for place, number in enumerate(order):
        pools.append([heights[number] - place * least])
        while len(pools) > 1 and fmean(pools[-2]) >= fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    starts = [fmean(pool) for pool in pools for _ in pool]
    moved = [0.0] * len(heights)
    for place, number in enumerate(order):
        moved[number] = starts[place] + place * least
    return moved
