"""Dispatchers inside an MP group, where N_MP ranks have the same tokens: Parm's schedules (arXiv 2407.00599).

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

In the baseline each rank sends N_MP copies of a row through the experts, whose gradient is that of one copy: in
backward the sum over sharers is divided by N_MP on the way out and multiplied by it on the way home.

In the baseline and in S2 the ranks of an MP (baseline: ESP) group must decide alike: a gate with noise needs the same
random numbers on them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from laconic.collectives.codec import Codec, Raw
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError, RoutingError
from laconic.moe.dispatch.base import Buffers, Dispatcher, ExchangePlan, RoutedShare, StartsDispatch, Step, Transport
from laconic.moe.dispatch.chunking import Chunk, SlicedRows, rows_of_chunks, slice_sizes
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher, gathered_counts
from laconic.moe.dispatch.flat import FlatDispatcher, FlatTransport, RowsPlan, agreed_rows
from laconic.moe.dispatch.overlapped_a2a_allgather import SaaPlan, gather_home
from laconic.moe.dispatch.staged import StagedDispatcher
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
from laconic.moe.routing import Routing

Path = Literal["joint", "sharded", "baseline", "s1", "s2"]
Gathered = Literal["tokens", "rows"]
_NUM_COMPARED = 256
"""Values of the first forward's tokens that the ranks of an MP group compare."""


class _OneGroupOfTokens:
    """Looks, in a dispatcher's first forward, whether the ranks of its MP group have the same tokens."""

    grid: Grid
    _is_checked = False

    def _check_alike(self, x: Tensor) -> None:
        if not self._is_checked and self.grid.mp.size() > 1:
            with torch._C.DisableTorchFunction():  # the second run of a region that runs again does not compare
                self._compare(x)
        self._is_checked = True

    def _compare(self, x: Tensor) -> None:
        """Compare some values of tokens x [n, M] over the MP group; the same error on all ranks that would wait."""
        mp = self.grid.mp
        values = x.detach().reshape(-1)
        some = torch.linspace(0, max(0, len(values) - 1), _NUM_COMPARED, dtype=torch.float64, device="cpu").long()
        mine = values[some.to(x.device)].double() if len(values) else x.new_zeros(_NUM_COMPARED, dtype=torch.float64)
        mine = torch.cat((mine.new_tensor([len(x)]), mine))
        bounds = torch.stack((mine, -mine))
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mp)
        most, least = bounds[0].tolist(), (-bounds[1]).tolist()
        # Other processors may round otherwise.
        apart = max(high - low for high, low in zip(most[1:], least[1:], strict=True))
        differ = apart > 0.1 * max(map(abs, most[1:] + least[1:]))
        said = torch.tensor([least[0], most[0], differ, *ranks_of(mp)], dtype=torch.int64, device=x.device)
        for low, high, others, *ranks in gathered_counts(said, self.grid.linked).tolist():
            if low != high or others:
                found = f"from {low} to {high} tokens" if low != high else "other tokens"
                raise RoutingError(
                    f"the ranks {(*ranks,)} of an MP group have {found}, but {type(self).__name__} shares one and the"
                    " same tokens among them; give all of them the same, or make the Grid without mp where each rank"
                    " has its own"
                )


class BaselineDispatcher(_OneGroupOfTokens, StagedDispatcher):
    """DeepSpeed-MoE's schedule, for comparison: MP is not paused, so everything is done N_MP times."""

    def __init__(self, grid: Grid, *, codec: Codec | str = "auto") -> None:
        """Use a grid's groups; `codec` of rows, tokens and gradients, as in `laconic.collectives`."""
        self.grid, self.codec = grid, codec
        self.exchange = FlatDispatcher(grid.ep, codec=codec)
        """All-to-all between EP ranks."""

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (*self.exchange.groups, self.grid.esp)

    def route(self, gate: Gate, x: Tensor) -> RoutedShare:
        """See `SharesTokens.route`: tokens of the whole ESP group."""
        self._check_alike(x)
        sizes = gathered_counts(torch.tensor([len(x)], device=x.device), self.grid.esp).flatten().tolist()
        everybody = self._gathered(x, sizes, self.codec)
        return RoutedShare(everybody, gate(everybody), sizes)

    def share(self, x: Tensor, routing: Routing) -> RoutedShare:
        """See `SharesTokens.share`: tokens of the whole ESP group, with their routings."""
        self._check_alike(x)
        numbers = torch.tensor([len(x), len(routing)], device=x.device)
        sizes, entries = gathered_counts(numbers, self.grid.esp).T.tolist()
        first = sum(sizes[: self.grid.esp.rank()])
        ids = self._gathered(torch.stack((routing.tokens + first, routing.experts), 1), entries, Raw())
        weights = self._gathered(routing.weights[:, None], entries, Raw())[:, 0]
        tokens, experts = (column.contiguous() for column in ids.unbind(1))
        everybody = replace(routing, tokens=tokens, experts=experts, weights=weights, num_tokens=sum(sizes))
        return RoutedShare(self._gathered(x, sizes, self.codec), everybody, sizes)

    def _gathered(self, x: Tensor, sizes: list[int], codec: Codec | str) -> Tensor:
        """Gather x [sizes[rank], ...] of the ESP group: [sum(sizes), ...]."""
        most = max(1, *sizes)
        everybody = all_gather(F.pad(x, (0, 0, 0, most - len(x))), self.grid.esp, codec=codec)
        if min(sizes) == most:
            return everybody
        return torch.cat([part[:size] for part, size in zip(everybody.split(most), sizes, strict=True)])

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        return _BaselinePlan(self, agreed_rows(self.exchange, routing.counts(), num_slices), routing, order)

    def restore(self, out: Tensor, share: RoutedShare) -> Tensor:
        """See `SharesTokens.restore`: this rank's part of the ESP group's outputs."""
        return out.split(share.sizes)[self.grid.esp.rank()]


