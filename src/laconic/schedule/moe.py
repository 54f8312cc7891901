"""Schedules of mixture-of-experts layers: the pipeline inside of a layer, and gradient reductions on idle links."""

from laconic.schedule.moe_gradients import (
    BackwardPart,
    GradientPlan,
    GradientSlice,
    ReductionLine,
    ReductionSlot,
    backward_plan,
    fill_slots,
)
from laconic.schedule.moe_pipeline import (
    COMPUTE,
    DEGREES,
    GRADIENTS,
    INTER,
    INTRA,
    ChunkTime,
    DegreeChoice,
    LayerTimes,
    best_degree,
    pipeline_plan,
    pipeline_seconds,
    pipeline_tasks,
)

__all__ = [
    "COMPUTE",
    "DEGREES",
    "GRADIENTS",
    "INTER",
    "INTRA",
    "BackwardPart",
    "ChunkTime",
    "DegreeChoice",
    "GradientPlan",
    "GradientSlice",
    "LayerTimes",
    "ReductionLine",
    "ReductionSlot",
    "backward_plan",
    "best_degree",
    "fill_slots",
    "pipeline_plan",
    "pipeline_seconds",
    "pipeline_tasks",
]
