"""Parallel state of a process: its stage of the pipeline, its replica of that stage, and their process groups.

World rank = stage x replicas + replica. Processes of one stage hold the same layers and share the batch (DDP or FSDP2
between them); processes of one replica are the stages of one copy of the model and pass activations on. Without a
pipeline there is one stage, and every process is a replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from laconic.errors import ConfigError
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.world import World


@dataclass(frozen=True)
class ParallelState:
    """This process's stage and replica with their groups; a group is None where it would have one member."""

    num_stages: int = 1
    stage: int = 0
    num_replicas: int = 1
    replica: int = 0
    stage_group: dist.ProcessGroup | None = None
    """The replicas of this process's stage."""
    pipeline_group: dist.ProcessGroup | None = None
    """The stages of this process's replica, in order."""
    embedding_group: dist.ProcessGroup | None = None
    """First and last stage of this process's replica; None on the stages between."""


def make_parallel_state(config: TrainConfig, world: World) -> ParallelState:
    """This process's parallel state; all processes call it together, for it makes process groups.

    Raises:
        ConfigError: the processes or the batch cannot be divided as the configuration asks.
    """
    replicas = check_division(config, world.size)
    stages = config.pipeline.stages
    if stages == 1:
        group = dist.group.WORLD if world.size > 1 else None
        return ParallelState(num_replicas=replicas, replica=world.rank, stage_group=group)

    stage, replica = divmod(world.rank, replicas)
    timeout = timedelta(seconds=config.rank_timeout_seconds)
    same_stage = [[s * replicas + r for r in range(replicas)] for s in range(stages)]
    same_replica = [[s * replicas + r for s in range(stages)] for r in range(replicas)]
    stage_group = _group_of(same_stage, timeout) if replicas > 1 else None
    pipeline_group = _group_of(same_replica, timeout)
    embedding_group = pipeline_group if stages == 2 else _group_of([[row[0], row[-1]] for row in same_replica], timeout)
    return ParallelState(stages, stage, replicas, replica, stage_group, pipeline_group, embedding_group)


def _group_of(ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    return own


def check_division(config: TrainConfig, num_processes: int) -> int:
    """The number of replicas of each stage with `num_processes`.

    Raises:
        ConfigError: the processes or the batch cannot be divided as the configuration asks.
    """
    stages = config.pipeline.stages
    if config.local_steps and num_processes == 1:
        raise ConfigError(
            f"local_steps is {config.local_steps}, but there is 1 process, and differences are averaged over at least "
            "2; start more, or leave it out"
        )
    if config.optimizer.update_in_backward and config.parallel == "ddp" and num_processes > 1:
        raise ConfigError(
            f"optimizer.update_in_backward is True, but it must be false with parallel = ddp on {num_processes} "
            "processes: DDP averages gradients in buckets of many; shard them with parallel = fsdp, or start 1 process "
            "(nproc = 1)"
        )
    if num_processes % stages:
        raise ConfigError(
            f"pipeline.stages is {stages}, but it must divide the number of processes ({num_processes}); "
            f"start a multiple of {stages}"
        )
    replicas = num_processes // stages
    if config.batch_size % (replicas * config.micro_batches):
        rule = (
            f"world size x accumulation ({num_processes} x {config.accumulation})"
            if stages == 1
            else f"replicas x micro-batches ({replicas} x {config.micro_batches})"
        )
        raise ConfigError(f"batch_size is {config.batch_size}, but it must be a multiple of {rule}")
    return replicas
