"""The measured ways side by side: which of them no other beats, as text, data and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.advice.link import Link
from laconic.cost.sizes import format_nbytes
from laconic.errors import ConfigError
from laconic.text_columns import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOUND_SHARE = 0.9
"""Share of a step from which on the host is what takes it: a device that keeps up is done soon after its last order."""


@dataclass(frozen=True)
class Row:
    """One way, measured.

    Attributes:
        name: of the way.
        nbytes: that autograd keeps for backward on the device, parameters and buffers left out.
        host_nbytes: kept in pinned host memory.
        seconds: of forward and backward, the median of the rounds.
        fastest_seconds, slowest_seconds: of the rounds.
        slowdown: seconds over those of the exact model in the same round, the median of the rounds; on a busy machine
            it is steadier than `seconds`.
        least_slowdown, most_slowdown: of the rounds.
        peak_nbytes: the most in use during forward and backward beyond what was before; None if not measurable.
        gradient_error: the distance of all gradients from the exact ones, relative to these, in the Euclidean norm.
        worst_error, worst_parameter: the same of the parameter where it is largest, among those with at least a
            thousandth of the whole gradient's norm.
        host_seconds: of these until the host has given the device all its work; None on the CPU.
        lines: of Python that do it to `model`.
    """

    name: str
    nbytes: int
    host_nbytes: int
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    slowdown: float
    least_slowdown: float
    most_slowdown: float
    peak_nbytes: int | None
    gradient_error: float
    worst_error: float
    worst_parameter: str
    lines: tuple[str, ...]
    host_seconds: float | None = None

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the device waits for the host, which then decides how long a step takes."""
        return self.host_seconds is not None and self.host_seconds >= BOUND_SHARE * self.seconds


