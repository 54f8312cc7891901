"""The most layers with which a run still fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laconic.cost.memory.job import Job
from laconic.cost.planner.policy import Chosen
from laconic.errors import PlanError

_MOST = 50_000
"""Layers that are tried; a layer without parameters or saved tensors would never end it."""


def most_layers(job: Job, choices: Callable[[Job], Chosen | None]) -> int:
    """The largest depth of a job's model that fits, all else as it is.

    Args:
        job: of a traced model whose layers are one list; their number does not matter.
        choices: what is chosen for a job of another depth; None where that does not fit. A model that fits must also
            fit with fewer layers.
    """

    def fits(num_layers: int) -> bool:
        return choices(replace(job, model=job.model.with_num_layers(num_layers))) is not None

    fitting, step = 0, job.layout.num_chunks
    while fits(fitting + step):
        fitting += step
        step *= 2
        if fitting >= _MOST:
            raise PlanError(f"{fitting:,} layers fit, and more would: give a smaller memory or larger layers")
    if not fitting:
        raise PlanError(f"not even a model of {job.layout.num_chunks} layers fits: give more memory or smaller layers")
    while step > 1:
        step //= 2
        fitting += step if fits(fitting + step) else 0
    return fitting
