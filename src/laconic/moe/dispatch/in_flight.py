"""One direction of an exchange, started and waited for by two nodes of autograd.

[Note: begin and end]
Between `begin` and `end` of an exchange the caller computes, and rows travel on the stream of the link between nodes:
on CPUs a thread of its own. In backward the two change their roles: the gradient of `end` begins the exchange back, the
gradient of `begin` waits for it, and what was computed in between has its backward in between. That is autograd's own
order, in which later nodes of forward go first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.moe.dispatch.base import Buffers, ExchangePlan
from laconic.moe.parallel.link_streams import pipeline_streams
from laconic.schedule.execute import TaskHandle
from laconic.schedule.moe_pipeline import INTER


def moved(plan: ExchangePlan, buffers: Buffers, *, outward: bool, is_backward: bool) -> Buffers:
    """Move buffers through all steps of one direction of a plan, in one chunk; where gradients are off."""
    transport = plan.transport(1, backward=is_backward)
    if outward:
        buffers = transport.send(0, buffers)
        if transport.gather is not None:
            buffers = transport.gather(0, buffers)
        return transport.unpack(0, buffers)[0]
    buffers = transport.pack(0, [buffers])
    if transport.scatter is not None:
        buffers = transport.scatter(0, buffers)
    buffers = transport.send_back(0, buffers)
    if transport.share is not None:
        buffers = transport.share(0, buffers)
    return transport.join([buffers])


class InFlightExchange:
    """One direction of a plan's exchange; see [Note: begin and end]."""

    def __init__(self, plan: ExchangePlan, *, outward: bool, is_backward: bool = False) -> None:
        self._plan, self._outward, self._is_backward = plan, outward, is_backward
        self._token: Tensor | None = None
        self._work: TaskHandle | None = None
        self._sent: Buffers = ()
        self.back: InFlightExchange | None = None
        """The exchange of the gradients, while backward is between the two nodes."""

    def reversed(self) -> InFlightExchange:
        """Return the exchange of the gradients, not started."""
        return InFlightExchange(self._plan, outward=not self._outward, is_backward=not self._is_backward)

    def start(self, buffers: Buffers) -> None:
        """Start to move the buffers behind all that the caller has done so far."""
        stream = pipeline_streams(buffers[0].device)[INTER]
        self._sent = tuple(one.detach() for one in buffers)  # held for the stream that reads them
        stream.start()
        move = partial(moved, self._plan, self._sent, outward=self._outward, is_backward=self._is_backward)
        self._work = stream.submit(move, ())

    def arrived(self) -> Buffers:
        """Wait for the buffers; raises what went wrong on their way."""
        assert self._work is not None, "the exchange has begun"
        work, self._work = self._work, None
        work.wait()
        self._sent = ()
        buffers: Any = work.result()
        return tuple(one.detach() for one in buffers)

    def end(self) -> Buffers:
        """Wait for the buffers; differentiable."""
        result: Buffers = _End.apply(self, self._token)
        self._token = None
        return result

    def abandon(self) -> None:
        """Wait for what is under way, so that the next exchange of these groups finds them idle; drop the result."""
        if self._work is not None:
            self._work.wait()
            self._work, self._token, self._sent = None, None, ()


def begin(plan: ExchangePlan, buffers: Buffers, *, outward: bool) -> InFlightExchange:
    """Start to move buffers; differentiable."""
    exchange = InFlightExchange(plan, outward=outward)
    exchange._token = _Begin.apply(exchange, *buffers)
    return exchange


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: InFlightExchange, *buffers: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.start(buffers)
        return buffers[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.exchange.back
        # Through apply, so that gradients of gradients travel as well.
        return None, *_End.apply(back, grads[0])


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: InFlightExchange, token: Tensor) -> Buffers:
        ctx.exchange = exchange
        return exchange.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.back = back = ctx.exchange.reversed()
        return None, _Begin.apply(back, *grads)
