"""Schedules of mixture-of-experts layers: the pipeline inside of a layer, and gradient reductions on idle links."""

from laconic.schedule.moe_gradients import BackwardPart, backward_plan, fill_slots
from laconic.schedule.moe_pipeline import (
    COMPUTE,
    DEGREES,
    INTER,
    INTRA,
    ChunkTime,
    LayerTimes,
    best_degree,
    pipeline_plan,
    pipeline_seconds,
)

__all__ = [
    "COMPUTE",
    "DEGREES",
    "INTER",
    "INTRA",
    "BackwardPart",
    "ChunkTime",
    "LayerTimes",
    "backward_plan",
    "best_degree",
    "fill_slots",
    "pipeline_plan",
    "pipeline_seconds",
]
