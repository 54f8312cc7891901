"""Copies of hot experts in a run: chosen anew by measured loads every few steps, and kept in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import CheckpointError, ConfigError
from laconic.json_text import parse_json, read_record
from laconic.moe.huggingface import Parallelized
from laconic.moe.parallel.grid import Grid
from laconic.moe.placement.copies import Copied, ExpertCopies, copy_hot_experts
from laconic.moe.placement.expert_map import placement_of
from laconic.train.config.schema import MoEConfig

STATE_FILE = "expert_copies.json"
"""Name of the file in a checkpoint that holds `HotExperts.state`."""


@dataclass(frozen=True)
class _State:
    expert_parallel: int
    num_per_rank: int
    num_experts: list[int]
    copies: list[list[tuple[int, int]]]
    loads: list[list[int]]
    busiest: tuple[float, float] | None


class HotExperts:
    """Chooses which experts have copies by the tokens that they got since the last choice.

    Copies change how sums are rounded, so a resumed run begins with those that it had.

    Args:
        saved: return value of `state` in the checkpoint that the run continues from. With another number of processes
            or experts there are no copies until the next choice.

    Raises:
        ConfigError: a layer cannot have copies.
        CheckpointError: `saved` cannot be read.
    """

    def __init__(self, model: Parallelized, grid: Grid, config: MoEConfig, saved: str | None = None) -> None:
        self._config, self._grid = config, grid
        self._layers = list(model.layers.values())
        self._loads: list[Tensor] = []
        self._busiest: tuple[float, float] | None = None
        """Rows of the busiest process over the mean, by the loads of the last choice, without copies and with; the mean
        over layers. None before the first choice."""
        # Refuses layers that cannot have copies before the first step.
        self._choose(
            0, [torch.zeros(layer.gate.num_experts, dtype=torch.int64, device="cpu") for layer in self._layers]
        )
        if saved is not None:
            self._restore(saved)

    def step(self, done: int, loads: Sequence[Sequence[int]], skipped: bool) -> None:
        """Count the tokens of a step, and choose copies if it is time; all processes call it together.

        Args:
            loads: tokens of each expert over all processes, by layer.
            skipped: whether the step's update was left out; then nothing is chosen after it.
        """
        new = [torch.tensor(load, dtype=torch.int64, device="cpu") for load in loads]
        self._loads = [a + b for a, b in zip(self._loads, new, strict=True)] if self._loads else new
        if skipped or (self._busiest is not None and done % self._config.copy_every):
            return
        found = self._choose(self._config.copies, self._loads)
        self._loads = []
        ratios = [(one.busiest_before, one.busiest_after) for one in found]
        before, after = (sum(values) / len(found) for values in zip(*ratios, strict=True))
        self._busiest = before, after

    def to_metrics(self) -> dict[str, float | int | str]:
        """Return the fields of a row of metrics.jsonl: which copies there are, and what they were chosen for."""
        copied = [
            f"layer {number}: " + ", ".join(f"{expert} on {rank}" for expert, rank in copies)
            for number, copies in enumerate(self.copies)
            if copies
        ]
        fields: dict[str, float | int | str] = {
            "moe_copies": sum(map(len, self.copies)),
            "moe_copied": "; ".join(copied) or "none",
        }
        if self._busiest is not None:
            fields["moe_busiest_before"], fields["moe_busiest_after"] = self._busiest
        return fields

    def _choose(self, num_per_rank: int, loads: Sequence[Tensor]) -> list[Copied]:
        try:
            return copy_hot_experts(self._layers, self._grid, num_per_rank, loads=loads)
        except ConfigError as error:
            raise ConfigError(f"moe.copies is {self._config.copies}, but {error}") from None

    @property
    def copies(self) -> list[list[tuple[int, int]]]:
        """(expert, process of the EP group) of each copy, by layer."""
        tables = [getattr(layer.placement, "copies", None) for layer in self._layers]
        return [[] if table is None else list(table.copies) for table in tables]

    def state(self) -> str:
        """Return the copies and the tokens counted since they were chosen, as JSON."""
        loads = [load.tolist() for load in self._loads]
        return json.dumps({**self._sharers(), "copies": self.copies, "loads": loads, "busiest": self._busiest})

    def _restore(self, saved: str) -> None:
        try:
            state = read_record(_State, parse_json(saved))
            if any(getattr(state, name) != value for name, value in self._sharers().items()):
                return
        except ValueError as error:
            raise CheckpointError(
                f"{STATE_FILE} of the checkpoint does not say which experts have copies ({error}); continue from"
                " another one"
            ) from None
        for number, (layer, copies) in enumerate(zip(self._layers, state.copies, strict=True)):
            placement = placement_of(layer, number)
            placement.copies = ExpertCopies(copies, self._grid.ep, placement.slots.tolist()) if copies else None
        self._loads = [torch.tensor(load, dtype=torch.int64, device="cpu") for load in state.loads]
        self._busiest = state.busiest

    def _sharers(self) -> dict[str, Any]:
        return {
            "expert_parallel": self._config.expert_parallel,
            "num_per_rank": self._config.copies,
            "num_experts": [layer.gate.num_experts for layer in self._layers],
        }
