"""A layer in pieces, as autograd sees it: graphs of slices, and one node that joins them.

[Note: autograd in pieces]
Rows at home become outputs at home. In between, every slice's experts record a graph of their own, from the slice's
rows to its outputs; what travels is linear, and its transpose travels the same wires
(`laconic.moe.dispatch.chunked`). One node
joins rows and all leaves that the slices' graphs reach to the outputs; its backward runs the plan of the backward, in
which autograd goes through each slice's graph. So no gradient of an expert, a hook or an adapter is written by hand,
every parameter gets one gradient, and hooks on parameters (DDP, FSDP2) fire once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.errors import ScheduleError
from laconic.moe.dispatch.base import Dispatched
from laconic.moe.dispatch.chunked import Exchanged, Parcel, Wires
from laconic.moe.layer import MoELayer
from laconic.ops.derivatives import first_derivatives

__all__ = ["Compute", "Executes", "Flow", "Run", "one_call"]

Compute = Callable[[int, Parcel], Parcel]
"""What is done with a slice, by its number, where the experts are."""


class Executes(Protocol):
    """Who runs plans; `laconic.moe.PipelineSchedule`."""

    @property
    def num_slices(self) -> int:
        """In all."""

    def execute(self, direction: str, exchanged: Exchanged, home: Parcel, compute: Compute) -> Parcel:
        """`home` out to the experts in one direction, `compute` there, and what comes home."""


class Flow:
    """The actions of one plan, and what they hand to each other."""

    def __init__(self, wires: Wires, home: Parcel, compute: Compute, degree: int, slices_per_chunk: int) -> None:
        self._wires, self._home, self._compute = wires, home, compute
        self._degree, self._slices_per_chunk = degree, slices_per_chunk
        self._at: list[Parcel] = [()] * degree
        self._kept: list[Parcel] = []

    def actions(self) -> dict[str, Callable[[], object]]:
        """By task of `laconic.schedule.pipeline_tasks`."""
        steps = {"dispatch": self._dispatch, "experts": self._experts, "combine": self._combine}
        if self._wires.has_shards:
            steps |= {"all_gather": self._gather, "reduce_scatter": self._scatter}
        if self._wires.shares:
            steps["share"] = self._share
        return {f"{name} {i}": partial(step, i) for name, step in steps.items() for i in range(self._degree)}

    @torch.no_grad()
    def _dispatch(self, i: int) -> None:
        self._put(i, self._wires.send(i, self._home))

    @torch.no_grad()
    def _gather(self, i: int) -> None:
        self._put(i, self._wires.gather(i, self._at[i]))

    def _experts(self, i: int) -> None:
        first, found = i * self._slices_per_chunk, []
        with torch.no_grad():
            slices = self._wires.arrange(i, self._at[i])
        for number, parcel in enumerate(slices):
            found.append(self._compute(first + number, parcel))
        with torch.no_grad():
            self._put(i, self._wires.collect(i, found))

    @torch.no_grad()
    def _scatter(self, i: int) -> None:
        self._put(i, self._wires.scatter(i, self._at[i]))

    @torch.no_grad()
    def _combine(self, i: int) -> None:
        self._put(i, self._wires.send_back(i, self._at[i]))
        if not self._wires.shares:
            self._wires.land(i, self._at[i])

    @torch.no_grad()
    def _share(self, i: int) -> None:
        self._put(i, self._wires.share(i, self._at[i]))
        self._wires.land(i, self._at[i])

    def _put(self, i: int, parcel: Parcel) -> None:
        if parcel[0].is_cuda:
            self._kept.append(self._at[i])  # another stream may still read it when this one is done with it
        self._at[i] = parcel


class Run:
    """One forward of a layer, and the backward that belongs to it; see [Note: autograd in pieces]."""

    def __init__(self, schedule: Executes, layer: MoELayer, batch: dict[str, Any], exchanged: Exchanged) -> None:
        self._schedule, self._exchanged = schedule, exchanged
        self._layer, self._batch = layer, batch
        self._records = torch.is_grad_enabled()
        self._slices: list[tuple[Parcel, Tensor] | None] = [None] * schedule.num_slices
        self._leaves: list[Tensor] = []

    def forward(self, inputs: Parcel, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What comes home for `Exchanged.inputs`, with a graph if gradients are on."""

        def compute(number: int, parcel: Parcel) -> Parcel:
            parcel = tuple(one.detach().requires_grad_(self._records) for one in parcel)
            piece = dict(self._batch)
            self._layer.arrive(piece, Dispatched(*self._exchanged.enter(number, parcel), None))
            self._layer.compute(piece, experts)
            out = self._exchanged.leave(number, piece["rows"], parcel)
            if self._records:
                self._slices[number] = (parcel, out)
            return (out.detach(),)

        home = tuple(one.detach() for one in inputs)
        (out,) = self._schedule.execute("forward", self._exchanged, home, compute)
        if not self._records:
            return out
        self._out: Tensor | None = out
        self._batch = {}
        self._leaves = _leaves_of(filter(None, self._slices))
        # Other ranks' backward waits for this one's, so it must take part even if nothing here wants a gradient.
        anchor = out.new_empty(0).requires_grad_()
        result: Tensor = _Joined.apply(self, len(inputs), anchor, *inputs, *self._leaves)
        return result

    def take_out(self) -> Tensor:
        """The outputs, which are not held any longer."""
        out, self._out = self._out, None
        assert out is not None, "forward has run"
        return out

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and of the leaves."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph of the one who calls
        sums = [_Sum() for _ in self._leaves]

        def compute(number: int, grads: Parcel) -> Parcel:
            piece = self._slices[number]
            assert piece is not None, "looked at below, before anything travels"
            if not keep:
                self._slices[number] = None
            parcel, out = piece
            found: Sequence[Tensor | None] = [None] * (len(parcel) + len(sums))
            if out.requires_grad:
                # Graphs of slices may share nodes (such as casts that autocast remembers); they end with `piece`.
                with _without_hooks(self._leaves):
                    wanted = [*parcel, *self._leaves]
                    found = torch.autograd.grad(out, wanted, grads, retain_graph=True, allow_unused=True)
            for total, other in zip(sums, found[len(parcel) :], strict=True):
                total.add(other)
            return tuple(torch.zeros_like(one) if g is None else g for one, g in zip(parcel, found, strict=False))

        if None in self._slices:
            raise ScheduleError("backward went through a layer in pieces a second time; say retain_graph=True before")
        home = self._schedule.execute("backward", self._exchanged, (grad,), compute)
        values = ((total.value, leaf.dtype) for total, leaf in zip(sums, self._leaves, strict=True))
        grads = (None if value is None else value.to(dtype) for value, dtype in values)
        return *home, *grads


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, num_inputs: int, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.dtypes = run, [one.dtype for one in inputs[:num_inputs]]
        return run.take_out()

    @staticmethod
    @first_derivatives(
        ScheduleError,
        "a second derivative (create_graph=True) reaches a layer in chunks, which has none; run the layer without a"
        " PipelineSchedule for such steps",
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.run.backward(grads[0].contiguous())
        cast = (grad.to(dtype) for grad, dtype in zip(found, ctx.dtypes, strict=False))
        return None, None, None, *cast, *found[len(ctx.dtypes) :]


class _Sum:
    """Of gradients, in fp32 or fp64 if there are several; what autograd has returned is never written to."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._is_own = False

    def add(self, more: Tensor | None) -> None:
        if more is None or self.value is None:
            self.value = more if self.value is None else self.value
        elif self._is_own:
            self.value.add_(more)
        else:
            self.value = self.value + more.to(torch.promote_types(more.dtype, torch.float32))
            self._is_own = True


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


def _leaves_of(slices: Iterable[tuple[Parcel, Tensor]]) -> list[Tensor]:
    """The leaves that the slices' outputs hang on, apart from what the slices got."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    for parcel, out in slices:
        own, waiting = {id(one) for one in parcel}, [out.grad_fn]
        if out.grad_fn is None and out.requires_grad and id(out) not in own:
            leaves[id(out)] = out
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is None:
                waiting += [following for following, _ in node.next_functions]
            elif id(leaf) not in own:
                leaves[id(leaf)] = leaf
    return list(leaves.values())


@contextmanager
def one_call(
    experts: nn.Module, forward: Callable[[Parcel, Callable[[Tensor, Tensor], Tensor]], Tensor]
) -> Iterator[Callable[..., Tensor]]:
    """From inputs to `forward(inputs, experts)`; for FSDP2 all slices together are one call of the module.

    FSDP2 gathers parameters before a module's call and reduces their gradients after the backward of its inputs. Once
    for each slice would be as many gathers, and reductions of gradients that are not there yet.
    """
    if not isinstance(experts, FSDPModule):
        yield lambda *inputs: forward(inputs, experts)
        return
    own = vars(experts).get("forward")
    whole = experts.forward
    vars(experts)["forward"] = lambda *inputs: forward(inputs, whole)
    try:
        yield experts
    finally:
        del vars(experts)["forward"]
        if own is not None:
            vars(experts)["forward"] = own
