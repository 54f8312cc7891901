"""A chart of a prediction: stacked bytes by rank, and the budget."""

from __future__ import annotations

from pathlib import Path

from laconic.cost.memory.predict import Prediction
from laconic.errors import PlanError


def save_chart(prediction: Prediction, path: str | Path, budget_nbytes: int | None = None, title: str = "") -> None:
    """Write a PNG (or whatever the name's ending says)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(f"a chart needs matplotlib ({error}): pip install 'laconic[plots]'") from error
    figure = Figure(figsize=(2.5 + 0.9 * max(4, len(prediction.ranks)), 4.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"rank {rank.rank}\n({rank.in_flight} in flight)" for rank in prediction.ranks]
    below = [0.0] * len(labels)
    for kind in prediction.ranks[0].kinds:
        heights = [rank.kinds[kind] / 1e9 for rank in prediction.ranks]
        if any(heights):
            axes.bar(labels, heights, bottom=below, label=kind, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if budget_nbytes is not None:
        axes.axhline(budget_nbytes / 1e9, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set_ylabel("predicted peak, GB")
    axes.set_title(title)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise PlanError(f"chart is {str(path)!r}, but it cannot be written: {error}") from error
