"""What each step of a layer's exchange takes alone, on ranks of a lab: the simulator predicts chunks from it.

Every task of a plan is timed with all streams in one thread, so that nothing overlaps, in 1 and in 4 chunks. Two
numbers for each step follow: start-up and work.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.timing import in_rounds
from laconic.moe import ChunkedSchedule, MoELayer
from laconic.schedule.execute import Execution, InlineStream
from laconic.schedule.moe_pipeline import COMPUTE, INTER, INTRA, ChunkTime, LayerTimes

Parts = dict[str, dict[str, float]]
"""Seconds of all chunks of each step, by direction."""

_FEW, _MANY = 1, 4


def layer_times(layer: MoELayer, batch: Callable[[], Tensor], rounds: int) -> tuple[dict[str, LayerTimes], Parts]:
    """Times by direction, forward and backward, of the layer's plan; and the parts in one chunk that they come from."""
    few, many = (_parts_alone(layer, batch, degree, rounds) for degree in (_FEW, _MANY))
    return {direction: _fitted(few[direction], many[direction]) for direction in few}, few


def _parts_alone(layer: MoELayer, batch: Callable[[], Tensor], degree: int, rounds: int) -> Parts:
    """Medians over rounds of the seconds of each step, without overlap, of a fresh batch [n, M] in each round.

    Of a chunk's experts the slowest rank's count, because all combines wait for them. Of a message the shortest time
    counts: that of the rank that all had waited for, so that waiting is not counted twice.
    """
    inline = InlineStream()
    schedule = ChunkedSchedule(degree, streams=dict.fromkeys((INTER, INTRA, COMPUTE), inline))
    layer.schedule = schedule

    def run() -> Parts:
        x = batch()
        dist.barrier()
        out = layer(x)
        dist.barrier()
        out.sum().backward()
        return {direction: _step_seconds(execution) for direction, execution in schedule.executions.items()}

    found = in_rounds({"parts": run}, rounds, lambda case: case())["parts"]
    layer.schedule = None
    return {way: {step: median(one[way][step] for one in found) for step in steps} for way, steps in found[0].items()}


def _step_seconds(execution: Execution) -> dict[str, float]:
    mine = {task: span.end_seconds - span.start_seconds for task, span in execution.timeline.spans.items()}
    of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    of_steps: dict[str, float] = {}
    for task in mine:
        step = task.split()[0]
        slowest = max if step == "experts" else min
        of_steps[step] = of_steps.get(step, 0.0) + slowest(one[task] for one in of_ranks)
    return of_steps


def _fitted(few: dict[str, float], many: dict[str, float]) -> LayerTimes:
    found = {}
    for step, seconds in few.items():
        alpha = max(0.0, (many[step] - seconds) / (_MANY - _FEW))
        found[step] = ChunkTime(alpha, max(0.0, seconds - _FEW * alpha))
    return LayerTimes(**found)