class _BaselinePlan(RowsPlan):
    """Exchange plan for every row of the ESP group's tokens, on each of its ranks."""

    def __init__(self, dispatcher: BaselineDispatcher, rows: SlicedRows, routing: Routing, order: Order) -> None:
        super().__init__(dispatcher.exchange, rows, routing, order)
        self._dispatcher = dispatcher

    def transport(self, degree: int, *, backward: bool) -> Transport:
        return _BaselineTransport(self._dispatcher, self.rows.chunks(degree), backward)


class _BaselineTransport(FlatTransport):
    """Transport of the baseline: scatter sums outputs over sharers, gather sums their gradients."""

    def __init__(self, dispatcher: BaselineDispatcher, chunks: list[Chunk], backward: bool) -> None:
        super().__init__(dispatcher.exchange, chunks)
        self._grid, self._codec, self._backward = dispatcher.grid, dispatcher.codec, backward

    def gather(self, i: int, buffers: Buffers) -> Buffers:
        return (self._total(buffers[0]) / self._grid.layout.mp,) if self._backward else buffers

    def scatter(self, i: int, buffers: Buffers) -> Buffers:
        return (buffers[0] * self._grid.layout.mp,) if self._backward else (self._total(buffers[0]),)

    def _total(self, rows: Tensor) -> Tensor:
        return all_reduce(rows, self._grid.esp, codec=self._codec)


class S1Dispatcher(_OneGroupOfTokens):
    """Pauses MP before the gate: each MP rank sends its share of the tokens by `inner`; outputs are gathered.

    The gate's losses are the mean over MP ranks, weighted by tokens; its parameters' gradients are added up.
    """

    def __init__(
        self, grid: Grid, inner: Dispatcher, *, sequence_parallel: bool = False, codec: Codec | str = "auto"
    ) -> None:
        """Dispatch each rank's share of the tokens by `inner`.

        Args:
            grid: the process groups.
            inner: moves the rows of a share to the experts and back.
            sequence_parallel: the layer's input is this rank's share already (MP-ReduceScatter before it), so is its
                output; only the gate is taken care of. Ranks must have equal shares.
            codec: of the gather and of gradients that are added.
        """
        self.grid, self.inner, self.sequence_parallel, self.codec = grid, inner, sequence_parallel, codec
        self.dispatch, self.combine = inner.dispatch, inner.combine
        if isinstance(inner, StartsDispatch):
            self.start = inner.start

    def route(self, gate: Gate, x: Tensor) -> RoutedShare:
        """See `SharesTokens.route`: this rank's share of the tokens."""
        mp, num_tokens = self.grid.mp, len(x)
        part, sizes = 1 / mp.size(), split_sizes(num_tokens, mp.size())
        if not self.sequence_parallel:
            self._check_alike(x)
            x = split(x, mp, sizes=sizes, codec=self.codec)
            part = len(x) / num_tokens if num_tokens else part
        routing = replicated_call(gate, x, mp, codec=self.codec)
        if routing.losses and mp.size() > 1:
            values = total(torch.stack([*routing.losses.values()]) * part, mp, codec=self.codec)
            routing = replace(routing, losses=dict(zip(routing.losses, values.unbind(), strict=True)))
        return RoutedShare(x, routing, sizes)

    def share(self, x: Tensor, routing: Routing) -> RoutedShare:
        """See `SharesTokens.share`: this rank's share of the tokens; gradients of weights are gathered.

        With `sequence_parallel` the gradients of whatever routed a share are that share's: the caller adds them.
        """
        mp = self.grid.mp
        sizes = split_sizes(len(x), mp.size())
        if self.sequence_parallel or mp.size() == 1:
            return RoutedShare(x, routing, sizes)
        self._check_alike(x)
        entries = _entries(routing, sizes)
        weights = split(routing.weights, mp, sizes=entries, codec=Raw())
        own = replace(_part(routing, sizes, entries, mp.rank()), weights=weights, num_dropped=routing.num_dropped)
        return RoutedShare(split(x, mp, sizes=sizes, codec=self.codec), own, sizes)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """See `StartsDispatch.groups`: those of `inner`, and the MP group."""
        return (*(self.inner.groups if isinstance(self.inner, StartsDispatch) else ()), self.grid.mp)

    def restore(self, out: Tensor, share: RoutedShare) -> Tensor:
        """See `SharesTokens.restore`: the outputs of all MP ranks."""
        if self.sequence_parallel:
            return out
        return gather(out, self.grid.mp, sizes=share.sizes, codec=self.codec)


