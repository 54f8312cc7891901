"""Which expert workers hold which experts, by measured loads, hot ones in several copies; the file of loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from laconic.cost.hardware.rates_file import load_json, read_rates, save_json
from laconic.errors import ConfigError
from laconic.infer.split import EngineSplit
from laconic.moe.placement.search import place
from laconic.schedule.slices import slice_ranges

_FORMAT, _VERSION = "laconic expert loads", 1
_REMEDY = "let the engine write one, which it does where expert_loads names no file yet"


def check_expert_placement(path: Path | None, redundant: int) -> None:
    """Check the arguments of an engine that are about the placement of experts."""
    if redundant < 0:
        raise ConfigError(f"redundant_experts is {redundant}, but it must be at least 0")
    if redundant and path is None:
        raise ConfigError(
            f"redundant_experts is {redundant}, but copies go to experts that have most to do, by measured loads; give"
            " expert_loads, a file that one run of the engine writes and the next one reads"
        )
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"expert_loads is {str(path)!r}, but its folder does not exist; make it first")


def place_experts(
    split: EngineSplit, num_experts: Sequence[int], path: Path, redundant: int
) -> tuple[list[list[list[int]]] | None, str]:
    """Return the experts of each worker, ascending, by layer, and a sentence for the user.

    None where experts stay in ranges: there are no expert workers, or no loads have been measured yet. `redundant`
    counts copies in each layer, beside one of each expert. A ConfigError: the file holds no loads, or another model's,
    or there are more copies than workers for them.
    """
    if split.experts == 0:
        return None, "every worker holds whole models, so loads of experts are neither measured nor used"
    for number in num_experts:
        if number + redundant > number * split.experts:
            raise ConfigError(
                f"redundant_experts is {redundant}, but {split.experts} expert workers that all hold all {number}"
                f" experts have {number * (split.experts - 1)} copies; give at most as many, or more expert workers"
            )
    if not path.exists():
        copies = f", and none of {redundant} copies is made" if redundant else ""
        return None, f"{path} is not there yet: loads of experts are measured for it, experts lie in ranges{copies}"
    loads = load_json(path, "expert loads", _read, _REMEDY)
    if [len(layer) for layer in loads] != list(num_experts):
        raise ConfigError(
            f"{path} has loads of {len(loads)} layers with {sorted({len(layer) for layer in loads})} experts, but the"
            f" model has {len(num_experts)} with {sorted(set(num_experts))}; name another file"
        )
    held = []
    for layer in loads:
        rooms = [len(part) for part in slice_ranges(len(layer) + redundant, split.experts)]
        # A second copy at the same worker would hold memory for nothing.
        held.append([sorted({*experts}) for experts in place(layer, rooms)])
    ranges: list[Sequence[Sequence[int]]] = [slice_ranges(len(layer), split.experts) for layer in loads]
    return held, (
        f"experts are placed by {path}, with {redundant} copies in each layer: of those rows the busiest expert worker"
        f" has {_over_mean(loads, held):.2f} times the mean, in place of {_over_mean(loads, ranges):.2f} times"
    )


def save_loads(path: Path, loads: Sequence[Sequence[int]]) -> None:
    """Write the rows that each expert of each layer was chosen for; nothing if there were none."""
    if any(map(any, loads)):
        save_json({"format": _FORMAT, "version": _VERSION, "loads": [list(layer) for layer in loads]}, path)


@dataclass(frozen=True)
class _Loads:
    loads: list[list[Annotated[int, Field(ge=0)]]]


def _read(data: object) -> list[list[int]]:
    return read_rates(_Loads, data, _FORMAT, _VERSION, _REMEDY).loads


def _over_mean(loads: Sequence[Sequence[int]], held: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the rows of the busiest worker of each layer over the mean of all; copies share evenly."""
    busiest = 0.0
    for layer, workers in zip(loads, held, strict=True):
        copies = Counter(expert for worker in workers for expert in worker)
        busiest += max(sum(layer[expert] / copies[expert] for expert in worker) for worker in workers)
    return busiest / max(1, sum(map(sum, loads))) * len(held[0])
