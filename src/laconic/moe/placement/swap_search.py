"""Search for the exchange of two experts that minimizes the rows crossing an all-to-all's levels (HierMoE, section 4).

The cost of an expert is not its number of tokens but the rows that its group receives, where a token counts once. With
S [n, E] the assignments and cnt [n, g] the token's experts in each of g groups, exchanging the slots a and b of the
groups ga != gb changes the rows of ga by

    + tokens of b that have nobody in ga          plus[b, ga],   plus = S^T (cnt = 0)
    - tokens of a that have nobody else in ga,    minus[a, b],   minus = U^T (1 - S), U = S where cnt[:, group] = 1
      and do not have b

and those of gb by the same with a and b exchanged. So two matrix products per level price all pairs at once, exactly.
Each rank makes the tables of its own tokens; their sum over ranks is that of all.

Slots that share a group are no pair: at the finest level a group is a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.cost.moe.hierarchy import LevelCost
from laconic.errors import ConfigError

__all__ = [
    "GAMMA",
    "SwapPlan",
    "SwapTables",
    "group_rows",
    "level_seconds",
    "pair_seconds",
    "plan_swaps",
    "smooth_max",
    "swap_tables",
]

GAMMA = 10.0
"""The paper's exponent of the smooth maximum."""

_CHUNK_TOKENS = 1 << 14  # sums of products stay exact in fp32


@dataclass(frozen=True, eq=False)
class SwapTables:
    """Changes of rows by all pairs of slots, at several numbers of groups. `flat` adds up over ranks and steps."""

    num_experts: int
    """E."""
    num_groups: tuple[int, ...]
    """Numbers of groups g; slot e belongs to group e // (E / g)."""
    flat: Tensor
    """int64 [sum over g of g + E*g + E*E]: to be all-reduced (sum)."""

    def load(self, num_groups: int) -> Tensor:
        """Return the rows of each group, int64 [g]: tokens that have an expert there."""
        return self._parts(num_groups)[0]

    def plus(self, num_groups: int) -> Tensor:
        """Return the tokens of a slot that have no expert in a group, int64 [E, g]."""
        return self._parts(num_groups)[1].view(self.num_experts, num_groups)

    def minus(self, num_groups: int) -> Tensor:
        """Return the tokens of slot a that have no other expert in its group, and not b, int64 [E, E] (a, b)."""
        return self._parts(num_groups)[2].view(self.num_experts, self.num_experts)

    def change(self, num_groups: int) -> Tensor:
        """Return the rows that slot a's group gains by exchanging a and b, int64 [E, E] (a, b); 0 within a group."""
        group = _groups(self.num_experts, num_groups, self.flat.device)
        change = self.plus(num_groups)[:, group].T - self.minus(num_groups)
        return change * (group[:, None] != group[None, :])

    def _parts(self, num_groups: int) -> tuple[Tensor, ...]:
        start = 0
        for g in self.num_groups:
            sizes = _sizes(self.num_experts, g)
            if g == num_groups:
                return self.flat[start : start + sum(sizes)].split(sizes)
            start += sum(sizes)
        raise ConfigError(f"num_groups is {num_groups}, but tables were made for {self.num_groups}")


