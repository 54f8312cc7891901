"""Autograd of a chunked layer: one graph per slice, and one node that joins them.

[Note: autograd in chunks]
Rows at home become outputs at home. In between, every slice's experts record a graph of their own, from the slice's
rows to its outputs; the exchange is linear, and its transpose uses the same transport (`laconic.moe.dispatch.base`).
One node joins rows and all leaves that the slices' graphs reach to the outputs; its backward runs the plan of the
backward, in which autograd goes through each slice's graph. So no gradient of an expert, a hook or an adapter is
written by hand, every parameter gets one gradient, and hooks on parameters (DDP, FSDP2) fire once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.errors import ScheduleError
from laconic.moe.dispatch.base import Buffers, ExchangePlan, Step, Transport
from laconic.moe.layer import MoELayer
from laconic.ops.derivatives import edge_of, first_derivatives

if TYPE_CHECKING:
    from laconic.moe.pipeline.schedule import ChunkedSchedule

Compute = Callable[[int, Buffers], Buffers]
"""Computation on one slice at the experts: from the slice's number and buffers to the buffers that go home."""


class ChunkRunner:
    """Actions of one plan, and the buffers that each chunk passes from one action to the next."""

    def __init__(
        self, transport: Transport, home: Buffers, compute: Compute, degree: int, slices_per_chunk: int
    ) -> None:
        self._transport, self._home, self._compute = transport, home, compute
        self._degree, self._slices_per_chunk = degree, slices_per_chunk
        self._at: list[Buffers] = [()] * degree
        self._kept: list[Buffers] = []

    def actions(self) -> dict[str, Callable[[], object]]:
        """Return the actions by name of the task of `laconic.schedule.pipeline_tasks`."""
        of = self._transport
        steps = {"all_gather": of.gather, "reduce_scatter": of.scatter, "combine": of.send_back, "share": of.share}
        actions: dict[str, Callable[[], object]] = {}
        for i in range(self._degree):
            actions |= {f"dispatch {i}": partial(self._dispatch, i), f"experts {i}": partial(self._experts, i)}
            for name, step in steps.items():
                if step is not None:
                    actions[f"{name} {i}"] = partial(self._pass_on, i, step)
        return actions

    @torch.no_grad()
    def _dispatch(self, i: int) -> None:
        self._put(i, self._transport.send(i, self._home))

    @torch.no_grad()
    def _pass_on(self, i: int, step: Step) -> None:
        self._put(i, step(i, self._at[i]))

    @torch.no_grad()
    def home(self) -> Buffers:
        """Return what came home, when all actions have run."""
        return self._transport.join(self._at)

    def _experts(self, i: int) -> None:
        first, found = i * self._slices_per_chunk, []
        with torch.no_grad():
            slices = self._transport.unpack(i, self._at[i])
        for number, buffers in enumerate(slices):
            found.append(self._compute(first + number, buffers))
        with torch.no_grad():
            self._put(i, self._transport.pack(i, found))

    def _put(self, i: int, buffers: Buffers) -> None:
        if buffers[0].is_cuda:
            self._kept.append(self._at[i])  # another stream may still read it
        self._at[i] = buffers


