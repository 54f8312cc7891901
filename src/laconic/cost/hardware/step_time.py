"""Seconds of an optimizer step: forward and backward of layers, recomputation, packing, and the pipeline's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.errors import PlanError
from laconic.schedule import PipelineSchedule

__all__ = ["LayerTime", "step_seconds"]


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one decoder layer on one micro-batch: its forward, and its backward without running it again."""

    forward_seconds: float
    backward_seconds: float


def step_seconds(
    schedule: PipelineSchedule,
    layer: LayerTime,
    layers_per_stage: Sequence[int],
    recomputed_per_stage: Sequence[int] = (),
    send_seconds: float = 0.0,
) -> float:
    """Seconds from the first forward to the last backward of a step.

    Args:
        schedule: order of passes.
        layer: seconds of one layer, packing included.
        layers_per_stage: decoder layers of each stage.
        recomputed_per_stage: how many of them run their forward again in backward; empty is none.
        send_seconds: between neighbouring stages.

    Raises:
        PlanError: the numbers per stage do not fit the schedule.
        ScheduleError: the schedule cannot run.
    """
    again = recomputed_per_stage or [0] * schedule.num_stages
    for name, counts in (("layers_per_stage", layers_per_stage), ("recomputed_per_stage", again)):
        if len(counts) != schedule.num_stages:
            raise PlanError(f"{name} has {len(counts)} numbers, but the schedule has {schedule.num_stages} stages")
    if any(extra > count for extra, count in zip(again, layers_per_stage, strict=True)):
        raise PlanError(f"recomputed_per_stage is {list(again)}, more than the layers {list(layers_per_stage)}")
    forward = [count * layer.forward_seconds for count in layers_per_stage]
    backward = [
        count * layer.backward_seconds + extra * layer.forward_seconds
        for count, extra in zip(layers_per_stage, again, strict=True)
    ]
    return schedule.simulate(forward, backward, send_seconds).makespan_seconds
