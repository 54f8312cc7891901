"""Backward of a layer as a plan on streams too, with a place for reductions of dense gradients in its middle.

`Pipelined` leaves backward to autograd, which runs one thing after the other. Here each piece is three graphs (to the
experts, in them, back), cut where the plan's tasks meet. Backward runs autograd on each of them in a task of its own:
nobody writes a derivative by hand, and while one piece's gradients travel, another's are in the experts. Between the
gradients that go out and those that come back the wire is idle; `between` is called there (FSMoE's gradient
partitioning, arXiv 2501.10714, section 5; `WindowedReduction` does it).

    wire        D_0 .. D_r-1, between, C_0 .. C_r-1
    compute     X_0 .. X_r-1

Parameters of the experts get their gradients inside, as with reentrant checkpoints: `backward()` fills them, but
`torch.autograd.grad` and DDP around the experts would not see them. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from laconic.collectives import operations
from laconic.collectives.codec import Codec
from laconic.errors import ConfigError
from laconic.moe.layer import MoELayer
from laconic.moe.pipelined import Pipelined, pieces
from laconic.schedule.execute import Stream, execute
from laconic.schedule.streams import StreamPlan, Task

__all__ = ["Overlapped", "WindowedReduction"]

_BETWEEN = "gradients"


class Overlapped(Pipelined):
    """A `Schedule` of r pieces on two streams, "wire" and "compute", forward and backward.

    Outputs and gradients are those of `Pipelined` up to rounding: pieces may add to a parameter's in another order.
    """

    def __init__(
        self, degree: int, streams: Mapping[str, Stream] | None = None, *, between: Callable[[], object] | None = None
    ) -> None:
        """See `Pipelined`.

        Arguments:
            between: called in every backward on the wire's stream, after the last piece's gradients went to the experts
                and before the first comes back. Every rank must send the same there.
        """
        super().__init__(degree, streams)
        self.between = between
        self.backward_plan = _with_gap(self.plan) if between is not None else self.plan

    def run(self, layer: MoELayer, batch: dict[str, Any]) -> Tensor:
        """See `Schedule.run`."""
        if not torch.is_grad_enabled():
            return super().run(layer, batch)
        anchor = batch["x"].new_zeros(()).requires_grad_()  # experts learn also where nothing before them does
        return cast(Tensor, _Run.apply(self, layer, batch, batch["x"], batch["routing"].weights, anchor))


def _with_gap(plan: StreamPlan) -> StreamPlan:
    first = next(number for number, task in enumerate(plan.tasks) if task.name.startswith("experts"))
    return StreamPlan((*plan.tasks[:first], Task(_BETWEEN, "wire", 0.0), *plan.tasks[first:]))


@dataclass
class _Piece:
    """One piece's three graphs: `x` to `sent`, `arrived` to `made`, `returned` and `weights` to `out`."""

    batch: dict[str, Any]
    x: Tensor
    weights: Tensor
    sent: Tensor | None = None
    arrived: Tensor | None = None
    made: Tensor | None = None
    returned: Tensor | None = None
    out: Tensor | None = None

    @torch.enable_grad()
    def dispatch(self, layer: MoELayer) -> None:
        layer.dispatch(self.batch)
        self.sent = self.batch["rows"]
        self.arrived = self.sent.detach().requires_grad_()
        self.batch["dispatched"] = replace(self.batch["dispatched"], rows=self.arrived)
        self.batch["rows"] = self.arrived

    @torch.enable_grad()
    def compute(self, layer: MoELayer) -> None:
        layer.compute(self.batch)
        self.made = self.batch["rows"]
        self.returned = self.made.detach().requires_grad_()
        self.batch["rows"] = self.returned

    @torch.enable_grad()
    def combine(self, layer: MoELayer) -> None:
        self.out = layer.combine(self.batch)
        self.batch.clear()

    def combine_backward(self, grad: Tensor, grads: list[Tensor | None]) -> None:
        """Autograd from `out` on: leaves the gradient of `returned` in place of the graph, that of weights in grads."""
        assert self.out is not None
        assert self.returned is not None
        wanted = [self.returned, self.weights] if self.weights.requires_grad else [self.returned]
        found = torch.autograd.grad(self.out, wanted, grad, allow_unused=True)
        self.out, self.returned = None, found[0]
        grads.append(found[1] if len(found) > 1 else None)

    def compute_backward(self) -> None:
        """Autograd through the experts: their parameters' gradients, and that of `arrived`."""
        assert self.made is not None
        if self.made.requires_grad and self.returned is not None:
            torch.autograd.backward(self.made, self.returned)
        self.made = self.returned = None

    def dispatch_backward(self, grads: list[Tensor | None]) -> None:
        """Autograd back to the tokens. All ranks take part if their tokens need a gradient."""
        assert self.sent is not None
        assert self.arrived is not None
        found: tuple[Tensor | None, ...] = (None,)
        if self.x.requires_grad:
            grad = self.arrived.grad if self.arrived.grad is not None else torch.zeros_like(self.arrived)
            found = torch.autograd.grad(self.sent, self.x, grad, allow_unused=True)
        self.sent = self.arrived = None
        grads.append(found[0])


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        schedule: Overlapped,
        layer: MoELayer,
        batch: dict[str, Any],
        x: Tensor,
        weights: Tensor,
        anchor: Tensor,
    ) -> Tensor:
        *_, x_needs, weights_need, _ = ctx.needs_input_grad
        found: list[_Piece] = []
        for part in pieces(batch, schedule.degree):
            part["x"] = part["x"].detach().requires_grad_(x_needs)
            own = part["routing"].weights.detach().requires_grad_(weights_need)
            part["routing"] = replace(part["routing"], weights=own)
            found.append(_Piece(part, part["x"], own))
        actions: dict[str, Callable[[], object]] = {}
        for i, piece in enumerate(found):
            actions[f"dispatch {i}"] = partial(piece.dispatch, layer)
            actions[f"experts {i}"] = partial(piece.compute, layer)
            actions[f"combine {i}"] = partial(piece.combine, layer)
        execute(schedule.plan, actions, schedule.streams)
        ctx.schedule, ctx.pieces = schedule, found
        return torch.cat([cast(Tensor, piece.out).detach() for piece in found])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        schedule, found = ctx.schedule, ctx.pieces
        if found is None:
            raise RuntimeError("backward through an overlapped layer a second time, but its graphs are gone")
        ctx.pieces = None
        of_x: list[Tensor | None] = []
        of_weights: list[Tensor | None] = []
        actions: dict[str, Callable[[], object]] = {}
        for i, (piece, part) in enumerate(zip(found, grad.split([len(one.x) for one in found]), strict=True)):
            actions[f"dispatch {i}"] = partial(piece.combine_backward, part, of_weights)
            actions[f"experts {i}"] = piece.compute_backward
            actions[f"combine {i}"] = partial(piece.dispatch_backward, of_x)
        if schedule.between is not None:
            actions[_BETWEEN] = schedule.between
        execute(schedule.backward_plan, actions, schedule.streams)
        return None, None, None, _joined(of_x), _joined(of_weights), None


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