class ChunkedLayer:
    """One forward of a layer, and its backward; see [Note: autograd in chunks]."""

    def __init__(self, schedule: ChunkedSchedule, layer: MoELayer, plan: ExchangePlan) -> None:
        self._schedule, self._layer, self._plan = schedule, layer, plan
        self._records = torch.is_grad_enabled()
        self._slices: list[tuple[Buffers, Tensor] | None] = [None] * schedule.num_slices
        self._leaves: list[Tensor] = []

    def forward(self, inputs: Buffers, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the plan on the buffers of `ExchangePlan.begin`; the result has a graph if gradients are on."""

        def compute(number: int, entered: Buffers) -> Buffers:
            entered = tuple(one.detach().requires_grad_(self._records) for one in entered)
            rows = self._layer.compute(self._plan.enter(number, entered), experts)
            out = self._plan.leave(number, rows, entered)
            if self._records:
                self._slices[number] = (entered, out)
            return (out.detach(),)

        home = tuple(one.detach() for one in inputs)
        meanwhile = self._layer.meanwhile
        run = None if meanwhile is None else meanwhile.run
        (out,) = self._schedule.execute("forward", self._plan, home, compute, run)
        if not self._records:
            return out
        self._out: Tensor | None = out
        self._leaves = _leaves_of(filter(None, self._slices))
        # Other ranks' backward waits for this one's, so it must take part even if nothing here wants a gradient.
        anchor = out.new_empty(0).requires_grad_()
        result: Tensor = _Joined.apply(self, len(inputs), anchor, *inputs, *self._reduced_leaves())
        return result

    def _reduced_leaves(self) -> list[Tensor]:
        """List the leaves, of experts behind the node that reduces their gradients: once, not slice by slice."""
        mean = self._layer.mean_of_forward()
        if mean is None:
            return self._leaves
        own = {id(p) for p in self._layer.experts.parameters()}
        reduced = iter(mean.through(leaf for leaf in self._leaves if id(leaf) in own))
        return [next(reduced) if id(leaf) in own else leaf for leaf in self._leaves]

    def take_out(self) -> Tensor:
        """Return the outputs and release them."""
        out, self._out = self._out, None
        assert out is not None, "forward has run"
        return out

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs and of the leaves; ScheduleError if it runs again without retain_graph."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph of the running backward
        sums = [_Sum() for _ in self._leaves]

        def compute(number: int, grads: Buffers) -> Buffers:
            of_slice = self._slices[number]
            assert of_slice is not None, "looked at below, before anything travels"
            if not keep:
                self._slices[number] = None
            entered, out = of_slice
            found: Sequence[Tensor | None] = [None] * (len(entered) + len(sums))
            if out.requires_grad:
                # Graphs of slices may share nodes (such as casts that autocast caches); they end with `of_slice`.
                with without_hooks(self._leaves):
                    wanted = [*entered, *self._leaves]
                    found = torch.autograd.grad(out, wanted, grads, retain_graph=True, allow_unused=True)
            for total, other in zip(sums, found[len(entered) :], strict=True):
                total.add(other)
            return tuple(torch.zeros_like(one) if g is None else g for one, g in zip(entered, found, strict=False))

        if None in self._slices:
            raise ScheduleError("backward went through a layer in chunks a second time; say retain_graph=True before")
        home = self._schedule.execute("backward", self._plan, (grad,), compute)
        values = ((total.value, leaf.dtype) for total, leaf in zip(sums, self._leaves, strict=True))
        grads = (None if value is None else value.to(dtype) for value, dtype in values)
        return *home, *grads


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: ChunkedLayer, num_inputs: int, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.dtypes = run, [one.dtype for one in inputs[:num_inputs]]
        ctx.save_for_backward(*map(edge_of, inputs))
        return run.take_out()

    @staticmethod
    @first_derivatives(
        ScheduleError,
        "a second derivative (create_graph=True) reaches a layer in chunks, which has none; run the layer without a"
        " ChunkedSchedule for such steps",
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.run.backward(grads[0].contiguous())
        cast = (grad.to(dtype) for grad, dtype in zip(found, ctx.dtypes, strict=False))
        return None, None, None, *cast, *found[len(ctx.dtypes) :]


class _Sum:
    """Sum of gradients, in fp32 or fp64 if there are several; never writes to a tensor that autograd returned."""

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
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Disable hooks on the leaves' gradients; they are for the sum over slices, which comes later."""
    hooks = [(found, dict(found)) for leaf in leaves if (found := leaf._backward_hooks)]
    for found, _ in hooks:
        found.clear()  # torch reads this dict itself
    try:
        yield
    finally:
        for found, kept in hooks:
            found.update(kept)


def _leaves_of(slices: Iterable[tuple[Buffers, Tensor]]) -> list[Tensor]:
    """List the leaves of the slices' outputs, without the slices' own inputs."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    for entered, out in slices:
        own, waiting = {id(one) for one in entered}, [out.grad_fn]
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
    experts: nn.Module, forward: Callable[[Buffers, Callable[[Tensor, Tensor], Tensor]], Tensor]
) -> Iterator[Callable[..., Tensor]]:
    """Yield a function from inputs to `forward(inputs, experts)`; FSDP2 sees one call of the module for all slices.

    FSDP2 gathers parameters before a module's call and reduces their gradients after the backward of its inputs. One
    call per slice would gather as often, and reduce gradients that are not there yet.
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
