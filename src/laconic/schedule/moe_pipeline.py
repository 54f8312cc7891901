"""The pipeline inside of one mixture-of-experts layer (FSMoE, arXiv 2501.10714, section 4).

The layer's rows are cut into `degree` chunks. Each is dispatched (all-to-all between nodes), gathered by the ranks that
share an expert (all-gather inside a node), run through the experts, summed (reduce-scatter inside) and combined
(all-to-all between). Three streams work at once: the link between nodes, the link inside a node, the processor.

                     issued and done in this order
    inter            D_0 .. D_r-1, gradients (backward), C_0 .. C_r-1
    intra            A_0 .. A_r-1, S_0 .. S_r-1
    compute          X_0 .. X_r-1

More chunks overlap better and pay more start-up. Which degree is best is found by simulating each (`best_degree`). The
paper's four closed forms test the simulator: they are exact where the gather takes as long as the scatter, and slightly
low elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from laconic.errors import ScheduleError
from laconic.schedule.streams import StreamPlan, Task, simulate

INTER, INTRA, COMPUTE = "inter", "intra", "compute"
"""The streams: link between nodes, link inside a node, processor."""

GRADIENTS = "gradients"
"""The task that reduces a slice of the dense gradients."""

DEGREES = range(1, 17)
"""Degrees to try by default."""


@dataclass(frozen=True)
class ChunkTime:
    """Seconds of one chunk when the work is cut into `degree` chunks: alpha_seconds + work_seconds / degree."""

    alpha_seconds: float
    work_seconds: float

    def seconds(self, degree: int) -> float:
        """Time of one of `degree` chunks."""
        return self.alpha_seconds + self.work_seconds / degree

    def __mul__(self, factor: float) -> ChunkTime:
        return ChunkTime(self.alpha_seconds * factor, self.work_seconds * factor)


@dataclass(frozen=True)
class LayerTimes:
    """Time of each step of one layer, forward or backward, on the slowest rank.

    Attributes:
        dispatch: all-to-all of tokens to their experts.
        experts: grouped matrix products.
        combine: all-to-all of outputs back.
        all_gather, reduce_scatter: inside a node; None where experts are not sharded: the plan then has no such tasks.
            They are also the steps inside nodes of a hierarchical all-to-all.
        share: the all-gather of combined outputs among model-parallel ranks (Parm's S2); None where there is none.
    """

    dispatch: ChunkTime
    experts: ChunkTime
    combine: ChunkTime
    all_gather: ChunkTime | None = None
    reduce_scatter: ChunkTime | None = None
    share: ChunkTime | None = None

    def __post_init__(self) -> None:
        if (self.all_gather is None) != (self.reduce_scatter is None):
            raise ScheduleError("all_gather and reduce_scatter must both be given (sharded experts) or both be None")

    def backward(self, experts_factor: float = 2.0) -> LayerTimes:
        """The times of the backward: the transposed steps in reverse, so gather and scatter keep their places.

        Experts take 2 times as long for the gradients of input and weights (paper, 4.4).
        """
        return replace(self, dispatch=self.combine, combine=self.dispatch, experts=self.experts * experts_factor)


def pipeline_tasks(
    times: LayerTimes,
    degree: int,
    gradient_seconds: float | None = None,
    *,
    prefix: str = "",
    after: tuple[str, ...] = (),
    shared_link: bool = False,
) -> list[Task]:
    """Make the tasks of `pipeline_plan`, names after `prefix`, to combine with others; the first wait for `after`."""
    if degree < 1:
        raise ScheduleError(f"degree is {degree!r}, but a layer is cut into at least one chunk")
    intra = INTER if shared_link else INTRA

    def task(step: str, chunk: int, stream: str, time: ChunkTime, *needs: str) -> Task:
        return Task(f"{prefix}{step} {chunk}", stream, time.seconds(degree), needs)

    tasks = []
    for i in range(degree):
        tasks.append(task("dispatch", i, INTER, times.dispatch, *after))
        if times.all_gather is not None:
            tasks.append(task("all_gather", i, intra, times.all_gather, tasks[-1].name))
        tasks.append(task("experts", i, COMPUTE, times.experts, tasks[-1].name))
    if gradient_seconds is not None:
        tasks.append(Task(f"{prefix}{GRADIENTS}", INTER, gradient_seconds, after))
    for i in range(degree):
        needed = f"{prefix}experts {i}"
        if times.reduce_scatter is not None:
            tasks.append(task("reduce_scatter", i, intra, times.reduce_scatter, needed))
            needed = tasks[-1].name
        tasks.append(task("combine", i, INTER, times.combine, needed))
        if times.share is not None:
            tasks.append(task("share", i, intra, times.share, tasks[-1].name))
    return tasks


def pipeline_plan(
    times: LayerTimes, degree: int, gradient_seconds: float | None = None, *, shared_link: bool = False
) -> StreamPlan:
    """Plan one layer in `degree` chunks.

    Its tasks are `dispatch i`, `all_gather i`, `experts i`, `reduce_scatter i`, `combine i` and `share i`. The same
    names serve forward and backward; in backward, `dispatch` carries the gradients of what forward combined.

    Args:
        times: of the forward or the backward.
        degree: number of chunks.
        gradient_seconds: of the task `gradients`, which reduces dense gradients between dispatches and combines, where
            the link between nodes is idle. None leaves it out.
        shared_link: traffic inside and between nodes shares one link, as where both go through the same root.

    Raises:
        ScheduleError: the degree is below 1, or seconds are negative.
    """
    return StreamPlan(tuple(pipeline_tasks(times, degree, gradient_seconds, shared_link=shared_link)))


def pipeline_seconds(
    times: LayerTimes, degree: int, gradient_seconds: float = 0.0, *, shared_link: bool = False
) -> float:
    """Makespan of `pipeline_plan`."""
    return simulate(pipeline_plan(times, degree, gradient_seconds, shared_link=shared_link)).makespan_seconds


@dataclass(frozen=True)
class DegreeChoice:
    """The best degree, its seconds, and the (degree, seconds) of all candidates."""

    degree: int
    seconds: float
    candidates: tuple[tuple[int, float], ...]


def best_degree(
    times: LayerTimes, gradient_seconds: float = 0.0, degrees: Iterable[int] = DEGREES, *, shared_link: bool = False
) -> DegreeChoice:
    """Choose the degree with the smallest makespan by simulation; of equals, the smallest.

    The paper minimizes its closed forms over real degrees by SLSQP; a scan over integers is as good, needs no solver
    and holds where gather and scatter take different times.
    """
    tried = tuple(
        (d, pipeline_seconds(times, d, gradient_seconds, shared_link=shared_link)) for d in sorted(set(degrees))
    )
    if not tried:
        raise ScheduleError("degrees is empty, but at least one degree must be tried")
    degree, seconds = min(tried, key=lambda one: (one[1], one[0]))
    return DegreeChoice(degree, seconds, tried)
