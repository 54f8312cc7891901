"""A priced route cut into chunks: what the simulator hides, as far as it is hidden in fact."""

from __future__ import annotations

from dataclasses import replace

from laconic.cost.moe.routes import Route, Step
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes, pipeline_seconds

__all__ = ["hidden_in_chunks", "in_chunks"]

_SHARED = "gather rows"
"""S2's gather of what came home."""


def in_chunks(route: Route, degree: int, num_slices: int, share: float, *, one_wire: bool = False) -> Route:
    """The route with exchanges and experts in `degree` chunks, of which some hide behind others.

    num_slices: parts that experts run in, a multiple of `degree`. share: of what the simulator hides, what really is:
    where processors are shared, computing takes longer while wires are busy, and the other way round. one_wire: see
    `laconic.schedule.moe_pipeline`.

    Cut is what `PipelineSchedule` cuts: everything between ranks from the first all-to-all to the last, and the gather
    of S2's rows, which then hides behind other chunks instead of behind its own all-to-all (SAA).
    """
    steps, _ = _cut(route, degree, num_slices)
    hidden = share * hidden_in_chunks(route, degree, num_slices, one_wire=one_wire)
    return replace(route, steps=steps, hidden_seconds=hidden, degree=degree)


def hidden_in_chunks(route: Route, degree: int, num_slices: int, *, one_wire: bool = False) -> float:
    """Seconds that the simulator hides."""
    steps, times = _cut(route, degree, num_slices)
    serial = sum(steps[i].seconds for i in _parts(route))
    return serial - pipeline_seconds(times, degree, one_wire=one_wire)


def _parts(route: Route) -> list[int]:
    """Which steps are cut."""
    exchanges = [i for i, step in enumerate(route.steps) if step.operation == "all_to_all"]
    inside = range(exchanges[0], exchanges[-1] + 1) if exchanges else range(0)

    def is_cut(i: int, step: Step) -> bool:
        return step.name in ("experts", _SHARED) or (i in inside and bool(step.operation))

    return [i for i, step in enumerate(route.steps) if is_cut(i, step)]


def _cut(route: Route, degree: int, num_slices: int) -> tuple[tuple[Step, ...], LayerTimes]:
    """All steps, and the times of one direction."""
    steps, before, after = list(route.steps), list[ChunkTime](), list[ChunkTime]()
    none = experts = ChunkTime(0.0, 0.0)
    share, into = None, before
    for i in _parts(route):
        time = steps[i].chunk_time
        if steps[i].name == "experts":
            experts = time = replace(time, alpha_seconds=time.alpha_seconds * (num_slices // degree))
            into = after
        elif steps[i].name == _SHARED:
            share = time
        else:
            into.append(time)
        steps[i] = replace(steps[i], seconds=degree * time.seconds(degree))
    first, gather = before[0] if before else none, _sum(before[1:])
    last, scatter = after[-1] if after else none, _sum(after[:-1])
    if gather is None and scatter is None:
        return tuple(steps), LayerTimes(first, experts, last, share=share)
    return tuple(steps), LayerTimes(first, experts, last, gather or none, scatter or none, share)


def _sum(times: list[ChunkTime]) -> ChunkTime | None:
    if not times:
        return None
    return ChunkTime(sum(one.alpha_seconds for one in times), sum(one.work_seconds for one in times))
