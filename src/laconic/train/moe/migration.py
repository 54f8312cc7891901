"""Expert migration in a run: swaps after a step where they pay, and the placement in checkpoints."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from laconic.cost.moe.rates import MoERates, default_moe_path
from laconic.cost.moe.swap_period import SwapPeriod
from laconic.errors import CheckpointError, ConfigError
from laconic.json_text import parse_json, read_record
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.huggingface import Parallelized
from laconic.moe.parallel.grid import Grid
from laconic.moe.placement.balancer import ExpertBalancer
from laconic.moe.placement.migration import ExpertMover
from laconic.train.config.schema import MoEConfig

STATE_FILE = "experts.json"
"""Name of the file in a checkpoint that holds `Migration.state`."""


@dataclass(frozen=True)
class _State:
    expert_parallel: int
    num_experts: list[int]
    num_swaps: int
    slots: list[list[int]]
    periods: list[SwapPeriod]


class Migration:
    """Migrates experts while all layers dispatch hierarchically; with one all-to-all, experts stay where they are.

    All processes call each method together.

    Args:
        optimizer: of the experts; its state migrates with them.
        saved: return value of `state` in the checkpoint that the run continues from. Experts take the places that they
            had, if as many processes share as many experts now; otherwise they begin in logical order.

    Raises:
        ConfigError: experts cannot be moved, or there are no rates to decide by.
        CheckpointError: `saved` cannot be read.
    """

    def __init__(
        self,
        model: Parallelized,
        grid: Grid,
        config: MoEConfig,
        optimizer: torch.optim.Optimizer,
        saved: str | None = None,
    ) -> None:
        path = Path(config.rates) if config.rates is not None else default_moe_path()
        if not path.is_file():
            raise ConfigError(
                f"moe.swap_every is {config.swap_every}, but there are no rates at {path}, by which swaps are decided; "
                "write them with laconic profile --moe, or name a file in moe.rates"
            )
        self.count = 0
        """Number of times that experts of a layer have changed places so far."""
        self._config, self._rates = config, MoERates.load(path)
        self._layers = list(model.layers.values())
        replicas = grid.edp if grid.layout.edp > 1 else None
        try:
            self._mover = ExpertMover(self._layers, grid.ep, [optimizer], replicas=replicas)
        except ConfigError as error:
            raise ConfigError(f"moe.swap_every is {config.swap_every}, but {error}") from None
        self._periods: list[SwapPeriod] = []
        self._balancer: ExpertBalancer | None = None
        if saved is not None:
            self._restore(saved)
        self._find_balancer()

    def step(self, done: int) -> None:
        """Swap experts where the policy asks for it, after the step with which `done` are done."""
        self._find_balancer()
        if self._balancer is not None and (balanced := self._balancer.step(done)) is not None:
            self.count += len(balanced.swapped)

    def state(self) -> str:
        """Return the placement of experts and the periods of routing queries, as JSON."""
        slots = [self._mover.placement(number).slots.tolist() for number in range(len(self._layers))]
        periods = [asdict(period) for period in self._periods]
        return json.dumps({**self._sharers(), "num_swaps": self.count, "slots": slots, "periods": periods})

    def in_logical_order(self) -> AbstractContextManager[object]:
        """Return a context with experts in logical order, to save a checkpoint in."""
        return self._mover.logical_order()

    def _find_balancer(self) -> None:
        """Keep a balancer while all layers dispatch hierarchically, which may change from step to step."""
        if any(not isinstance(layer.dispatcher, HierarchicalDispatcher) for layer in self._layers):
            self._balancer = None
        elif self._balancer is None:
            config = self._config
            self._balancer = ExpertBalancer(
                self._mover,
                self._rates,
                num_pairs=config.swap_pairs,
                min_period=config.swap_every,
                policy=config.swap_policy,
            )
            if self._periods:
                self._balancer.periods = self._periods
            self._periods = self._balancer.periods

    def _restore(self, saved: str) -> None:
        """Move experts to their saved places, unless the run was saved with other EP groups or numbers of experts."""
        try:
            state = read_record(_State, parse_json(saved), [field.name for field in fields(SwapPeriod)])
            if any(getattr(state, name) != value for name, value in self._sharers().items()):
                return
            self._periods = [replace(period, min_period=self._config.swap_every) for period in state.periods]
        except ValueError as error:
            raise CheckpointError(
                f"{STATE_FILE} of the checkpoint does not say where experts are ({error}); continue from another one"
            ) from None
        self.count = state.num_swaps
        self._mover.move([torch.tensor(one, dtype=torch.int64, device="cpu") for one in state.slots])

    def _sharers(self) -> dict[str, Any]:
        return {
            "expert_parallel": self._config.expert_parallel,
            "num_experts": [layer.gate.num_experts for layer in self._layers],
        }
