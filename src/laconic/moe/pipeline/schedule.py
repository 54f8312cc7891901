"""Chunked execution of a layer: runs what `laconic.schedule.moe_pipeline` plans on streams, forward and backward.

Experts run in the caller's thread, where autocast and hooks on saved tensors are active; communication has threads of
its own (on CUDA the caller issues everything, to streams). The order of tasks is that of the plan on every stream, so
ranks issue the same collectives in the same order on each group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.errors import ScheduleError
from laconic.moe.dispatch.base import Buffers, ExchangePlan, LocalDispatcher, Transport
from laconic.moe.dispatch.parm import S1Dispatcher
from laconic.moe.dispatch.staged import StagedDispatcher
from laconic.moe.layer import MoELayer
from laconic.moe.parallel.link_streams import pipeline_streams
from laconic.moe.pipeline.autograd import ChunkedLayer, ChunkRunner, Compute, one_call
from laconic.moe.routing import Routing
from laconic.schedule.execute import Execution, Stream, execute
from laconic.schedule.moe_pipeline import (
    COMPUTE,
    GRADIENTS,
    INTER,
    INTRA,
    ChunkTime,
    LayerTimes,
    best_degree,
    pipeline_tasks,
)
from laconic.schedule.streams import StreamPlan, Task

MEANWHILE = "meanwhile"
"""Name of the task on the compute stream that runs `MoELayer.meanwhile`, in forward."""


class GradientSlots(Protocol):
    """Reduces dense gradients while the link between nodes is idle; see `laconic.moe.pipeline.grad_reduce`."""

    def slot(self, part: str) -> Callable[[], object] | None:
        """Return the work between dispatches and combines of a part's backward; None if there is none."""

    def after(self, part: str) -> None:
        """Called when the part's backward has ended."""


