"""Base of dispatchers whose exchange is planned and moved in steps; a whole layer is one chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe.dispatch.base import Buffers, Dispatched, ExchangePlan, Started
from laconic.moe.dispatch.in_flight import InFlightExchange, begin, moved
from laconic.moe.permute import Order
from laconic.moe.routing import Routing


@dataclass(frozen=True, eq=False)
class _StagedState:
    plan: ExchangePlan
    entered: Buffers
    """Buffers received at the experts, before `ExchangePlan.enter`."""


class StagedDispatcher(ABC):
    """A dispatcher made of its `plan`: dispatch goes out in one chunk, combine comes home in one.

    `laconic.moe.ChunkedSchedule` runs the same plan in several chunks.
    """

    @property
    @abstractmethod
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """See `laconic.moe.dispatch.base.StartsDispatch`."""

    @abstractmethod
    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        """Agree on what this routing sends, with each expert's rows (or the tokens) cut into `num_slices`.

        All ranks of the dispatcher's groups call it together; fewer experts than ranks are a RoutingError.
        """

    def start(self, x: Tensor, routing: Routing, order: Order) -> StartedDispatch:
        """See `laconic.moe.dispatch.base.StartsDispatch`."""
        plan = self.plan(routing, order)
        return StartedDispatch(plan, begin(plan, plan.begin(x), outward=True))

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched[_StagedState]:
        """See `laconic.moe.dispatch.base.Dispatcher`."""
        plan = self.plan(routing, order)
        return _entered(plan, _Exchange.apply(plan, True, False, *plan.begin(x)))

    def combine(self, rows: Tensor, dispatched: Dispatched[_StagedState]) -> Tensor:
        """See `laconic.moe.dispatch.base.Dispatcher`."""
        plan, entered = dispatched.state.plan, dispatched.state.entered
        leaving = plan.leave(0, _attached(rows, dispatched.rows), entered)
        (out,) = _Exchange.apply(plan, False, False, leaving)
        return plan.finish(out)


class StartedDispatch(Started):
    """A `StagedDispatcher`'s dispatch under way; see `laconic.moe.dispatch.base.Started`."""

    def __init__(self, plan: ExchangePlan, exchange: InFlightExchange) -> None:
        self._plan, self._exchange = plan, exchange

    def finish(self) -> Dispatched[_StagedState]:
        return _entered(self._plan, self._exchange.end())

    def abandon(self) -> None:
        self._exchange.abandon()


def _entered(plan: ExchangePlan, buffers: Buffers) -> Dispatched[_StagedState]:
    inputs = plan.enter(0, buffers)
    return Dispatched(inputs.rows, inputs.counts, _StagedState(plan, buffers))


def experts_per_rank(num_experts: int, num_places: int) -> int:
    """Return the most experts of a rank, ceil(E / N_EP); fewer experts than ranks are a RoutingError."""
    if num_experts < num_places:
        raise RoutingError(
            f"num_experts is {num_experts}, but {num_places} expert-parallel ranks need at least one each; lower ep to"
            f" {num_experts} or less"
        )
    return -(-num_experts // num_places)


def experts_of(place: int, num_experts: int, num_places: int) -> range:
    """Return the experts of expert-parallel rank `place`: ceil(E / N_EP) each, the last ranks fewer, or none.

    That is how torch.chunk and a DTensor's Shard(0) cut E rows, so parameters and their checkpoints lie like this too.
    Fewer experts than ranks are a RoutingError.
    """
    most = experts_per_rank(num_experts, num_places)
    return range(min(place * most, num_experts), min((place + 1) * most, num_experts))


def _attached(rows: Tensor, inputs: Tensor) -> Tensor:
    """Attach outputs `rows` to their `inputs`, and in any case to a graph while gradients are on.

    The other ranks' backward waits for this one's, but experts may return rows without a graph, or none.
    """
    if not torch.is_grad_enabled():
        return rows
    if not len(rows):
        rows = rows + inputs.sum().to(rows.dtype)  # a sum of no elements
    return rows if rows.requires_grad else rows.detach().requires_grad_()


class _Exchange(torch.autograd.Function):
    """One direction of the exchange in one chunk; its backward is the opposite direction."""

    @staticmethod
    def forward(ctx: Any, plan: ExchangePlan, outward: bool, is_backward: bool, *buffers: Tensor) -> Buffers:
        ctx.transpose = plan, not outward, not is_backward
        return moved(plan, buffers, outward=outward, is_backward=is_backward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Through apply, so that gradients of gradients travel as well.
        return None, None, None, *_Exchange.apply(*ctx.transpose, *grads)
