"""Experts of a mixture-of-experts model spread over the processes of a run, as `[moe]` of its configuration says.

The rest of the model is data parallel over all processes, as it always is. An EP group is `expert_parallel` processes
next to each other that hold every expert once; processes at the same place of different EP groups hold the same
experts and average their gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise

from torch import nn

from laconic.collectives.codec import Blockwise, Codec, Raw
from laconic.errors import ConfigError, ModelError
from laconic.formats import BlockFormat
from laconic.moe.dispatch import Dispatcher, LocalDispatcher
from laconic.moe.flat import FlatDispatcher
from laconic.moe.grid import Grid
from laconic.moe.hierarchy import HierarchicalDispatcher
from laconic.moe.hooks import Hook
from laconic.moe.huggingface import Parallelized, parallelize
from laconic.train.config import TrainConfig
from laconic.train.world import World
from laconic.train.zipped import zip_codec

__all__ = ["check_experts", "spread_experts"]

_ROWS = BlockFormat("int8", 128)


def check_experts(config: TrainConfig, world: World) -> None:
    """Raise ConfigError where `[moe]` does not fit the processes of the run."""
    moe, size = config.moe, config.moe.expert_parallel or 1
    if world.size % size:
        raise ConfigError(
            f"moe.expert_parallel is {size}, but it must divide the number of processes ({world.size}); start a "
            f"multiple of {size}"
        )
    levels = level_sizes(config)
    if any(fine <= coarse or fine % coarse for coarse, fine in pairwise((1, *levels))) or size % (levels or (1,))[-1]:
        raise ConfigError(
            f"moe.levels is {list(levels)}, but each number must be a larger multiple of the one before (the first of "
            f"1), and the last must divide moe.expert_parallel ({size})"
        )
    if moe.depth is not None and moe.depth > (most := num_stages(size, levels)):
        raise ConfigError(
            f"moe.depth is {moe.depth}, but it must be at most {most}: moe.levels are {list(levels)} for {size} "
            "processes; name the levels, as [2] for two machines"
        )


def level_sizes(config: TrainConfig) -> tuple[int, ...]:
    """Groups of an EP group at each level below the first; `moe.levels`, or the machines."""
    moe, size = config.moe, config.moe.expert_parallel or 1
    if moe.levels:
        return moe.levels
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    machines = size // per_machine if size % per_machine == 0 else 1
    return (machines,) if machines > 1 else ()


def num_stages(size: int, levels: tuple[int, ...]) -> int:
    """The largest depth: levels whose groups have more than one process, and the last stage between those."""
    return 1 + sum(num_groups < size for num_groups in levels)


def spread_experts(
    model: nn.Module, config: TrainConfig, world: World, hooks: Iterable[Hook] = ()
) -> Parallelized | None:
    """Put layers of laconic.moe in the place of `model`'s blocks; None without `moe.expert_parallel`.

    All processes call it together, with the whole model on `world.device`. Raises ModelError for a model without such
    blocks, and ConfigError where its experts cannot be divided.
    """
    size = config.moe.expert_parallel
    if size is None:
        return None
    grid = Grid(ep=size, levels=level_sizes(config), device_type=world.device.type) if size > 1 else None
    # A process that refused bad logits would leave the others waiting; a loss that is not finite is skipped by all.
    try:
        return parallelize(
            model, grid, dispatcher=lambda grid: _dispatcher(grid, config), hooks=hooks, check_logits=False
        )
    except ModelError as error:
        raise ModelError(f"moe.expert_parallel is {size}, but {error}") from None


def _dispatcher(grid: Grid | None, config: TrainConfig) -> Dispatcher:
    if grid is None:
        return LocalDispatcher()
    if config.moe.dispatcher == "flat":
        return FlatDispatcher(grid.ep, codec=row_codec(config))
    return HierarchicalDispatcher(grid.levels, config.moe.depth, codec=row_codec(config))


def row_codec(config: TrainConfig) -> Codec | str:
    """What rows travel in."""
    if config.moe.rows == "int8":
        return Blockwise(_ROWS)
    codec = zip_codec(config)
    return Raw() if codec is None else codec
