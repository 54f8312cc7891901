"""All-to-all in levels, each row once per destination group (HierMoE, arXiv 2508.09591, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Dispatched
from laconic.moe.dispatch.flat import attached, num_local_experts
from laconic.moe.dispatch.hierarchical_exchange import Crossing, cross, down, send_down, up
from laconic.moe.dispatch.send_plan import Held
from laconic.moe.dispatch.topology import Levels, Stage
from laconic.moe.dispatch.traffic import LevelTraffic, traffic_of
from laconic.moe.permute import Order
from laconic.moe.routing import Routing

__all__ = ["HierarchicalDispatcher", "LevelGroups"]


class LevelGroups(Protocol):
    """The process groups of one level, as `Grid.levels` has them."""

    @property
    def num_groups(self) -> int:
        """U: parts of the expert-parallel group at this level; 1 at the first."""

    @property
    def within(self) -> dist.ProcessGroup:
        """The ranks of this rank's part."""

    @property
    def across(self) -> dist.ProcessGroup | None:
        """One rank of each sister part in the level before, at the same place in it; None at the first level."""


@dataclass(frozen=True, eq=False)
class _State:
    crossings: tuple[Crossing, ...]
    codecs: tuple[Codec | str, ...]
    local: Routing
    order: Order


class HierarchicalDispatcher:
    """Sends a row once to each group of ranks that has experts for it, level by level, and adds on the way back.

    At depth d, stages 1 ... d - 1 cross levels 1 ... d - 1 and the last goes from rank to rank inside of a group; at
    depth 1 that is the flat all-to-all, with each row at most once per rank. Ids and weights travel with the rows. On
    the way back a rank sums its experts' weighted outputs, and at each stage the sums that come from several places are
    added in fp32 (fp64 for fp64), by place, and rounded to the rows' dtype: between depths results differ by rounding.

    Arguments:
        levels: `Grid.levels`: the whole expert-parallel group, and its parts; parts of one rank are left out.
        depth: 1 ... `levels.max_depth`, the same on all ranks; None is the largest.
        codec: what rows and their gradients travel in; Lossless() changes nothing, Blockwise(...) rounds.
        inner_codec: that of all stages but the first, which stay inside of nodes; None is `codec`. Raw() saves the work
            where links are faster than the codec.

    Every rank of the expert-parallel group dispatches and combines together, also one without tokens; if the gradients
    of one need it, all go backward.

    Raises ConfigError for levels that are not nested and a depth that they do not have.
    """

    def __init__(
        self,
        levels: Sequence[LevelGroups],
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
        """The number of stages."""
        return self._depth

    @property
    def codecs(self) -> tuple[Codec | str, ...]:
        """What rows travel in, stage by stage."""
        return (self.codec, *[self.inner_codec] * (self._depth - 1))

    def set_depth(self, depth: int) -> None:
        """Use another depth from now on. All ranks of the group call it together.

        Raises ConfigError, on every rank, if the depth does not exist or ranks ask for different ones.
        """
        self.levels.stages(depth)
        told: list[int] = [0] * self.group.size()
        dist.all_gather_object(told, depth, group=self.group)
        if len({*told}) > 1:
            ranks = dist.get_process_group_ranks(self.group)
            raise ConfigError(
                f"depth is {dict(zip(ranks, told, strict=True))} by rank, but all ranks must take the same; let"
                " laconic.moe.agree_on_depth choose"
            )
        self._depth = depth

    def stages(self, depth: int | None = None) -> tuple[tuple[Stage, dist.ProcessGroup], ...]:
        """The stages of a depth (None: the current one), each with the group of this rank's peers."""
        stages = self.levels.stages(self._depth if depth is None else depth)
        across = [level.across for level in self._groups[1 : len(stages)]]
        groups = [*across, self._groups[len(stages) - 1].within]
        return tuple((stage, group) for stage, group in zip(stages, groups, strict=True) if group is not None)

    def dispatch(self, x: Tensor, routing: Routing, order: Order) -> Dispatched:
        """See `Dispatcher.dispatch`. Raises RoutingError if the experts cannot be spread evenly over the ranks."""
        experts_per_rank = num_local_experts(routing.num_experts, self.levels.num_ranks)
        held = Held(routing.num_tokens, routing.tokens, routing.experts)
        rows, weights, crossings, started = x, routing.weights, list[Crossing](), None
        codecs = self.codecs
        for number, (stage, group) in enumerate(self.stages()):
            # Ranks talk about a stage while the rows of the one before travel.
            crossing, held = cross(held, stage, experts_per_rank, group)
            if crossings:
                rows, weights = down(rows, weights, crossings[-1], codecs[number - 1], started)
            started = send_down(rows, weights, crossing, codecs[number])
            crossings.append(crossing)
        rows, weights = down(rows, weights, crossings[-1], codecs[-1], started)
        self.traffic = tuple(traffic_of(crossing, x, weights) for crossing in crossings)
        local = Routing(
            held.rows,
            held.experts - self.group.rank() * experts_per_rank,
            weights,
            held.num_rows,
            experts_per_rank,
        )
        rows, counts = order.permute(rows, local)
        return Dispatched(rows, counts, _State(tuple(crossings), codecs, local, order))

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher.combine`."""
        state: _State = dispatched.state
        sums = state.order.combine(attached(rows, dispatched.rows), state.local)
        for crossing, codec in zip(reversed(state.crossings), reversed(state.codecs), strict=True):
            sums = up(sums, crossing, codec)
        return sums
