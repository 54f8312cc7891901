"""A layer in pieces on streams: what `laconic.schedule.moe_pipeline` plans, executed, forward and backward.

[Note: autograd in pieces]
Rows at home become outputs at home. In between, every slice's experts record a graph of their own, from the slice's
rows to its outputs; what travels is linear, and its transpose travels the same wires (`laconic.moe.wires`). One node
joins rows and all leaves that the slices' graphs reach to the outputs; its backward runs the plan of the backward, in
which autograd goes through each slice's graph. So no gradient of an expert, a hook or an adapter is written by hand,
every parameter gets one gradient, and hooks on parameters (DDP, FSDP2) fire once.

Experts run in the caller's thread, where autocast and hooks on saved tensors are; wires have threads of their own (on
CUDA everything is issued by the caller, to streams). The order of tasks is that of the plan on every stream, so ranks
issue the same collectives in the same order on each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from laconic.errors import ScheduleError
from laconic.moe.cuda_stream import CudaStream
from laconic.moe.dispatch import Dispatched, Dispatcher, LocalDispatcher
from laconic.moe.flat import FlatDispatcher
from laconic.moe.layer import MoELayer
from laconic.moe.parm import S1Dispatcher
from laconic.moe.sharded import ShardedDispatcher
from laconic.moe.wires import Exchanged, Wires
from laconic.schedule.execute import Execution, InlineStream, Stream, ThreadStream, execute
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
from laconic.schedule.streams import StreamPlan

__all__ = ["GradientWindows", "PipelineSchedule", "issued_around_compute", "pipeline_streams"]


class GradientWindows(Protocol):
    """Who reduces dense gradients while the wire between nodes is idle; `laconic.moe.windows` has one."""

    def window(self, part: str) -> Callable[[], object] | None:
        """What to do between dispatches and combines of a part's backward; None if nothing."""

    def after(self, part: str) -> None:
        """The part's backward has ended."""