def swap_tables(
    tokens: Tensor, slots: Tensor, num_tokens: int, num_experts: int, num_groups: Sequence[int]
) -> SwapTables:
    """Make the tables of one rank's tokens.

    Args:
        tokens, slots: int64 [a], entry i sends token tokens[i] to slot slots[i].
        num_tokens: of this rank.
        num_experts: E.
        num_groups: of the levels, see `LevelCost`; each must divide num_experts.

    Raises:
        ConfigError: a number of groups does not divide num_experts.
    """
    for g in num_groups:
        if g < 1 or num_experts % g:
            raise ConfigError(f"num_groups has {g}, but it must divide num_experts = {num_experts}")
    groups = tuple(dict.fromkeys(num_groups))
    flat = torch.zeros(sum(sum(_sizes(num_experts, g)) for g in groups), dtype=torch.int64, device=slots.device)
    tables = SwapTables(num_experts, groups, flat)
    for first in range(0, num_tokens, _CHUNK_TOKENS):
        mine = (tokens >= first) & (tokens < first + _CHUNK_TOKENS)
        size = min(_CHUNK_TOKENS, num_tokens - first)
        selected = torch.zeros(size, num_experts, device=slots.device)
        selected[tokens[mine] - first, slots[mine]] = 1.0
        with torch.autocast(slots.device.type, enabled=False):  # bf16 counts exactly to 256 only
            for g in groups:
                counts = selected.view(size, g, num_experts // g).sum(2)
                sole = selected * (counts == 1)[:, _groups(num_experts, g, slots.device)]
                tables.load(g).add_((counts > 0).sum(0))
                tables.plus(g).add_((selected.T @ (counts == 0).float()).long())
                tables.minus(g).add_((sole.sum(0)[:, None] - sole.T @ selected).long())
    return tables


def smooth_max(x: Tensor, gamma: float = GAMMA, dim: int = -1) -> Tensor:
    """Return the gamma-norm of x >= 0, max(x) * (sum of (x_i / max(x))^gamma)^(1 / gamma), a smooth maximum.

    It also depends on the second largest, and is between the maximum and the maximum times n^(1 / gamma). 0 where x is
    0.
    """
    most = x.amax(dim, keepdim=True)
    safe = torch.where(most > 0, most, torch.ones_like(most))
    return (most * ((x / safe) ** gamma).sum(dim, keepdim=True) ** (1 / gamma)).squeeze(dim)


def level_seconds(loads: Mapping[int, Tensor], costs: Sequence[LevelCost]) -> float:
    """Predict all-to-all seconds of one direction where groups have these rows, by number of groups g int64 [g].

    Q of the paper: the sum over levels of alpha + beta * smooth maximum of the rows of groups.
    """
    return sum(
        cost.alpha_seconds + cost.seconds_per_row * float(smooth_max(loads[cost.num_groups].double())) for cost in costs
    )


def pair_seconds(tables: SwapTables, costs: Sequence[LevelCost]) -> Tensor:
    """Predict `level_seconds` after exchanging slots a and b, float64 [E, E].

    Only two groups change, so their powers leave the sum and come back changed.
    """
    size, device = tables.num_experts, tables.flat.device
    seconds = torch.zeros(size, size, dtype=torch.float64, device=device)
    for cost in costs:
        g = cost.num_groups
        group = _groups(size, g, device)
        load, change = tables.load(g).double(), tables.change(g).double()
        changed = (load[group][:, None] + change).clamp(min=0)  # of a's group, for each b
        scale = torch.maximum(changed.amax(), load.amax()).clamp(min=1)
        old, new = (load / scale) ** GAMMA, (changed / scale) ** GAMMA
        total = old.sum() - old[group][:, None] - old[group][None, :] + new + new.T
        # Nothing changes within a group, whose power would leave the sum twice.
        total = torch.where(group[:, None] == group[None, :], old.sum(), total).clamp(min=0)
        seconds += cost.alpha_seconds + cost.seconds_per_row * scale * total ** (1 / GAMMA)
    return seconds


@dataclass(frozen=True)
class SwapPlan:
    """Pairs of slots to exchange, one after the other."""

    pairs: tuple[tuple[int, int], ...]
    before_seconds: float
    """Seconds of one direction of one all-to-all, by the smooth objective."""
    after_seconds: float

    @property
    def gain_seconds(self) -> float:
        """Seconds gained in one direction; a training step has four: dispatch and combine, forward and backward."""
        return self.before_seconds - self.after_seconds

    def new_slots(self, num_experts: int) -> list[int]:
        """Return the new slot of each slot's content, [E]."""
        content = list(range(num_experts))  # by slot: the slot that its content came from
        for a, b in self.pairs:
            content[a], content[b] = content[b], content[a]
        moved = [0] * num_experts
        for slot, origin in enumerate(content):
            moved[origin] = slot
        return moved

    def then(self, later: SwapPlan) -> SwapPlan:
        """Join both plans; `later` was planned for the slots after this one."""
        return SwapPlan(self.pairs + later.pairs, self.before_seconds, later.after_seconds)


def plan_swaps(tables: SwapTables, costs: Sequence[LevelCost]) -> SwapPlan:
    """Find the pair that shortens the all-to-all most, exactly; none if all lengthen it.

    For several pairs make new tables after each, since pairs share tokens, and join the plans with `then`.
    Ties go to the lowest slots. Roots are libm's: where machines differ, one rank's plan should count for all.
    """
    before = level_seconds({g: tables.load(g) for g in tables.num_groups}, costs)
    after = pair_seconds(tables, costs)
    best = int(after.masked_fill(torch.ones_like(after, dtype=torch.bool).tril(), torch.inf).argmin())
    a, b = divmod(best, tables.num_experts)
    seconds = float(after[a, b])
    if a >= b or not seconds < before * (1 - 1e-12):
        return SwapPlan((), before, before)
    return SwapPlan(((a, b),), before, seconds)


def group_rows(tokens: Tensor, slots: Tensor, num_experts: int, num_groups: int) -> Tensor:
    """Count the rows of each group: tokens that have an expert there. int64 [num_groups], as `SwapTables.load`.

    Args:
        tokens, slots: int64 [a], see `swap_tables`.
        num_experts: E.
        num_groups: g, a divisor of E.
    """
    reached = torch.unique(tokens * num_groups + slots // (num_experts // num_groups)) % num_groups
    return torch.bincount(reached, minlength=num_groups)


def _groups(num_experts: int, num_groups: int, device: torch.device) -> Tensor:
    return torch.arange(num_experts, device=device) // (num_experts // num_groups)


def _sizes(num_experts: int, num_groups: int) -> list[int]:
    return [num_groups, num_experts * num_groups, num_experts * num_experts]
