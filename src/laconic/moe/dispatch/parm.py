"""A layer inside an MP group, where N_MP ranks have the same tokens: Parm's schedules (arXiv 2407.00599).

[Note: where MP is paused]
Per rank n tokens [n, M], a assignments. The baseline sends what each of the N_MP ranks has, so each expert sees every
row N_MP times. S1 and S2 pause MP: each rank takes n / N_MP tokens through the experts and the results are gathered.

    baseline   ESP-AllGather of tokens, gate, EP-AlltoAll, experts, ESP-AllReduce, EP-AlltoAll, own tokens
    S1         split of tokens, gate on n / N_MP, joint AlltoAll, experts, joint AlltoAll, sums, MP-AllGather of n
               tokens
    S2         gate on n, split of rows, joint AlltoAll, experts, joint AlltoAll overlapped with MP-AllGather of a
               rows, sums

Backward of a split is the gather and the other way round, so each schedule has a forward side (where outputs are
gathered) and a backward side (where the gradients of inputs are), and the two may be chosen apart: `S2Dispatcher`
gathers "tokens" or "rows" on either side. A capacity counts n tokens in the baseline and in S2, n / N_MP in S1.

[Note: whose gradient]
MP ranks compute the same loss of the same tokens, J = sum over dp of L. After backward each MP rank has dJ/dx of its
own copy, the gate's parameters have the gradient of that dp rank's tokens, alike on all MP ranks, and the experts'
parameters that of all rows they saw, to be added over edp (`laconic.moe.replica_gradients`).

In the baseline and in S2 the ranks of an MP (baseline: ESP) group must decide alike: a gate with noise needs the same
random numbers on them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Dispatched, Dispatcher
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher, gathered_counts
from laconic.moe.dispatch.flat import Arrival, FlatDispatcher, attached, num_local_experts
from laconic.moe.dispatch.overlapped_a2a_allgather import SaaPlan, gather_home, send_own
from laconic.moe.gates.base import Gate
from laconic.moe.parallel.autograd_collectives import (
    all_gather,
    all_reduce,
    gather,
    replicated_call,
    split,
    split_sizes,
    total,
)
from laconic.moe.parallel.grid import Grid
from laconic.moe.permute import Order
from laconic.moe.routing import Routing, SoftRouting
from laconic.moe.row_ops import permuted

__all__ = ["BaselineDispatcher", "Gathered", "Path", "S1Dispatcher", "S2Dispatcher", "make_dispatcher"]

Path = Literal["joint", "sharded", "baseline", "s1", "s2"]
Gathered = Literal["tokens", "rows"]


class BaselineDispatcher:
    """DeepSpeed-MoE's way: MP is not paused, and everything is done N_MP times. To compare with."""

    def __init__(self, grid: Grid, *, codec: Codec | str = "auto") -> None:
        """`codec` of rows, tokens and gradients, as in `laconic.collectives`."""
        self.grid, self.codec = grid, codec
        self._exchange = FlatDispatcher(grid.ep, codec=codec)

    @property
    def exchange(self) -> FlatDispatcher:
        """Between EP ranks."""
        return self._exchange

    def route(self, gate: Gate, x: Tensor) -> tuple[Tensor, Routing | SoftRouting, Any]:
        """See `SharesTokens.route`: tokens of the whole ESP group."""
        esp = self.grid.esp
        sizes = gathered_counts(torch.tensor([len(x)], device=x.device), esp).flatten().tolist()
        most = max(sizes)
        everybody = all_gather(F.pad(x, (0, 0, 0, most - len(x))), esp, codec=self.codec)
        if min(sizes) < most:
            everybody = torch.cat([part[:size] for part, size in zip(everybody.split(most), sizes, strict=True)])
        return everybody, gate(everybody), sizes

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        found = self._exchange.dispatch(x, routing, order)
        # N_MP copies of each row pass the experts, whose gradient is that of one.
        return replace(found, rows=_times_in_backward(found.rows, float(self.grid.layout.mp)))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        rows = _times_in_backward(attached(rows, dispatched.rows), 1 / self.grid.layout.mp)
        return self._exchange.combine(all_reduce(rows, self.grid.esp, codec=self.codec), dispatched)

    def restore(self, out: Tensor, state: Any) -> Tensor:
        """See `SharesTokens.restore`."""
        return out.split(state)[self.grid.esp.rank()]