class PipelineSchedule:
    """Cuts a layer's rows into chunks that are dispatched, computed and combined at once on several streams.

    The rows of each expert are cut, after the order and before its inverse (FSMoE's capacity axis), so a token's sum
    does not know of the pieces: outputs and gradients of inputs are those of a whole layer, up to what the experts'
    matrix products do differently for other numbers of rows. Gradients of parameters are sums over slices: fp32 (fp64)
    sums in the order of slices, rounded once.

    For `FlatDispatcher` (also with shards) and `ShardedDispatcher`, alone or inside of `S1Dispatcher`; with
    `LocalDispatcher` there is nothing to overlap and nothing is cut. Gradients of gradients are not available.

    Attributes:
        executions: of the last run of this schedule, "forward" and "backward"; their `timeline` says when what ran.
    """

    def __init__(
        self,
        forward: int = 1,
        backward: int | None = None,
        *,
        one_wire: bool = False,
        times: tuple[LayerTimes, LayerTimes] | None = None,
        gradients: GradientWindows | None = None,
        part: str = "",
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        """All ranks must say the same.

        Arguments:
            forward, backward: numbers of chunks; backward None: as forward. Experts run in slices of which there are
                as many as the least common multiple of both.
            one_wire: gathers among sharers wait for exchanges, as on one wire.
            times: forward's and backward's, for the predicted seconds in the plans of `executions`.
            gradients: reduces dense gradients in the window of `part`'s backward.
            streams: by INTER, INTRA and COMPUTE; None: `pipeline_streams` of the device, shared by all schedules.

        Raises ScheduleError for degrees below 1.
        """
        backward = forward if backward is None else backward
        for name, degree in (("forward", forward), ("backward", backward)):
            if degree < 1:
                raise ScheduleError(f"{name} is {degree!r}, but a layer is cut into at least one chunk; raise it")
        self.forward, self.backward, self.one_wire = forward, backward, one_wire
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
        one_wire: bool = False,
        **options: Any,
    ) -> PipelineSchedule:
        """With the degrees that the simulator finds best for these times (`best_degree`), each for its direction."""
        degrees = (
            best_degree(forward, one_wire=one_wire).degree,
            best_degree(backward, gradient_seconds, one_wire=one_wire).degree,
        )
        return cls(*degrees, one_wire=one_wire, times=(forward, backward), **options)

    @property
    def num_slices(self) -> int:
        """Into how many slices each expert's rows are cut."""
        return math.lcm(self.forward, self.backward)

    def run(self, layer: MoELayer, batch: dict[str, Any]) -> Tensor:
        """See `Schedule.run`. Hooks see slices. Raises ScheduleError for a dispatcher that has no pieces."""
        exchange = _exchange_of(layer.dispatcher)
        if exchange is None:
            layer.dispatch(batch)
            layer.compute(batch)
            return layer.combine(batch)
        _refuse_checkpoint()
        rows, counts = layer.order.permute(batch["x"], batch["routing"])
        run = _Run(self, layer, batch, Exchanged(exchange, counts, self.num_slices))
        with _one_call(layer.experts, run.forward) as call:
            out = call(rows, counts)
        result: Tensor = layer.order.combine(out, batch["routing"])
        return result

    def execute(
        self, direction: str, wires: Wires, rows: Tensor, compute: Callable[[int, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Rows [a, M] out to the experts, `compute(slice number, rows [q, M], counts)` there, and home: [a, M]."""
        back = direction == "backward"
        degree = self.backward if back else self.forward
        window = self.gradients.window(self.part) if back and self.gradients is not None else None
        flow = _Flow(wires, rows, compute, degree, self.num_slices // degree)
        actions = flow.actions() | ({GRADIENTS: window} if window is not None else {})
        plan = self._plan(degree, self.times and self.times[back], wires.has_shards, 0.0 if window else None)
        streams = self._streams or pipeline_streams(rows.device)
        if self.one_wire:
            streams = {**streams, INTRA: streams[INTER]}
        self.executions[direction] = execute(plan, actions, streams)
        if back and self.gradients is not None:
            self.gradients.after(self.part)
        assert flow.out is not None, "the plan has combined"
        return flow.out

    def _plan(
        self, degree: int, times: LayerTimes | None, has_shards: bool, gradient_seconds: float | None
    ) -> StreamPlan:
        if times is None:
            none = ChunkTime(0.0, 0.0)
            times = LayerTimes(none, none, none, *((none, none) if has_shards else ()))
        if (times.all_gather is not None) != has_shards:
            raise ScheduleError(
                f"times {'have' if times.all_gather else 'lack'} all_gather and reduce_scatter, but the layer's"
                f" dispatcher {'does' if has_shards else 'does not do'} either; measure the times of this dispatcher"
            )
        tasks = pipeline_tasks(times, degree, gradient_seconds, one_wire=self.one_wire)
        return issued_around_compute(StreamPlan(tuple(tasks)))

    def __getstate__(self) -> dict[str, Any]:
        """Without what the last run left."""
        return {**self.__dict__, "executions": {}}


def issued_around_compute(plan: StreamPlan) -> StreamPlan:
    """The same plan, issued such that what computes may hold the thread that issues.

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


_wires: dict[torch.device, dict[str, Stream]] = {}


def pipeline_streams(device: torch.device) -> Mapping[str, Stream]:
    """This process's streams for layers on a device: two wires, and the caller's thread (on CUDA its stream).

    No machine with several GPUs has run this yet.
    """
    cuda = device.type == "cuda"
    if device not in _wires:
        names = (INTER, INTRA)
        _wires[device] = {name: CudaStream() if cuda else ThreadStream(f"laconic-{name}") for name in names}
    return {**_wires[device], COMPUTE: CudaStream(torch.cuda.current_stream(device)) if cuda else InlineStream()}


def _exchange_of(dispatcher: Dispatcher) -> FlatDispatcher | ShardedDispatcher | None:
    inner = dispatcher.inner if isinstance(dispatcher, S1Dispatcher) else dispatcher
    if isinstance(inner, LocalDispatcher):
        return None
    if not isinstance(inner, (FlatDispatcher, ShardedDispatcher)):
        raise ScheduleError(
            f"the layer's dispatcher is {type(inner).__name__}, which cannot be run in pieces; use FlatDispatcher or"
            " ShardedDispatcher (also inside of S1Dispatcher), or the schedule Overlapped"
        )
    return inner


def _refuse_checkpoint() -> None:
    """Non-reentrant checkpoints compute a region again for every backward that reaches it: here for each slice."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        raise ScheduleError(
            "torch.utils.checkpoint with use_reentrant=False is around a layer in pieces, which it would compute again"
            " for every slice; use use_reentrant=True, or leave the layer out"
        )


# --- one way through the wires ---


class _Flow:
    """The actions of one plan, and what they hand to each other."""

    def __init__(
        self,
        wires: Wires,
        rows: Tensor,
        compute: Callable[[int, Tensor, Tensor], Tensor],
        degree: int,
        slices_per_chunk: int,
    ) -> None:
        self.out: Tensor | None = None
        self._wires, self._rows, self._compute = wires, rows, compute
        self._degree, self._slices_per_chunk = degree, slices_per_chunk
        self._at: list[Tensor] = [rows] * degree
        self._kept: list[Tensor] = []

    def actions(self) -> dict[str, Callable[[], object]]:
        steps = {"dispatch": self._dispatch, "experts": self._experts, "combine": self._combine}
        if self._wires.has_shards:
            steps |= {"all_gather": self._gather, "reduce_scatter": self._scatter}
        return {f"{name} {i}": partial(step, i) for name, step in steps.items() for i in range(self._degree)}

    @torch.no_grad()
    def _dispatch(self, i: int) -> None:
        rows = self._rows if self._degree == 1 else self._rows.index_select(0, self._wires.home(i))
        self._put(i, self._wires.send(i, rows))

    @torch.no_grad()
    def _gather(self, i: int) -> None:
        self._put(i, self._wires.gather(i, self._at[i]))

    def _experts(self, i: int) -> None:
        first, found = i * self._slices_per_chunk, []
        with torch.no_grad():
            slices = self._wires.arrange(i, self._at[i])
        for number, (rows, counts) in enumerate(zip(slices, self._wires.counts(i), strict=True)):
            found.append(self._compute(first + number, rows, counts))
        with torch.no_grad():
            self._put(i, self._wires.collect(i, found))

    @torch.no_grad()
    def _scatter(self, i: int) -> None:
        self._put(i, self._wires.scatter(i, self._at[i]))

    @torch.no_grad()
    def _combine(self, i: int) -> None:
        rows = self._wires.send_back(i, self._at[i])
        self._put(i, rows)
        if self._degree == 1:
            self.out = rows
            return
        if self.out is None:
            self.out = rows.new_empty(len(self._rows), rows.shape[1])
        self.out.index_copy_(0, self._wires.home(i), rows)

    def _put(self, i: int, rows: Tensor) -> None:
        if rows.is_cuda:
            self._kept.append(self._at[i])  # another stream may still read it when this one is done with it
        self._at[i] = rows


# --- autograd ---


class _Run:
    """One forward of a layer, and the backward that belongs to it; see [Note: autograd in pieces]."""

    def __init__(
        self, schedule: PipelineSchedule, layer: MoELayer, batch: dict[str, Any], exchanged: Exchanged
    ) -> None:
        self._schedule, self._exchanged = schedule, exchanged
        self._layer, self._batch = layer, batch
        self._records = torch.is_grad_enabled()
        self._slices: list[tuple[Tensor, Tensor] | None] = [None] * schedule.num_slices
        self._leaves: list[Tensor] = []

    def forward(self, rows: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Outputs [a, M] of rows [a, M] at home, with a graph if gradients are on."""
        schedule = self._schedule

        def compute(number: int, rows: Tensor, counts: Tensor) -> Tensor:
            leaf = rows.detach().requires_grad_(self._records)
            piece = dict(self._batch)
            self._layer.arrive(piece, Dispatched(leaf, counts, None))
            self._layer.compute(piece, experts)
            out: Tensor = piece["rows"]
            if self._records:
                self._slices[number] = (leaf, out)
            return out.detach()

        out = schedule.execute("forward", self._exchanged.wires(schedule.forward), rows.detach(), compute)
        if not self._records:
            return out
        self._out: Tensor | None = out
        self._batch = {}
        self._leaves = _leaves_of(filter(None, self._slices))
        # Other ranks' backward waits for this one's, so it must take part even if nothing here wants a gradient.
        anchor = rows.new_empty(0).requires_grad_()
        result: Tensor = _Joined.apply(self, rows, anchor, *self._leaves)
        return result

    def take_out(self) -> Tensor:
        """The outputs, which are not held any longer."""
        out, self._out = self._out, None
        assert out is not None, "forward has run"
        return out

    def backward(self, grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the rows at home and of the leaves."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph of the one who calls
        sums: list[Tensor | None] = [None] * len(self._leaves)

        def compute(number: int, grad: Tensor, counts: Tensor) -> Tensor:
            piece = self._slices[number]
            assert piece is not None, "looked at below, before anything travels"
            if not keep:
                self._slices[number] = None
            leaf, out = piece
            found: Iterable[Tensor | None] = [None] * (1 + len(sums))
            if out.requires_grad:
                # Graphs of slices may share nodes (such as casts that autocast remembers); they end with `piece`.
                with _without_hooks(self._leaves):
                    wanted = [leaf, *self._leaves]
                    found = torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
            of_rows, *others = found
            for place, other in enumerate(others):
                sums[place] = _plus(sums[place], other)
            return torch.zeros_like(leaf) if of_rows is None else of_rows

        if None in self._slices:
            raise ScheduleError("backward went through a layer in pieces a second time; say retain_graph=True before")
        schedule = self._schedule
        rows = schedule.execute("backward", self._exchanged.wires(schedule.backward), grad, compute)
        grads = [
            None if total is None else total.to(leaf.dtype) for total, leaf in zip(sums, self._leaves, strict=True)
        ]
        return rows, grads


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, rows: Tensor, anchor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.run, ctx.dtype = run, rows.dtype
        return run.take_out()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, others = ctx.run.backward(grads[0].contiguous())
        return None, rows.to(ctx.dtype), None, *others


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Sums of more than one in fp32 or fp64; never in place of what autograd has returned."""
    if total is None or more is None:
        return more if total is None else total
    return total + more.to(torch.promote_types(more.dtype, torch.float32))


@contextmanager
def _without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Hooks on leaves' gradients are for the sum over slices, which comes later."""
    hooks = [(found, dict(found)) for leaf in leaves if (found := leaf._backward_hooks)]
    for found, _ in hooks:
        found.clear()  # torch looks into this very dict
    try:
        yield
    finally:
        for found, kept in hooks:
            found.update(kept)


def _leaves_of(slices: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The leaves that the slices' outputs hang on, apart from the slices' rows."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    for rows, out in slices:
        waiting = [out.grad_fn]
        if out.grad_fn is None and out.requires_grad and out is not rows:
            leaves[id(out)] = out
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is None:
                waiting += [following for following, _ in node.next_functions]
            elif leaf is not rows:
                leaves[id(leaf)] = leaf
    return list(leaves.values())


@contextmanager
def _one_call(
    experts: nn.Module, forward: Callable[[Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """From (rows, counts) to `forward(rows, experts)`; for FSDP2 all slices together are one call of the module.

    FSDP2 gathers parameters before a module's call and reduces their gradients after the backward of its inputs. Once
    for each slice would be as many gathers, and reductions of gradients that are not there yet.
    """
    if not isinstance(experts, FSDPModule):
        yield lambda rows, counts: forward(rows, experts)
        return
    own = vars(experts).get("forward")
    whole = experts.forward
    vars(experts)["forward"] = lambda rows, counts: forward(rows, whole)
    try:
        yield experts
    finally:
        del vars(experts)["forward"]
        if own is not None:
            vars(experts)["forward"] = own