class S2Dispatcher(_OneGroupOfTokens, StagedDispatcher):
    """Pauses MP after the gate: every MP rank decides for all tokens and sends its share of rows to the experts.

    Args:
        grid: the process groups.
        forward: "rows" gathers the experts' outputs while they come home (SAA), and each rank sums all tokens; "tokens"
            sums this rank's tokens and gathers the sums, as S1 does: top-k times fewer bytes, not overlapped.
        backward: the same for the gradients of rows and tokens.
        num_steps: how many parts an overlapped exchange is cut into, at most N_EP.
        codec: of rows, tokens and gradients.

    Raises:
        ConfigError: `forward` or `backward` is another name, or `num_steps` is below 1.
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
        self.exchange = FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=codec)
        """All-to-all between all ranks that hold the experts."""

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (*self.exchange.groups, self.grid.mp)

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        """See `StagedDispatcher.plan`; the routing is alike on all MP ranks."""
        return _S2Plan(self, routing, order, num_slices)


class _S2Plan(RowsPlan):
    """Exchange plan of rows that MP ranks have alike; each rank sends its own part.

    The plan gathers on the side where rows are copies that MP ranks have alike: outputs where `forward` is "rows",
    gradients of rows where `backward` is. On a side of copies each rank sends its own part of them. A whole layer
    gathers by SAA; in several chunks a chunk's gather runs inside nodes while others are exchanged.
    """

    def __init__(self, dispatcher: S2Dispatcher, routing: Routing, order: Order, num_slices: int) -> None:
        mp = dispatcher.grid.mp
        self._sizes = split_sizes(routing.num_tokens, mp.size())
        self._entries = _entries(routing, self._sizes)
        self._own = _part(routing, self._sizes, self._entries, mp.rank())
        self._dispatcher, self._mp = dispatcher, mp
        rows = agreed_rows(dispatcher.exchange, self._own.counts(), num_slices)
        super().__init__(dispatcher.exchange, rows, routing, order)

    def begin(self, x: Tensor) -> Buffers:
        self._dispatcher._check_alike(x)
        if self._dispatcher.backward == "rows":
            return super().begin(x)
        own = split(x, self._mp, sizes=self._sizes, codec=self._dispatcher.codec)
        return (self.order.permute(own, self._own)[0],)

    def transport(self, degree: int, *, backward: bool) -> Transport:
        sides = (self._dispatcher.backward == "rows", self._dispatcher.forward == "rows")
        of_copies, gathers = reversed(sides) if backward else sides
        chunks = self.rows.chunks(degree)
        if not of_copies and not gathers:
            return FlatTransport(self.exchange, chunks)
        if degree == 1:
            peers = [[self._saa.rows_of(peer) for peer in range(self._mp.size())]]
            return _S2Transport(self._dispatcher, chunks, peers, of_copies, gathers, self._saa)
        return _S2Transport(self._dispatcher, chunks, self._rows_by_peer(degree), of_copies, gathers)

    def finish(self, out: Tensor) -> Tensor:
        if self._dispatcher.forward == "rows":
            return super().finish(out)
        codec = self._dispatcher.codec
        weights = split(self.routing.weights, self._mp, sizes=self._entries, codec=codec)
        result = self.order.combine(out, replace(self._own, weights=weights))
        return gather(result, self._mp, sizes=self._sizes, codec=codec)

    @cached_property
    def _saa(self) -> SaaPlan:
        dispatcher = self._dispatcher
        return SaaPlan.make(dispatcher.grid, self.routing, self._entries, dispatcher.num_steps, dispatcher.codec)

    def _rows_by_peer(self, degree: int) -> list[list[Tensor]]:
        """Return int64 [chunk][MP rank]: indices, among all rows sorted by expert, of that rank's rows in its chunk."""
        routing, mp, num_experts = self.routing, len(self._entries), self.routing.num_experts
        device = routing.experts.device
        owners = torch.arange(mp, device=device).repeat_interleave(torch.tensor(self._entries, device=device))
        counts = torch.bincount(owners * num_experts + routing.experts, minlength=mp * num_experts)
        # Rows are sorted by expert; a stable sort by owner keeps that within each.
        of_ranks = torch.argsort(owners[routing.by_expert], stable=True).split(self._entries)
        table = slice_sizes(counts.view(mp, -1), torch.arange(num_experts, device=device), self.rows.num_slices)
        parts = [
            [rows[i] for i in rows_of_chunks(of_rank, degree)] for rows, of_rank in zip(of_ranks, table, strict=True)
        ]
        return [list(chunk) for chunk in zip(*parts, strict=True)]


