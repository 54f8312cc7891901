"""Expert parallelism in a run: spreads the experts of a model over processes, as `[moe]` of its configuration says.

The rest of the model is data parallel over all processes. An EP group is `expert_parallel` consecutive ranks that hold
every expert once; ranks at the same position of different EP groups hold the same experts and average their gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from laconic.collectives.codec import Blockwise, Codec, Lossless, Raw
from laconic.cost.moe.rates import MoERates
from laconic.errors import ConfigError, ModelError
from laconic.formats import BlockFormat
from laconic.moe.dispatch.base import Dispatcher, LocalDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.huggingface import Parallelized, parallelize
from laconic.moe.layer import Schedule
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.tuning.autotune import Autotuned, autotune
from laconic.schedule.streams import Timeline
from laconic.topology import Levels, are_nested
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.comm_compression import zip_codec
from laconic.train.distributed.world import World
from laconic.train.moe import hot_experts, migration
from laconic.train.moe.hot_experts import HotExperts
from laconic.train.moe.metrics import Capacity, ExpertMeter, ExpertUse, schedule_of
from laconic.train.moe.migration import Migration

_ROWS = BlockFormat("int8", 128)


def check_experts(config: TrainConfig, world: World) -> None:
    """Check that `[moe]` fits the number of processes of the run."""
    moe, size = config.moe, config.moe.expert_parallel or 1
    if world.size % size:
        raise ConfigError(
            f"moe.expert_parallel is {size}, but it must divide the number of processes ({world.size}); start a "
            f"multiple of {size}"
        )
    levels = level_sizes(config)
    if not are_nested(levels, size):
        raise ConfigError(
            f"moe.levels is {list(levels)}, but each number must be a larger multiple of the one before (the first of "
            f"1), and the last must divide moe.expert_parallel ({size})"
        )
    if moe.depth is not None and moe.depth > (most := Levels.of_groups(size, levels).max_depth):
        raise ConfigError(
            f"moe.depth is {moe.depth}, but it must be at most {most}: moe.levels are {list(levels)} for {size} "
            "processes; name the levels, as [2] for two machines"
        )


def level_sizes(config: TrainConfig) -> tuple[int, ...]:
    """Return the number of groups of an EP group at each level below the first: `moe.levels`, or the machines."""
    moe, size = config.moe, config.moe.expert_parallel or 1
    if moe.levels:
        return moe.levels
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    machines = size // per_machine if size % per_machine == 0 else 1
    return (machines,) if machines > 1 else ()


class SpreadExperts:
    """The expert parallel layers of a run, with their metrics, autotuning, migration and copies."""

    def __init__(self, model: Parallelized, meter: ExpertMeter, config: TrainConfig) -> None:
        self.model = model
        self._meter = meter
        self._config = config
        self._migration: Migration | None = None
        self._hot: HotExperts | None = None
        self._tuned: Autotuned | None = None
        self._last: ExpertUse | None = None
        self._messages: list[str] = []

    def tune(self, example: Callable[[], object]) -> None:
        """Choose how every layer runs, with `dispatcher = "auto"`; with another one, do nothing.

        All processes call it together, before the model is wrapped, as layers are measured on their own.

        Raises:
            ConfigError: nothing can be predicted from the layers or the rates.
        """
        moe, grid = self._config.moe, self.model.grid
        if moe.dispatcher != "auto" or grid is None:
            return
        rates = None if moe.rates is None else MoERates.load(moe.rates)
        codecs: list[Codec] = [Raw()]
        if moe.dispatch_codec != "raw" and self._config.zip != "off":
            codecs.append(Lossless("tiered"))
        if moe.dispatch_codec == "int8":
            codecs.append(Blockwise(_ROWS))
        self._tuned = autotune(self.model, grid, example, rates=rates, codecs=codecs, report=None)
        self._messages += str(self._tuned).splitlines()

    def messages(self) -> list[str]:
        """Return the lines to log that are new since the last call."""
        new, self._messages = self._messages, []
        return new

    def prepare(self, optimizer: torch.optim.Optimizer, saved: Callable[[str], str | None]) -> None:
        """Set up expert migration or copies if the configuration asks for them; all processes call it together.

        Args:
            saved: from a name of `states` to the text in the checkpoint that the run continues from; None if it has
                none.

        Raises:
            ConfigError: experts cannot be moved or copied, or there are no rates to decide by.
            CheckpointError: what is saved cannot be read.
        """
        moe, grid = self._config.moe, self.model.grid
        if moe.swap_every and grid is not None:
            self._migration = Migration(self.model, grid, moe, optimizer, saved(migration.STATE_FILE))
        if moe.copies and grid is not None:
            self._hot = HotExperts(self.model, grid, moe, saved(hot_experts.STATE_FILE))

    def states(self) -> dict[str, str]:
        """Return what a checkpoint keeps of placement and copies of experts, by file name."""
        found: dict[str, Migration | HotExperts | None] = {
            migration.STATE_FILE: self._migration,
            hot_experts.STATE_FILE: self._hot,
        }
        return {name: one.state() for name, one in found.items() if one is not None}

    def begin(self) -> None:
        """Reset the metrics, so that forwards before the first step do not count."""
        self._meter.clear()

    @property
    def loads(self) -> list[list[int]] | None:
        """Tokens of each expert in the last step, by layer, over all processes; None before the first."""
        return None if self._last is None else [list(load) for load in self._last.loads]

    def executed(self) -> dict[str, Timeline]:
        """When the chunks of the layers that ran last went forward and backward on this process, by direction."""
        for layer in self.model.layers.values():
            if isinstance(layer.schedule, ChunkedSchedule):
                return {direction: run.timeline for direction, run in layer.schedule.executions.items()}
        return {}

    @property
    def schedule(self) -> str:
        """How layers run, in a few words."""
        return "; ".join(dict.fromkeys(map(schedule_of, self.model.layers.values())))

    def after_step(self, done: int, skipped: bool) -> dict[str, float | int | str]:
        """Collect the metrics of a step, and migrate or copy experts where that pays; all processes call it together.

        Args:
            skipped: whether the step's update was left out; then no expert migrates, and none is copied anew.

        Returns:
            Fields for metrics.jsonl, the same on every process.
        """
        self._last = self._meter.take(self.model.layers.values())
        fields: dict[str, float | int | str] = {"moe_schedule": self.schedule}
        if self._last is not None:
            fields |= self._last.to_metrics()
        if self._migration is not None:
            if not skipped:
                self._migration.step(done)
            fields["moe_swaps"] = self._migration.count
        if self._hot is not None and self._last is not None:
            self._hot.step(done, self._last.loads, skipped)
            fields |= self._hot.to_metrics()
        return fields

    def in_logical_order(self) -> AbstractContextManager[object]:
        """Return a context with experts in logical order, to save a checkpoint in."""
        return nullcontext() if self._migration is None else self._migration.in_logical_order()

    def __str__(self) -> str:
        return f"experts: {len(self.model.layers)} layers over {self._meter.num_processes} processes, {self.schedule}"

    def summary(self) -> dict[str, Any]:
        """Return the entry of summary.json: how rows travel, and the expert metrics of the last step."""
        last = self._last
        return {
            "experts": str(self),
            "expert_parallel": self._config.moe.expert_parallel,
            "dispatcher": self._config.moe.dispatcher if self.model.grid is not None else "local",
            "schedule": self.schedule,
            "autotune": None if self._tuned is None else str(self._tuned).splitlines(),
            "num_levels": self._meter.num_levels,
            "swaps": 0 if self._migration is None else self._migration.count,
            "copies": None if self._hot is None else self._hot.copies,
            "last_step": None if last is None else {**last.to_metrics(), "loads": [list(load) for load in last.loads]},
        }


def spread_experts(model: nn.Module, config: TrainConfig, world: World) -> SpreadExperts | None:
    """Replace the mixture-of-experts blocks of `model` by layers of laconic.moe, in place.

    All processes call it together, with the whole model on `world.device`.

    Returns:
        The new layers; None without `moe.expert_parallel`.

    Raises:
        ModelError: the model has no such blocks.
        ConfigError: its experts cannot be divided.
    """
    size = config.moe.expert_parallel
    if size is None:
        return None
    meter = ExpertMeter(world, size, level_sizes(config))
    factors = config.moe.capacity_factor, config.moe.eval_capacity_factor
    hooks = (meter,) if factors == (None, None) else (Capacity(*factors), meter)
    grid = Grid(ep=size, levels=level_sizes(config), device_type=world.device.type) if size > 1 else None
    # A process that refused bad logits would leave the others waiting; a loss that is not finite is skipped by all.
    try:
        spread = parallelize(
            model,
            grid,
            gate=config.moe.gate,
            dispatcher=lambda grid: _dispatcher(grid, config),
            schedule=_schedule(config),
            hooks=hooks,
            check_logits=False,
        )
    except ModelError as error:
        raise ModelError(f"moe.expert_parallel is {size}, but {error}") from None
    return SpreadExperts(spread, meter, config)


def _dispatcher(grid: Grid | None, config: TrainConfig) -> Dispatcher:
    if grid is None:
        return LocalDispatcher()
    if config.moe.dispatcher != "hierarchical":  # auto starts with a flat one, too
        return FlatDispatcher(grid.ep, codec=row_codec(config))
    return HierarchicalDispatcher(grid.levels, config.moe.depth, codec=row_codec(config))


def row_codec(config: TrainConfig) -> Codec | str:
    """Return the codec of rows between processes, from `moe.dispatch_codec` and `zip`."""
    codecs: dict[str, Codec | str | None] = {"int8": Blockwise(_ROWS), "raw": Raw(), "lossless": Lossless()}
    codec = codecs.get(config.moe.dispatch_codec, zip_codec(config))
    return Raw() if codec is None else codec


def _schedule(config: TrainConfig) -> Schedule | None:
    chunks = config.moe.chunks
    return ChunkedSchedule(*chunks) if max(chunks, default=1) > 1 else None