@dataclass(frozen=True)
class Advice:
    """The result of `laconic.advise`; `print` it.

    Attributes:
        model: the class of the model, and how many parameters it has.
        device: that it was measured on.
        loss: where the loss was found.
        rounds: of timing.
        rows: measured ways, the exact model first.
        left_out: ways that were not measured -> why.
        link: what averaging the gradients takes; None without other ranks.
    """

    model: str
    device: str
    loss: str
    rounds: int
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    link: Link | None = None

    @property
    def front(self) -> tuple[Row, ...]:
        """Rows that no other row beats, by bytes kept: the fewest first.

        One row beats another if it is no worse in bytes, slowdown and gradient error, and better in one. Errors up
        to twice that of the exact model's second run, or a millionth, count as none.
        """
        floor = max(1e-6, 2 * self.rows[0].gradient_error)

        def costs(row: Row) -> tuple[float, float, float]:
            return row.nbytes, row.slowdown, row.gradient_error if row.gradient_error > floor else 0.0

        def beats(a: Row, b: Row) -> bool:
            return costs(a) != costs(b) and all(x <= y for x, y in zip(costs(a), costs(b), strict=True))

        rows = [row for row in self.rows if not any(beats(other, row) for other in self.rows)]
        return tuple(sorted(rows, key=lambda row: row.nbytes))

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain data for JSON; each row also says whether it is "on_front"."""
        front = {row.name for row in self.front}
        rows = [{**vars(row), "lines": list(row.lines), "on_front": row.name in front} for row in self.rows]
        link = None if self.link is None else self.link.to_dict()
        return {**vars(self), "rows": rows, "left_out": dict(self.left_out), "link": link}

    def __str__(self) -> str:
        exact, front = self.rows[0], self.front
        table = []
        for row in self.rows:
            table.append(
                [
                    "*" if row in front else "",
                    row.name,
                    format_nbytes(row.nbytes)
                    + (f" + {format_nbytes(row.host_nbytes)} host" if row.host_nbytes else ""),
                    f"{row.nbytes / max(1, exact.nbytes):.2f}",
                    f"{row.seconds * 1e3:.1f}",
                    f"{row.slowdown:.2f}",
                    f"{row.least_slowdown:.2f} to {row.most_slowdown:.2f}",
                    "-" if row.peak_nbytes is None else format_nbytes(row.peak_nbytes),
                    _percent(row.gradient_error),
                    _percent(row.worst_error),
                ]
            )
        header = ["", "way", "kept", "of exact", "step, ms", "of exact", "rounds", "peak", "gradient off", "worst"]
        parts = [
            f"{self.model} on {self.device}; loss: {self.loss}; medians of {self.rounds} rounds",
            columns(header, table, left="all"),
            "kept: bytes for backward; gradient off: distance of all gradients from the exact ones; worst: of one"
            " parameter\n* no other way is better or equal in bytes, time and gradient",
        ]
        bound = [row for row in self.rows if row.is_bound_by_host]
        if bound:
            shares = ", ".join(f"{row.name} ({row.host_seconds or 0:.3g} of {row.seconds:.3g} s)" for row in bound)
            parts.append(
                f"bound by the host: {shares}: the device waits for Python there; more tokens per step, torch.compile"
                " or CUDA graphs change that, fewer bits do not"
            )
        if self.left_out:
            names: dict[str, list[str]] = {}
            for name, why in self.left_out.items():
                names.setdefault(why, []).append(name)
            parts.append("\n".join(f"left out: {'; '.join(same)}: {why}" for why, same in names.items()))
        for row in front:
            if row.lines:
                parts.append(f"# {row.name}\n" + "\n".join(row.lines))
        if self.link is not None:
            parts.append(self.link.text(exact.seconds))
        return "\n\n".join(parts)

    def plot(self, path: str | Path) -> None:
        """Draw bytes kept against time, the front in blue; with other ranks also what an average of gradients takes.

        Args:
            path: of the picture; matplotlib knows its ending.

        Raises:
            ConfigError: matplotlib is missing or does not know the ending.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(f"a picture needs matplotlib ({error}): pip install 'laconic[plots]'") from error
        figure = Figure(figsize=(7 if self.link is None else 11, 4.5), layout="constrained")
        axes, *more = figure.subplots(1, 1 if self.link is None else 2, squeeze=False)[0]
        front = self.front
        for number, row in enumerate(sorted(self.rows, key=lambda row: row.nbytes)):
            low, high = row.slowdown - row.least_slowdown, row.most_slowdown - row.slowdown
            color = "tab:blue" if row in front else "0.5"
            point = row.nbytes / 1e6, row.slowdown
            axes.errorbar(*point, yerr=[[low], [high]], fmt="o", color=color, elinewidth=0.8)
            place = (5, 5) if number % 2 else (5, -12)  # neighbors' names apart
            axes.annotate(row.name, point, xytext=place, textcoords="offset points", fontsize=8)
        axes.set_xlabel("MB kept for backward")
        axes.set_ylabel("time of forward and backward over the exact model's")
        axes.set_title(f"{self.model} on {self.device}", fontsize=9)
        axes.set_xlim(left=0)
        axes.margins(x=0.15, y=0.1)
        if self.link is not None:
            _draw_link(more[0], self.link, self.rows[0].seconds)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            raise ConfigError(f"plot is {str(path)!r}, but {error}") from error


def _draw_link(axes: Axes, link: Link, step_seconds: float) -> None:
    rows = link.rows[::-1]  # the first on top
    colors = ["tab:blue" if row.pays else "0.5" for row in rows]
    bars = axes.barh([row.name for row in rows], [row.seconds / step_seconds for row in rows], color=colors)
    axes.bar_label(bars, [f"{row.seconds * 1e3:.1f} ms, {row.sent_nbytes / 1e6:.3g} MB" for row in rows], padding=3)
    axes.set_xlabel("one average of gradients, in steps of the exact model")
    axes.set_title(f"{link.num_ranks} ranks at {link.nbytes_per_second / 1e6:.3g} MB per second and rank", fontsize=9)
    axes.margins(x=0.6)


def _percent(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-4 else f"{value:.2%}"
