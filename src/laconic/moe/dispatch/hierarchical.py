"""Hierarchical all-to-all, each row once per destination group (HierMoE, arXiv 2508.09591, section 3).

The first stage crosses nodes, the later ones stay inside. In several chunks, the first stage runs as the exchange of
the schedule and the later ones as its gather, so that both networks and the experts work at once. In one chunk, ranks
agree on a stage while the rows of the previous one are in transit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Buffers, ExchangePlan, ExpertRows, Transport
from laconic.moe.dispatch.hierarchical_exchange import StageExchange, carry_up, start_down
from laconic.moe.dispatch.staged import StagedDispatcher, experts_of, experts_per_rank
from laconic.moe.dispatch.token_slices import SlicedStage, SlicedTokens, joined_by_place, slices_of
from laconic.moe.dispatch.traffic import LevelTraffic, traffic_of
from laconic.moe.parallel.grid import Level
from laconic.moe.permute import Order
from laconic.moe.routing import Routing
from laconic.topology import ExchangeStage, Levels


class HierarchicalDispatcher(StagedDispatcher):
    """Sends a row once to each group of ranks that has experts for it, level by level, and adds on the way back.

    At depth d, stages 1 ... d - 1 cross levels 1 ... d - 1 and the last goes from rank to rank inside a group; at
    depth 1 that is the flat all-to-all, with each row at most once per rank. Ids and weights are sent with the rows. On
    the way back a rank sums its experts' weighted outputs, and each stage adds the sums of several places in fp32 (fp64
    for fp64), by place, and rounds them to the rows' dtype: between depths results differ by rounding.

    Every rank of the expert-parallel group dispatches and combines together, also one without tokens; if the gradients
    of one need it, all go backward.

    Args:
        levels: `Grid.levels`: the whole expert-parallel group, and its parts; parts of one rank are left out.
        depth: 1 ... `levels.max_depth`, the same on all ranks; None is the largest.
        codec: of rows and their gradients in transit; Lossless() changes nothing, Blockwise(...) rounds.
        inner_codec: of all stages but the first, which stay inside nodes; None is `codec`. Raw() saves the work where
            links are faster than the codec.

    Raises:
        ConfigError: levels are not nested, or they do not have that depth.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        depth: int | None = None,
        *,
        codec: Codec | str = "auto",
        inner_codec: Codec | str | None = None,
    ) -> None:
        if not levels or levels[0].num_groups != 1:
            raise ConfigError(
                "levels must begin with the whole expert-parallel group (num_groups 1), as Grid.levels do"
            )
        num_ranks = levels[0].within.size()
        self._groups = tuple(level for level in levels if level.num_groups < max(2, num_ranks))
        self.levels = Levels(num_ranks, tuple(level.num_groups for level in self._groups))
        self.codec, self.inner_codec = codec, codec if inner_codec is None else inner_codec
        self.traffic: tuple[LevelTraffic, ...] = ()
        """What this rank sent in the last dispatch, stage by stage; see `laconic.moe.dispatch.traffic`."""
        self._depth = self.levels.max_depth if depth is None else depth
        self.levels.stages(self._depth)

    @property
    def group(self) -> dist.ProcessGroup:
        """The whole expert-parallel group."""
        return self._groups[0].within

    @property
    def depth(self) -> int:
        """Number of stages."""
        return self._depth

    @property
    def codecs(self) -> tuple[Codec | str, ...]:
        """Codec of rows in each stage."""
        return (self.codec, *[self.inner_codec] * (self._depth - 1))

    def set_depth(self, depth: int) -> None:
        """Use another depth from now on. All ranks of the group call it together.

        Raises:
            ConfigError: on every rank, if the depth does not exist or ranks ask for different ones.
        """
        self.levels.stages(depth)
        depths: list[int] = [0] * self.group.size()
        dist.all_gather_object(depths, depth, group=self.group)
        if len({*depths}) > 1:
            ranks = ranks_of(self.group)
            raise ConfigError(
                f"depth is {dict(zip(ranks, depths, strict=True))} by rank, but all ranks must take the same; let"
                " laconic.moe.agree_on_depth choose"
            )
        self._depth = depth

    def stages(self, depth: int | None = None) -> tuple[tuple[ExchangeStage, dist.ProcessGroup], ...]:
        """Return the stages of a depth (None: the current one), each with the group of this rank's peers."""
        stages = self.levels.stages(self._depth if depth is None else depth)
        across = [level.across for level in self._groups[1 : len(stages)]]
        groups = [*across, self._groups[len(stages) - 1].within]
        return tuple((stage, group) for stage, group in zip(stages, groups, strict=True) if group is not None)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """See `StagedDispatcher.groups`; those of the current depth."""
        return tuple(group for _, group in self.stages())

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> ExchangePlan:
        """See `StagedDispatcher.plan`; cuts tokens, not each expert's rows. Sets `traffic` when all is agreed."""
        return _LevelPlan(self, routing, order, num_slices)


