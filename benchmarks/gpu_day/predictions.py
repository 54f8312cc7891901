"""What was predicted before any device was there, read from the committed tables of `gpu-step` and `gpu-code`.

A figure that a part measures has the name of its prediction here. One that is off by more than a fifth needs a sentence
in explanations.toml, where the longest key that the name begins with counts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.data_sheets import BYTES_PER_SECOND

EXPLAINED_BEYOND = 0.2
"""Share of the prediction by which a figure may be off without an explanation."""

_HERE = Path(__file__).parent
_RESULTS = _HERE.parent / "results"
_HOPPER = ("H200", "H100")
"""`gpu-step` predicts for both; `gpu-code` for an H200, and its figures are scaled by the bandwidth of memory."""


@dataclass(frozen=True)
class Comparison:
    """A prediction beside what was measured."""

    name: str
    predicted: float
    unit: str
    source: str
    measured: float | None
    explanation: str

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None else self.measured / self.predicted

    @property
    def is_off(self) -> bool:
        """Whether it was measured and is off by more than a fifth."""
        return self.ratio is not None and abs(self.ratio - 1) > EXPLAINED_BEYOND

    @property
    def lacks_explanation(self) -> bool:
        """Whether it is off and nobody said why."""
        return self.is_off and not self.explanation


def compare(
    measured: Mapping[str, tuple[float, str]],
    device: str,
    results: Path = _RESULTS,
    explanations: Path = _HERE / "explanations.toml",
) -> list[Comparison]:
    """Each prediction for the device beside the figure of its name."""
    said = tomllib.loads(explanations.read_text(encoding="utf-8")) if explanations.exists() else {}
    return [
        Comparison(name, value, unit, source, measured.get(name, (None,))[0], _said(said, name))
        for name, (value, unit, source) in predictions(device, results).items()
    ]


def _said(explanations: Mapping[str, object], name: str) -> str:
    key = max((key for key in explanations if name.startswith(key)), key=len, default="")
    return str(explanations.get(key, ""))


def predictions(device: str, results: Path = _RESULTS) -> dict[str, tuple[float, str, str]]:
    """Value, unit and source by name; none for a device whose limits are not known.

    Args:
        device: its name, as "NVIDIA H200"; "" is an H200.
        results: folder of the committed tables.
    """
    known = next((name for name in _HOPPER if name in device), "H200" if not device else "")
    found: dict[str, tuple[float, str, str]] = {}
    for path in sorted(results.glob("gpu_step_*.md")) if known else []:
        for row in _rows(path, "unmodified"):
            if row.get("device") == known:
                found |= dict(_layer(row, path.name))
    for path in sorted(results.glob("gpu_code_*.md")) if known else []:
        for row in _rows(path, "us on H200, at least"):
            micros = float(row["us on H200, at least"]) * BYTES_PER_SECOND["H200"] / BYTES_PER_SECOND[known]
            found[f"kernel: {row['op']}"] = micros, "us", path.name
    return found


def _layer(row: Mapping[str, str], source: str) -> Iterator[tuple[str, tuple[float, str, str]]]:
    direction = row[""]
    unmodified = _number(row["unmodified"])
    yield f"layer: unmodified, {direction}", (unmodified, "ms", source)
    yield f"layer: nf4, {direction}", (unmodified + _number(row["added"]) / 1e3, "ms", source)
    if (host := row.get("host time of all launches")) is not None:
        yield f"layer: nf4, {direction}, host", (_number(host), "ms", source)


def _number(text: str) -> float:
    match = re.match(r"[+-]?[\d.]+", text)
    if match is None:
        raise ValueError(f"no number in {text!r}")
    return float(match[0])


def _rows(path: Path, column: str) -> Iterator[dict[str, str]]:
    """Rows of each table that has a column, by its headings."""
    header: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header:
            header = cells
        elif column in header and not set(line) <= set("|- "):
            yield dict(zip(header, cells, strict=False))