class ChunkedSchedule:
    """Cuts a layer's rows into chunks that are dispatched, computed and combined at once on several streams.

    The rows of each expert are cut, after the order and before its inverse (FSMoE's capacity axis); under
    `HierarchicalDispatcher` tokens are, so that no row is sent twice. Either way a token's sum does not depend on the
    chunks: outputs and gradients of inputs are those of a whole layer, up to what the experts' matrix products do
    differently for other numbers of rows. Gradients of parameters are sums over slices: fp32 (fp64) sums in the order
    of slices, rounded once.

    Works with every dispatcher of laconic.moe; with `LocalDispatcher` there is nothing to overlap and nothing is cut.
    Gradients of gradients are not available.

    Attributes:
        executions: of the last run of this schedule, "forward" and "backward"; their `timeline` has the start and end
            of every task.
    """

    def __init__(
        self,
        forward: int = 1,
        backward: int | None = None,
        *,
        shared_link: bool = False,
        times: tuple[LayerTimes, LayerTimes] | None = None,
        gradients: GradientSlots | None = None,
        part: str = "",
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        """Set the numbers of chunks; all ranks pass the same.

        Args:
            forward, backward: numbers of chunks; backward None: as forward. The number of slices that experts run in is
                the least common multiple of both.
            shared_link: gathers among sharers wait for exchanges, as on one network.
            times: forward's and backward's, for the predicted seconds in the plans of `executions`.
            gradients: reduces dense gradients in the idle slot of `part`'s backward.
            part: name of the layer in the plan of `gradients`.
            streams: by INTER, INTRA and COMPUTE; None: `pipeline_streams` of the device, shared by all schedules.

        Raises:
            ScheduleError: a degree is below 1.
        """
        backward = forward if backward is None else backward
        for name, degree in (("forward", forward), ("backward", backward)):
            if degree < 1:
                raise ScheduleError(f"{name} is {degree!r}, but a layer is cut into at least one chunk; raise it")
        self.forward, self.backward, self.shared_link = forward, backward, shared_link
        self.times, self.gradients, self.part = times, gradients, part
        self.executions: dict[str, Execution] = {}
        self._streams = streams

    @classmethod
    def best(
        cls,
        forward: LayerTimes,
        backward: LayerTimes,
        *,
        gradient_seconds: float = 0.0,
        shared_link: bool = False,
        **options: Any,
    ) -> ChunkedSchedule:
        """Make a schedule with the degrees that the simulator finds best for these times (`best_degree`)."""
        degrees = (
            best_degree(forward, shared_link=shared_link).degree,
            best_degree(backward, gradient_seconds, shared_link=shared_link).degree,
        )
        return cls(*degrees, shared_link=shared_link, times=(forward, backward), **options)

    @property
    def num_slices(self) -> int:
        """Number of slices that each expert's rows are cut into."""
        return math.lcm(self.forward, self.backward)

    def run(self, layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
        """See `Schedule.run`. Hooks get slices; a dispatcher without an exchange plan is a ScheduleError."""
        inner = layer.dispatcher.inner if isinstance(layer.dispatcher, S1Dispatcher) else layer.dispatcher
        if isinstance(inner, LocalDispatcher):
            return layer.run_whole(x, routing)
        if not isinstance(inner, StagedDispatcher):
            raise ScheduleError(
                f"the layer's dispatcher is {type(inner).__name__}, which cannot be run in chunks; use one of"
                " laconic.moe, or no schedule"
            )
        if _is_checkpointed():
            warnings.warn(
                "torch.utils.checkpoint with use_reentrant=False (Hugging Face's default) is around a layer in chunks,"
                " and would compute it again for every chunk, so the layer runs in one piece; use_reentrant=True keeps"
                " chunks",
                stacklevel=2,
            )
            return layer.run_whole(x, routing)
        plan = inner.plan(routing, layer.order, self.num_slices)
        chunked = ChunkedLayer(self, layer, plan)
        with one_call(layer.experts, chunked.forward) as call:
            out = call(*plan.begin(x))
        return plan.finish(out)

    def execute(
        self,
        direction: str,
        plan: ExchangePlan,
        home: Buffers,
        compute: Compute,
        meanwhile: Callable[[], object] | None = None,
    ) -> Buffers:
        """Send `home` to the experts, call `compute` there for each slice, and return what comes home.

        `meanwhile` is called in the caller's thread when the first rows have been sent.
        """
        back = direction == "backward"
        degree = self.backward if back else self.forward
        transport = plan.transport(degree, backward=back)
        slot = self.gradients.slot(self.part) if back and self.gradients is not None else None
        runner = ChunkRunner(transport, home, compute, degree, self.num_slices // degree)
        actions = runner.actions() | ({GRADIENTS: slot} if slot is not None else {})
        tasks = self._plan(degree, self.times and self.times[back], transport, 0.0 if slot else None)
        if meanwhile is not None:
            actions[MEANWHILE] = meanwhile
            first = next(number for number, task in enumerate(tasks.tasks) if task.stream == COMPUTE)
            tasks = StreamPlan((*tasks.tasks[:first], Task(MEANWHILE, COMPUTE, 0.0), *tasks.tasks[first:]))
        streams = self._streams or pipeline_streams(home[0].device)
        if self.shared_link:
            streams = {**streams, INTRA: streams[INTER]}
        self.executions[direction] = execute(tasks, actions, streams)
        if back and self.gradients is not None:
            self.gradients.after(self.part)
        return runner.home()

    def _plan(
        self, degree: int, times: LayerTimes | None, transport: Transport, gradient_seconds: float | None
    ) -> StreamPlan:
        none, gathers, shares = ChunkTime(0.0, 0.0), transport.gather is not None, transport.share is not None
        if times is None:
            times = LayerTimes(none, none, none, *((none, none) if gathers else ()))
        if (times.all_gather is not None) != gathers:
            raise ScheduleError(
                f"times {'have' if times.all_gather else 'lack'} all_gather and reduce_scatter, but the layer's"
                f" dispatcher {'does' if gathers else 'does not do'} either; measure the times of this"
                " dispatcher"
            )
        if (times.share is not None) != shares:
            times = replace(times, share=none if shares else None)
        tasks = pipeline_tasks(times, degree, gradient_seconds, shared_link=self.shared_link)
        return issued_around_compute(StreamPlan(tuple(tasks)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the executions of the last run."""
        return {**self.__dict__, "executions": {}}


def issued_around_compute(plan: StreamPlan) -> StreamPlan:
    """Reorder a plan such that computation may block the thread that issues it.

    Everything before the first task on `compute` that does not wait for one is issued first, then each task on
    `compute` with what follows from it. The order on every stream stays the same.
    """
    late: set[str] = set()
    for task in plan.tasks:
        if task.stream == COMPUTE or any(name in late for name in task.after):
            late.add(task.name)
    first = [task for task in plan.tasks if task.name not in late]
    rest = [task for task in plan.tasks if task.name in late and task.stream != COMPUTE]
    ordered = []
    for task in plan.tasks:
        if task.stream == COMPUTE:
            ordered.append(task)
            known = {one.name for one in (*first, *ordered)}
            while rest and known.issuperset(rest[0].after):
                known.add(rest[0].name)
                ordered.append(rest.pop(0))
    return StreamPlan((*first, *ordered))


def _is_checkpointed() -> bool:
    """Return whether a non-reentrant checkpoint is active, which would recompute its region for every slice."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
