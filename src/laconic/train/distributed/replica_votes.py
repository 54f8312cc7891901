"""Votes of a run's replicas on their bits, every so many steps and before each checkpoint."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from laconic.errors import AuditError, ConfigError, CorruptionError
from laconic.gradients import LocalSteps
from laconic.moe.huggingface import Parallelized
from laconic.replicas import ReplicaReport, verify_replicas
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World


class ReplicaVotes:
    """Compares weights, optimizer state and buffers between the processes that hold the same.

    Args:
        config: of the run; `verify.every` says how often.
        model: plain, DDP- or FSDP2-wrapped, or the chunks of a pipeline.
        experts: parameters that not all processes hold; None if all do.
        local: of processes that train apart: their common point and outer momentum are compared.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        parallel_state: ParallelState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        experts: Parallelized | None,
        local: LocalSteps | None = None,
    ) -> None:
        self._every = config.verify.every if world.size > 1 else 0
        self._world = world
        self._group = parallel_state.stage_group
        self._model = model
        self._optimizer = optimizer
        self._local = local
        grid = None if experts is None else experts.grid
        parameters = [] if experts is None or grid is None else experts.experts()
        self._groups = {parameter: None if grid is None else grid.edp for parameter in parameters}
        self._report: ReplicaReport | None = None
        self._last_good: int | None = None
        self._count = 0
        self._seconds = 0.0

    def due(self, done: int, saves: bool) -> bool:
        """Whether to vote after `done` steps; always before a checkpoint is saved, unless votes are off."""
        return self._every > 0 and (saves or done % self._every == 0)

    def vote(self, done: int) -> str | None:
        """Compare the replicas after `done` steps; all processes call it together. Returns a line to log, if any.

        Raises:
            CorruptionError: on every process: some replicas differ.
        """
        began = time.perf_counter()
        first = self._report is None
        report, error = self._compare()
        if report is not None:
            self._report = report
        if error is not None:
            before = "this was the first vote" if self._last_good is None else f"equal after step {self._last_good}"
            raise CorruptionError(
                f"after step {done}, {error} ({before}); nothing was saved. Memory or a device may be faulty; go on "
                "from the last checkpoint, which is from before, with --resume"
            )
        self._last_good = done
        self._count += 1
        self._seconds += time.perf_counter() - began
        if not first:
            return None
        return f"replicas, every {self._every} steps: {self._report or 'this stage has none, nothing is compared'}"

    def audit(self, done: int) -> int:
        """Compare the replicas after the first `done` steps of a run; all processes call it together.

        It is no vote, and takes place with votes off, too.

        Returns:
            Tensors of this process that were compared.

        Raises:
            AuditError: on every process: some replicas differ.
        """
        if self._world.size == 1:
            return 0
        report, error = self._compare()
        if error is not None:
            raise AuditError(
                f"after step {done}, the first of this run, {error}; likely causes: a bucket that was not reduced, "
                "gradients clipped or scaled on one process alone, weights or moments that were not loaded alike; "
                "nothing was saved"
            )
        return 0 if report is None else report.num_tensors

    def _compare(self) -> tuple[ReplicaReport | None, str | None]:
        """What was compared here, None for nothing; and what differs on any process, None if nothing does."""
        report, error = None, None
        if self._group is not None:  # else this stage has no replica
            try:
                if self._local is None:
                    report = verify_replicas(
                        self._model, self._optimizer, self._group, groups=self._groups, buffers=True
                    )
                else:
                    with self._local.at_common_point():
                        report = verify_replicas(self._model, _outer_state(self._model, self._local), self._group)
            except (CorruptionError, ConfigError) as failure:
                error = str(failure)
        return report, self._world.first_error(error)

    def summary(self) -> dict[str, Any] | None:
        """The entry of summary.json; None without votes."""
        if not self._count:
            return None
        report = self._report
        return {
            "every": self._every,
            "votes": self._count,
            "seconds": self._seconds,
            "covered_nbytes": 0 if report is None else report.nbytes,
            "uncovered_nbytes": None if report is None else report.uncovered_nbytes,
        }


def _outer_state(model: nn.Module, local: LocalSteps) -> torch.optim.Optimizer:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    outer = torch.optim.SGD(named.values(), lr=0.0)
    for name, momentum in local.momentum().items():
        outer.state[named[name]]["outer momentum"] = momentum
    return outer