class S1Dispatcher:
    """Pause before the gate: MP ranks share the tokens, `inner` takes each one's to the experts, outputs are gathered.

    The gate's losses are the mean over MP ranks, weighted by tokens; its parameters' gradients are added up.
    """

    def __init__(
        self, grid: Grid, inner: Dispatcher, *, sequence_parallel: bool = False, codec: Codec | str = "auto"
    ) -> None:
        """How tokens travel inside is `inner`'s business.

        Arguments:
            sequence_parallel: the layer's input is this rank's share already (MP-ReduceScatter before it), so is its
                output; only the gate is taken care of. Ranks must have equal shares.
            codec: of the gather and of gradients that are added.
        """
        self.grid, self.inner, self.sequence_parallel, self.codec = grid, inner, sequence_parallel, codec

    def route(self, gate: Gate, x: Tensor) -> tuple[Tensor, Routing | SoftRouting, Any]:
        """See `SharesTokens.route`: this rank's share of the tokens."""
        mp, num_tokens = self.grid.mp, len(x)
        share = 1 / mp.size()
        if not self.sequence_parallel:
            x = split(x, mp, codec=self.codec)
            share = len(x) / num_tokens if num_tokens else share
        routing = replicated_call(gate, x, mp, codec=self.codec)
        if routing.losses and mp.size() > 1:
            values = total(torch.stack([*routing.losses.values()]) * share, mp, codec=self.codec)
            routing = replace(routing, losses=dict(zip(routing.losses, values.unbind(), strict=True)))
        return x, routing, num_tokens

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        return self.inner.dispatch(x, routing, order)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        return self.inner.combine(rows, dispatched)

    def restore(self, out: Tensor, state: Any) -> Tensor:
        """See `SharesTokens.restore`."""
        if self.sequence_parallel:
            return out
        return gather(out, self.grid.mp, sizes=split_sizes(state, self.grid.mp.size()), codec=self.codec)