class _LevelPlan:
    """Exchange plan of tokens by slice through all stages."""

    def __init__(self, dispatcher: HierarchicalDispatcher, routing: Routing, order: Order, num_slices: int) -> None:
        self._experts_per_rank = experts_per_rank(routing.num_experts, dispatcher.levels.num_ranks)
        self._here = experts_of(dispatcher.group.rank(), routing.num_experts, dispatcher.levels.num_ranks)
        self._dispatcher, self._routing, self._order = dispatcher, routing, order
        self.codecs, self.num_slices = dispatcher.codecs, num_slices
        self._todo = list(dispatcher.stages())
        self.num_stages = len(self._todo)
        self._held = SlicedTokens.of(routing, num_slices)
        self._stages: list[SlicedStage] = []
        self._exchanges: dict[tuple[int, int, int], StageExchange] = {}
        self._local: list[Routing] = []
        # One chunk agrees on later stages while rows are in transit; several chunks need all stages agreed before.
        self.agree_on(1 if num_slices == 1 else self.num_stages)

    def agree_on(self, num_stages: int) -> None:
        """Agree on stages until `num_stages` are agreed, or all of them."""
        while self._todo and len(self._stages) < num_stages:
            stage, group = self._todo.pop(0)
            earlier = self._stages[-1] if self._stages else None
            found, self._held = SlicedStage.agree(self._held, earlier, stage, self._experts_per_rank, group)
            self._stages.append(found)

    def begin(self, x: Tensor) -> Buffers:
        return x, self._routing.weights

    def transport(self, degree: int, *, backward: bool) -> Transport:
        return (_LevelTransport if self.num_stages == 1 else _StagesTransport)(self, degree)

    def exchange(self, stage: int, first: int, last: int) -> StageExchange:
        """Return the exchange of the slices first ... last - 1 in an agreed stage; cached."""
        key = stage, first, last
        if key not in self._exchanges:
            self._exchanges[key] = self._stages[stage].exchange(first, last)
        return self._exchanges[key]

    def size_at_home(self, first: int, last: int) -> tuple[int, int]:
        """Count rows and assignments of the slices first ... last - 1 before they leave."""
        before = self._stages[0].before
        return sum(before.num_rows[first:last]), sum(before.num_entries[first:last])

    def arriving(self, first: int, last: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return rows and assignments received in the last stage, by slice first ... last - 1 and place."""
        stage = self._stages[-1]
        return stage.received_rows[first:last], stage.received_entries[first:last]

    def enter(self, number: int, buffers: Buffers) -> ExpertRows:
        if not self._local:  # the first slice has come, so all stages are agreed
            self._local = self._local_routings()
            whole = (self.exchange(stage, 0, self.num_slices) for stage in range(self.num_stages))
            self._dispatcher.traffic = tuple(traffic_of(exchange, *buffers) for exchange in whole)
        return ExpertRows(*self._order.permute(buffers[0], self._local[number]))

    def leave(self, number: int, rows: Tensor, buffers: Buffers) -> Tensor:
        return self._order.combine(rows, replace(self._local[number], weights=buffers[1]))

    def finish(self, out: Tensor) -> Tensor:
        return out

    def _local_routings(self) -> list[Routing]:
        """Return the routing of each slice's rows on this rank, its weights left empty."""
        held, num_entries = self._held.held, self._held.num_entries
        rows, experts = held.rows.split(num_entries), held.experts.split(num_entries)
        starts = [0, *accumulate(self._held.num_rows)]
        no_weights = self._routing.weights.new_empty(len(held.rows)).split(num_entries)
        return [
            Routing(rows[s] - starts[s], experts[s] - self._here.start, no_weights[s], number, len(self._here))
            for s, number in enumerate(self._held.num_rows)
        ]


class _LevelTransport(Transport):
    """Transport of a `_LevelPlan`: rows with their weights (forward) or gradients of sums (backward) out, then back."""

    def __init__(self, plan: _LevelPlan, degree: int) -> None:
        self._plan, self._per_chunk = plan, plan.num_slices // degree

    def send(self, i: int, home: Buffers) -> Buffers:
        first, last = self._slices(i)
        starts, sizes = self._plan.size_at_home(0, first), self._plan.size_at_home(first, last)
        parts = zip(home, starts, sizes, strict=False)
        return self._down(i, tuple(x.narrow(0, start, size) for x, start, size in parts), range(1))

    def unpack(self, i: int, buffers: Buffers) -> list[Buffers]:
        found = [slices_of(x, table) for x, table in zip(buffers, self._plan.arriving(*self._slices(i)), strict=False)]
        return list(zip(*found, strict=True))

    def pack(self, i: int, slices: list[Buffers]) -> Buffers:
        parts = zip(zip(*slices, strict=True), self._plan.arriving(*self._slices(i)), strict=False)
        return tuple(joined_by_place(of_slices, table) for of_slices, table in parts)

    def send_back(self, i: int, buffers: Buffers) -> Buffers:
        return self._up(i, buffers, range(1))

    def join(self, chunks: list[Buffers]) -> Buffers:
        return chunks[0] if len(chunks) == 1 else tuple(map(torch.cat, zip(*chunks, strict=True)))

    def _slices(self, i: int) -> tuple[int, int]:
        return i * self._per_chunk, (i + 1) * self._per_chunk

    def _down(self, i: int, buffers: Buffers, stages: range) -> Buffers:
        for stage in stages:
            arriving = start_down(buffers, self._plan.exchange(stage, *self._slices(i)), self._plan.codecs[stage])
            self._plan.agree_on(stage + 2)
            buffers = arriving()
        return buffers

    def _up(self, i: int, buffers: Buffers, stages: range) -> Buffers:
        for stage in reversed(stages):
            buffers = carry_up(buffers, self._plan.exchange(stage, *self._slices(i)), self._plan.codecs[stage])
        return buffers


class _StagesTransport(_LevelTransport):
    """The same of several stages.

    Its steps are methods: functions that refer to it, kept in it, would keep it and the plan's tensors on the device
    until Python looks for cycles, hundreds of steps later.
    """

    def gather(self, i: int, buffers: Buffers) -> Buffers:
        return self._down(i, buffers, range(1, self._plan.num_stages))

    def scatter(self, i: int, buffers: Buffers) -> Buffers:
        return self._up(i, buffers, range(1, self._plan.num_stages))
