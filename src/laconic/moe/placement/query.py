"""Query of the routing of layers: the gain of swapping experts, agreed by all ranks of a group.

Every rank sends the slots of a sample of its tokens, one all-gather for all layers. The first rank searches, and its
answer counts for all, so that different rounding on different machines cannot lead to different plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from laconic.cost.moe.hierarchy import level_lines
from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.swap_period import sampled_tokens
from laconic.errors import ConfigError
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.placement.consensus import first_answer
from laconic.moe.placement.search import Cost, SwapPlan, best_swaps, rows_of, seconds_of
from laconic.moe.routing import Routing

_COUNT_NBYTES = 8


@dataclass(frozen=True, eq=False)
class RoutingQuery:
    """Query of one layer."""

    dispatcher: HierarchicalDispatcher
    routing: Routing
    """Of this rank's tokens, its experts numbered by slot."""
    row_nbytes: float
    """Bytes of a row with its ids and weights."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Slots whose exchange is to be weighed, the same on all ranks; none: the best pairs are to be found."""
    seconds_per_assignment: float = 0.0
    """Of an expert, in one of the four directions of a training step."""

    @property
    def num_groups(self) -> tuple[int, ...]:
        """Numbers of groups of the levels at the dispatcher's depth."""
        return tuple(stage.num_groups for stage in self.dispatcher.levels.stages(self.dispatcher.depth))

    def plan(self, chosen: Tensor, weights: Tensor, rates: MoERates, coding: Coding | None, num_pairs: int) -> SwapPlan:
        """Find the best pairs, or weigh `pairs`, by tokens of all ranks; see `seconds_of`."""
        costs = self._costs(chosen, weights, rates, coding)
        if not self.pairs:
            return best_swaps(chosen, weights, costs, num_pairs)
        plan = SwapPlan(self.pairs, seconds_of(chosen, weights, costs), 0.0)
        moved = chosen.new_empty(chosen.shape)
        moved[:, plan.new_slots(chosen.shape[1])] = chosen
        return SwapPlan(self.pairs, plan.before_seconds, seconds_of(moved, weights, costs))

    def _costs(self, chosen: Tensor, weights: Tensor, rates: MoERates, coding: Coding | None) -> list[Cost]:
        levels, depth, size = self.dispatcher.levels, self.dispatcher.depth, chosen.shape[1]
        groups = {g: torch.arange(size, device="cpu") // (size // g) for g in self.num_groups}  # the last are the ranks
        fullest = {g: float(rows_of(chosen, weights, Cost(group, 0.0, 0.0)).max()) for g, group in groups.items()}
        lines = level_lines(levels, depth, fullest, self.row_nbytes, rates, coding)
        links = [Cost(groups[one.num_groups], one.alpha_seconds, one.seconds_per_row) for one in lines]
        return [*links, Cost(groups[levels.num_ranks], 0.0, self.seconds_per_assignment, once=False)]


def query_routing(
    asked: Sequence[RoutingQuery],
    group: dist.ProcessGroup,
    rates: MoERates,
    *,
    num_pairs: int = 1,
    coding: Coding | None = None,
) -> list[SwapPlan]:
    """Plan swaps for each layer by tokens of all ranks of `group`, which call this together and get the same.

    For layers with `pairs` a plan has the gain of those, which may be negative; for the others it has the at most
    `num_pairs` pairs that shorten the layer most, at the current depth. Nothing moves yet; `ExpertMover` does that.

    A ConfigError says that num_pairs is below 1, or that experts do not divide over the ranks.
    """
    if num_pairs < 1:
        raise ConfigError(f"num_pairs is {num_pairs}, but a plan has at least one pair")
    for one in asked:
        if one.routing.num_experts % group.size():
            raise ConfigError(
                f"num_experts is {one.routing.num_experts}, but it must be a multiple of the {group.size()} ranks of"
                " the group; change one"
            )
    mine = [sample(one.routing, sampled_tokens(group.size())) for one in asked]
    gathered = torch.empty(group.size(), sum(map(len, mine)), dtype=torch.uint8, device=mine[0].device)
    torch_compat.all_gather(gathered, torch.cat(mine), group).wait()
    plans: list[SwapPlan] = []
    if group.rank() == 0:
        for one, part in zip(asked, gathered.cpu().split([*map(len, mine)], dim=1), strict=True):
            with torch.autocast("cpu", enabled=False):  # bf16 counts exactly to 256 only
                plans.append(one.plan(*sampled(part, one.routing.num_experts), rates, coding, num_pairs))
    return first_answer(plans, group)


def sample(routing: Routing, most: int) -> Tensor:
    """Return which slots each of at most `most` tokens goes to, and of how many tokens they are, uint8, for `sampled`.

    The length depends on `most` and the number of slots alone.
    """
    number, device = min(routing.num_tokens, most), routing.experts.device
    place = torch.full((routing.num_tokens,), -1, device=device)
    place[torch.arange(number, device=device) * routing.num_tokens // max(1, number)] = torch.arange(
        number, device=device
    )
    chosen = torch.zeros(most, routing.num_experts, dtype=torch.bool, device=device)
    kept = place[routing.tokens] >= 0
    chosen[place[routing.tokens[kept]], routing.experts[kept]] = True
    packed = np.packbits(chosen.cpu().numpy())
    count = np.array([routing.num_tokens], dtype=np.int64).view(np.uint8)
    return torch.from_numpy(np.concatenate([count, packed])).to(device)


def sampled(gathered: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of all ranks, float32 [n, slots], and how many tokens each of them stands for, float32 [n].

    `gathered`, uint8, has the `sample` of each rank.
    """
    table = gathered.numpy()
    counts = torch.from_numpy(table[:, :_COUNT_NBYTES].copy().view(np.int64)[:, 0].copy())
    most = (table.shape[1] - _COUNT_NBYTES) * 8 // num_slots
    bits = np.unpackbits(table[:, _COUNT_NBYTES:], axis=1, count=most * num_slots)
    chosen = torch.from_numpy(bits).view(-1, num_slots).float()
    weights = (counts / counts.clamp(min=1, max=most)).float().repeat_interleave(most)
    return chosen, weights


def agree_on_swaps(
    dispatcher: HierarchicalDispatcher,
    routing: Routing,
    row_nbytes: float,
    rates: MoERates,
    *,
    num_pairs: int = 1,
    coding: Coding | None = None,
) -> SwapPlan:
    """Plan the swaps of slots that shorten the all-to-all of this routing most, at the current depth.

    All ranks of the dispatcher's group call this together.

    Args:
        dispatcher, routing, row_nbytes: see `RoutingQuery`.
        rates, num_pairs, coding: see `query_routing`.

    Raises:
        ConfigError: see `query_routing`.
    """
    asked = [RoutingQuery(dispatcher, routing, row_nbytes)]
    return query_routing(asked, dispatcher.group, rates, num_pairs=num_pairs, coding=coding)[0]