class _S2Transport(FlatTransport):
    def __init__(
        self,
        dispatcher: S2Dispatcher,
        chunks: list[Chunk],
        rows_by_peer: list[list[Tensor]],
        of_copies: bool,
        gathers: bool,
        saa: SaaPlan | None = None,
    ) -> None:
        """Bind the transport to the chunks of this rank's rows.

        With `of_copies` the rows that go out are copies that MP ranks have alike; with `gathers` what comes home is
        gathered over the MP group, by `saa` while the one chunk comes home.
        """
        self._mp, self._codec, self._saa = dispatcher.grid.mp, dispatcher.codec, saa if gathers else None
        leaving = [of_peer[self._mp.rank()] for of_peer in rows_by_peer] if of_copies else ()
        self._gathers = gathers and saa is None
        landing = [torch.cat(of_peer) for of_peer in rows_by_peer] if self._gathers else ()
        super().__init__(dispatcher.exchange, chunks, leaving, landing)
        self._sizes = [[len(index) for index in of_peer] for of_peer in rows_by_peer]

    @property
    def share(self) -> Step | None:  # type: ignore[override]
        """The gather of what comes home; made anew for each caller, as a method that is kept keeps the transport."""
        # Two threads must not use one group: where both use the same, the gather is part of `send_back`.
        return self._gathered if self._gathers and self._mp is not self._exchange.group else None

    def send_back(self, i: int, buffers: Buffers) -> Buffers:
        if self._saa is not None:
            return (gather_home(buffers[0], self._saa, self._chunks[i]),)
        buffers = super().send_back(i, buffers)
        return self._gathered(i, buffers) if self._gathers and self.share is None else buffers

    def _gathered(self, i: int, buffers: Buffers) -> Buffers:
        most = max(1, *self._sizes[i])
        everybody = all_gather(F.pad(buffers[0], (0, 0, 0, most - len(buffers[0]))), self._mp, codec=self._codec)
        parts = zip(everybody.split(most), self._sizes[i], strict=True)
        return (torch.cat([rows[:size] for rows, size in parts]),)


def make_dispatcher(
    grid: Grid,
    path: Path,
    *,
    backward: Path | None = None,
    sequence_parallel: bool = False,
    codec: Codec | str = "auto",
) -> Dispatcher:
    """Make the dispatcher for a path through a layer.

    Args:
        grid: the process groups.
        path: "baseline", "s1", "s2" for layers inside an MP group, see [Note: where MP is paused]; "sharded" is s1 with
            FSMoE's exchange and gather inside, "joint" the joint exchange for tokens that MP ranks do not share.
        backward: "s1" or "s2" where `path` is one of them; None is the same. If they differ the gate sees all tokens.
        sequence_parallel: as in `S1Dispatcher`; for "s1" and "sharded".
        codec: of rows, tokens and gradients.

    Raises:
        ConfigError: a name or combination does not exist.
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


def _entries(routing: Routing, sizes: list[int]) -> list[int]:
    """Count the entries of a routing for each part of its tokens, sizes[i] tokens long."""
    ends = torch.tensor(sizes, device=routing.tokens.device).cumsum(0)
    numbers: list[int] = torch.searchsorted(routing.tokens, ends).diff(prepend=ends.new_zeros(1)).tolist()
    return numbers


def _part(routing: Routing, sizes: list[int], entries: list[int], rank: int) -> Routing:
    """Return the entries of the tokens of one part, numbered from its first."""
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