class WindowedReduction:
    """Averages dense gradients over a group, some bytes in each window of backward and the rest at the end.

    Give the object itself to `Overlapped` as `between`; call `finish` after backward, before the optimizer. All ranks
    of the group must make their gradients in the same order. Each parameter may get its gradient once per step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        nbytes_per_window: float,
        *,
        codec: Codec | str = "auto",
    ) -> None:
        """Watch `parameters`.

        Arguments:
            group: dense data parallel ranks.
            nbytes_per_window: at most so many bytes of gradients per call, as `laconic.schedule.moe.fill_windows`
                plans; whole parameters, so a larger one waits for `finish`.
            codec: of the all-reduce, as in `laconic.collectives`; Blockwise reduces in 8 bits.

        Raises ConfigError if nbytes_per_window is negative.
        """
        if nbytes_per_window < 0:
            raise ConfigError(f"nbytes_per_window is {nbytes_per_window}, but must be at least 0")
        self.group, self.codec, self.nbytes_per_window = group, codec, nbytes_per_window
        self.reduced_nbytes = {"windows": 0, "end": 0}
        self._ready: list[nn.Parameter] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._ready.append)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def __call__(self) -> None:
        """Reduce what is ready and fits into one window, oldest first."""
        chosen, room = [], self.nbytes_per_window
        while self._ready and (nbytes := _nbytes(self._ready[0])) <= room:
            chosen.append(self._ready.pop(0))
            room -= nbytes
        self._reduce(chosen, "windows")

    def finish(self) -> None:
        """Reduce all that is left."""
        chosen, self._ready[:] = list(self._ready), []
        self._reduce(chosen, "end")

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _reduce(self, parameters: list[nn.Parameter], when: str) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
            self.reduced_nbytes[when] += _nbytes(parameter)
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            operations.all_reduce(flat, self.group, op="avg", codec=self.codec)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def _nbytes(parameter: nn.Parameter) -> int:
    assert parameter.grad is not None
    return parameter.grad.numel() * parameter.grad.element_size()
