"""Checks before anything else that all processes of a run were started with the same settings."""

from __future__ import annotations

import dataclasses

import torch

import laconic
from laconic.collectives.engine.handshake import first_difference
from laconic.errors import ConfigError
from laconic.train.config.dotted_names import flat_settings
from laconic.train.config.plan import load_plan
from laconic.train.config.schema import TrainConfig
from laconic.train.config.settings import settings as settings_of
from laconic.train.distributed.world import World

__all__ = ["check_agreement"]

_LOCAL = ("nproc", "restarts", "tensorboard", "wandb")
"""What may differ between machines beside paths, or is taken from rank 0."""


def check_agreement(config: TrainConfig, world: World) -> None:
    """Check that all processes have the same settings and versions; all of them call it together.

    Paths may differ; their contents are compared where they are read.

    Raises:
        ConfigError: on every process; the message names a difference.
    """
    local = {*_LOCAL, *(one.name for one in settings_of(TrainConfig) if one.is_path)}
    settings = flat_settings(dataclasses.asdict(config))
    settings = {name: value for name, value in settings.items() if name not in local}
    settings |= {"laconic's version": laconic.__version__, "torch's version": str(torch.__version__)}
    if config.plan is not None:
        settings["the plan"] = load_plan(config.plan).to_dict()
    gathered = world.gather(settings)
    found = first_difference(gathered)
    if found is not None:
        name, rank = found
        raise ConfigError(
            f"{name} is {gathered[0].get(name)!r} on rank 0, but {gathered[rank].get(name)!r} on rank {rank}; start "
            "all processes of a run with the same settings and versions"
        )