class S2Dispatcher:
    """Pause after the gate: every MP rank decides for all tokens, each takes its share of rows to the experts.

    forward: "rows" gathers the experts' outputs while they come home (SAA), and each rank sums all tokens;
        "tokens" sums this rank's tokens and gathers the sums, as S1 does: top-k times fewer bytes, not hidden.
    backward: the same for the gradients of rows and tokens.
    num_steps: how many parts an overlapped exchange is cut into, at most N_EP.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        forward: Gathered = "rows",
        backward: Gathered = "rows",
        num_steps: int = 4,
        codec: Codec | str = "auto",
    ) -> None:
        for name, value in (("forward", forward), ("backward", backward)):
            if value not in ("tokens", "rows"):
                raise ConfigError(f'{name} is {value!r}, but what is gathered is "tokens" or "rows"; use one of them')
        if num_steps < 1:
            raise ConfigError(f"num_steps is {num_steps}, but an exchange takes at least one; raise it")
        self.grid, self.forward, self.backward, self.codec = grid, forward, backward, codec
        self.num_steps = num_steps
        self._exchange = FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=codec)

    @property
    def exchange(self) -> FlatDispatcher:
        """Between all ranks that hold the experts."""
        return self._exchange

    def own_share(self, routing: Routing) -> tuple[Routing, list[int], list[int]]:
        """Of a routing that is alike on all MP ranks: this rank's part, and every rank's number of tokens, of entries.

        Raises RoutingError if experts cannot be spread evenly.
        """
        num_local_experts(routing.num_experts, self.grid.layout.ep)
        sizes = split_sizes(routing.num_tokens, self.grid.mp.size())
        ends = torch.tensor(sizes, device=routing.tokens.device).cumsum(0)
        entries = torch.searchsorted(routing.tokens, ends).diff(prepend=ends.new_zeros(1)).tolist()
        return _part(routing, sizes, entries, self.grid.mp.rank()), sizes, entries

    def gathered_tokens(
        self, rows: Tensor, routing: Routing, own: Routing, order: Order, sizes: list[int], entries: list[int]
    ) -> Tensor:
        """Outputs [n, M] of this rank's rows, sorted by expert: its tokens' sums, and those of the other MP ranks."""
        weights = split(routing.weights, self.grid.mp, sizes=entries, codec=self.codec)
        result = order.combine(rows, replace(own, weights=weights))
        return gather(result, self.grid.mp, sizes=sizes, codec=self.codec)

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`; x and routing are alike on all MP ranks."""
        mp = self.grid.mp
        own, sizes, entries = self.own_share(routing)
        arrival = Arrival.agree(own.counts(), self.grid.layout.esp, self.grid.joint)
        plan = SaaPlan.make(self.grid, routing, entries, arrival, self.num_steps, self.codec)
        if self.backward == "tokens":
            rows, _ = order.permute(split(x, mp, sizes=sizes, codec=self.codec), own)
            rows = self._exchange.send(rows, arrival)
        else:
            rows, _ = order.permute(x, routing)
            rows = permuted(send_own(rows, plan), arrival.index, arrival.inverse)
        return Dispatched(rows, arrival.counts, (routing, own, order, plan, sizes, entries))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`; the result is alike on all MP ranks."""
        routing, own, order, plan, sizes, entries = dispatched.state
        rows = attached(rows, dispatched.rows)
        result: Tensor
        if self.forward == "rows":
            result = order.combine(gather_home(permuted(rows, plan.arrival.inverse, plan.arrival.index), plan), routing)
            return result
        home = self._exchange.send_back(rows, plan.arrival)
        return self.gathered_tokens(home, routing, own, order, sizes, entries)


def make_dispatcher(
    grid: Grid,
    path: Path,
    *,
    backward: Path | None = None,
    sequence_parallel: bool = False,
    codec: Codec | str = "auto",
) -> Dispatcher:
    """The dispatcher for a path through a layer.

    Arguments:
        path: "baseline", "s1", "s2" for layers inside an MP group, see [Note: where MP is paused]; "sharded" is s1 with
            FSMoE's exchange and gather inside, "joint" the joint exchange for tokens that MP ranks do not share.
        backward: "s1" or "s2" where `path` is one of them; None is the same. If they differ the gate sees all tokens.
        sequence_parallel: as in `S1Dispatcher`; for "s1" and "sharded".

    Raises ConfigError for names and combinations that do not exist.
    """
    back = backward or path
    if path not in ("joint", "sharded", "baseline", "s1", "s2"):
        raise ConfigError(f"path is {path!r}, but it must be joint, sharded, baseline, s1 or s2; use one of them")
    if back != path and not {path, back} <= {"s1", "s2"}:
        raise ConfigError(
            f"path is {path!r} and backward {back!r}, but only s1 and s2 can be mixed; leave backward out"
        )
    if sequence_parallel and (back != path or path not in ("s1", "sharded")):
        raise ConfigError(
            f"sequence_parallel is True with path {path!r} and backward {back!r}, but only s1 and sharded take shares"
            " of tokens; use one of them"
        )
    joint = FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=codec)
    if path == "joint":
        return joint
    if path == "baseline":
        return BaselineDispatcher(grid, codec=codec)
    if path == back == "s1":
        return S1Dispatcher(grid, joint, sequence_parallel=sequence_parallel, codec=codec)
    if path == "sharded":
        inner = ShardedDispatcher(grid.ep, grid.esp, codec=codec)
        return S1Dispatcher(grid, inner, sequence_parallel=sequence_parallel, codec=codec)
    gathered: dict[str, Gathered] = {"s1": "tokens", "s2": "rows"}
    return S2Dispatcher(grid, forward=gathered[path], backward=gathered[back], codec=codec)


def _part(routing: Routing, sizes: list[int], entries: list[int], rank: int) -> Routing:
    """The entries of the tokens of one part, numbered from its first."""
    first = sum(entries[:rank])
    mine = slice(first, first + entries[rank])
    return replace(
        routing,
        tokens=routing.tokens[mine] - sum(sizes[:rank]),
        experts=routing.experts[mine],
        weights=routing.weights[mine],
        num_tokens=sizes[rank],
        losses={},
        num_dropped=0,
    )


def _times_in_backward(x: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return x
    result: Tensor = _Times.apply(x, factor)
    return result


class _Times(torch.autograd.Function):
    """Nothing in forward; gradients times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None
