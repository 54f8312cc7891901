"""Where experts lie, so that the busiest link and the busiest rank take least time: one search for copies and swaps.

Experts lie in slots, and slots in groups: ranks, and the nodes that they are in. The time of a placement is

    sum over links of  alpha + beta * rows of the fullest group,      where a token's row counts once per group
    + seconds per assignment * assignments of the fullest rank        (`Cost`)

1. `copies_of`: each further slot goes to the expert whose copies have most to do.
2. `packed`: the busiest copy first, each onto the rank that has least to do of those with room.
3. The exchange of two slots, or another expert in a slot, that shortens the time most; then the next, until none does.

`place` does all three by loads. Training begins with the slots as they are and exchanges (`best_swaps`; HierMoE,
section 4).

[Note: prices of all swaps]
With S [n, slots] the assignments and cnt [n, g] the token's slots in each of g groups, exchanging the slots a and b of
the groups ga != gb changes the rows of ga by

    + tokens of b that have nobody in ga          plus[b, ga],   plus = S^T (cnt = 0)
    - tokens of a that have nobody else in ga,    minus[a, b],   minus = U^T (1 - S), U = S where cnt[:, group] = 1
      and do not have b

and those of gb by the same with a and b exchanged. So two matrix products price all pairs at once, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from laconic.errors import ConfigError

_LEAST_GAIN = 1e-4
"""Share of the time below which a further change is not worth it."""

GAMMA = 10.0
"""HierMoE's exponent of the smooth maximum: where two groups are full, emptying one of them counts, too."""


@dataclass(frozen=True, eq=False)
class Cost:
    """Seconds of a link or of computing: alpha_seconds + seconds_per_row * rows of the fullest group."""

    groups: Tensor
    """int64 [slots]: the group of each slot."""
    alpha_seconds: float
    seconds_per_row: float
    once: bool = True
    """A token is one row of a group, however many of its slots it has; else one row of each slot."""


@dataclass(frozen=True)
class SwapPlan:
    """Pairs of slots to exchange, one after the other."""

    pairs: tuple[tuple[int, int], ...]
    before_seconds: float
    """Seconds of one direction of one all-to-all and of the experts' share in it, by the smooth objective."""
    after_seconds: float

    @property
    def gain_seconds(self) -> float:
        """Seconds gained in one direction; a training step has four: dispatch and combine, forward and backward."""
        return self.before_seconds - self.after_seconds

    def new_slots(self, num_slots: int) -> list[int]:
        """Return the new slot of each slot's content, [num_slots]."""
        content = list(range(num_slots))  # by slot: the slot that its content came from
        for a, b in self.pairs:
            content[a], content[b] = content[b], content[a]
        return sorted(range(num_slots), key=lambda slot: content[slot])


def seconds_of(chosen: Tensor, weights: Tensor, costs: Sequence[Cost], gamma: float = GAMMA) -> float:
    """Predict the seconds of a placement.

    `chosen`, float32 [n, slots], is 1 where a token goes to a slot, `weights`, float32 [n], how many tokens each of
    them stands for; with gamma = infinity the smooth maximum is the maximum itself.
    """
    return sum(
        cost.alpha_seconds + cost.seconds_per_row * float(_smooth_max(rows_of(chosen, weights, cost), gamma))
        for cost in costs
    )


def swap_seconds(chosen: Tensor, weights: Tensor, costs: Sequence[Cost]) -> Tensor:
    """Predict `seconds_of` after exchanging slots a and b, float64 [slots, slots]; see [Note: prices of all swaps]."""
    size = chosen.shape[1]
    seconds = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for cost in costs:
        group = cost.groups
        same = group[:, None] == group[None, :]
        rows = rows_of(chosen, weights, cost)
        change = _changes(chosen, weights, cost).double().masked_fill(same, 0)
        changed = (rows[group][:, None] + change).clamp(min=0)  # of a's group, for each b
        # Only two groups change, so their powers leave the sum and come back changed.
        scale = torch.maximum(changed.amax(), rows.amax()).clamp(min=1e-30)
        old, new = (rows / scale) ** GAMMA, (changed / scale) ** GAMMA
        total = old.sum() - old[group][:, None] - old[group][None, :] + new + new.T
        total = torch.where(same, old.sum(), total).clamp(min=0)
        seconds += cost.alpha_seconds + cost.seconds_per_row * scale * total ** (1 / GAMMA)
    return seconds


def best_swaps(chosen: Tensor, weights: Tensor, costs: Sequence[Cost], num_pairs: int = 1) -> SwapPlan:
    """Find the pair of slots whose exchange shortens the time most, exactly; then the next, at most `num_pairs`.

    Ties go to the lowest slots. Powers are libm's: where machines differ, one rank's plan should count for all.
    """
    before = now = seconds_of(chosen, weights, costs)
    pairs: list[tuple[int, int]] = []
    while len(pairs) < num_pairs:
        after = swap_seconds(chosen, weights, costs)
        a, b = divmod(int(after.masked_fill(torch.ones_like(after).tril().bool(), torch.inf).argmin()), len(after))
        if a >= b or not float(after[a, b]) < now * (1 - 1e-9):
            break
        pairs.append((a, b))
        chosen, now = _exchanged(chosen, a, b), float(after[a, b])
    return SwapPlan(tuple(pairs), before, now)


def copies_of(loads: Sequence[float], num_slots: int) -> list[int]:
    """Return how many of `num_slots` slots each expert gets, so that the busiest copy has least to do.

    Copies share the tokens of their expert evenly. Fewer slots than experts are a ConfigError.
    """
    if num_slots < len(loads):
        raise ConfigError(f"num_slots is {num_slots}, but each of the {len(loads)} experts needs one; give more slots")
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])
        copies[busiest] += 1
    return copies


def hot_copies(
    loads: Sequence[float], homes: Sequence[int], num_ranks: int, num_per_rank: int
) -> tuple[tuple[tuple[int, int], ...], float, float]:
    """Return (expert, rank) of copies, and the busiest rank's rows over the mean of all, before and after.

    The copy that relieves the busiest rank most, then the next, until none does; each shares its expert's tokens
    evenly. Homes, the rank of each expert, stay where they are.
    """
    given = torch.tensor(list(loads), dtype=torch.float64, device="cpu")
    ranks, room = torch.arange(num_ranks, device="cpu"), torch.full((num_ranks,), num_per_rank, device="cpu")
    held = torch.zeros(num_ranks, len(given), dtype=torch.float64, device="cpu")
    held[torch.tensor(list(homes), device="cpu"), torch.arange(len(given), device="cpu")] = 1
    mean, before = float(given.sum()) / num_ranks or 1.0, float((held @ given).max())
    copies: list[tuple[int, int]] = []
    while True:
        share, more = given / held.sum(0), given / (held.sum(0) + 1)
        rows = held @ share
        after = (rows + (held * (more - share)).T).repeat(num_ranks, 1, 1)  # [rank of the copy, expert, rank]
        after[ranks, :, ranks] += more
        seconds = _smooth_max(after, GAMMA).masked_fill((held > 0) | (room == 0)[:, None], torch.inf)
        rank, expert = divmod(int(seconds.argmin()), len(given))
        if not float(seconds[rank, expert]) < float(_smooth_max(rows, GAMMA)) * (1 - _LEAST_GAIN):
            return tuple(copies), before / mean, float(rows.max()) / mean
        copies.append((expert, rank))
        held[rank, expert], room[rank] = 1, room[rank] - 1


def packed(loads: Sequence[float], rooms: Sequence[int]) -> list[list[int]]:
    """Return the items of each rank: the busiest first, each onto the rank with least to do of those with room.

    All rooms together are as many as there are items.
    """
    ranks: list[list[int]] = [[] for _ in rooms]
    sums = [0.0] * len(rooms)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        rank = min((r for r, room in enumerate(rooms) if len(ranks[r]) < room), key=lambda r: (sums[r], r))
        ranks[rank].append(item)
        sums[rank] += loads[item]
    return ranks


def place(loads: Sequence[float], rooms: Sequence[int]) -> list[list[int]]:
    """Return the experts that each rank holds, so that the busiest rank has least to do, by measured tokens of experts.

    Slots beyond one per expert hold copies of hot ones, which share their tokens evenly. More experts than slots, or a
    load that is negative or no number, are a ConfigError.
    """
    if not all(0 <= load < float("inf") for load in loads):
        raise ConfigError(f"loads are {list(loads)}, but tokens of experts must be numbers from 0 on")
    copies, given = copies_of(loads, sum(rooms)), torch.tensor(list(loads), dtype=torch.float64, device="cpu")
    items = [expert for expert, number in enumerate(copies) for _ in range(number)]
    ranks = packed([loads[expert] / copies[expert] for expert in items], rooms)
    experts = torch.tensor([items[item] for rank in ranks for item in rank], device="cpu")
    costs = [Cost(torch.repeat_interleave(torch.tensor(list(rooms), device="cpu")), 0.0, 1.0, once=False)]
    chosen = torch.eye(len(experts), dtype=torch.float64, device="cpu")
    best, least, now = experts, torch.inf, torch.inf
    while True:
        shares = (given / torch.bincount(experts, minlength=len(given)))[experts]
        if (most := seconds_of(chosen, shares, costs, torch.inf)) < least:
            best, least = experts, most
        if not (smooth := seconds_of(chosen, shares, costs)) < now * (1 - _LEAST_GAIN):
            break
        now, swaps, others = smooth, swap_seconds(chosen, shares, costs), _copied_seconds(experts, given, costs[0])
        experts = experts.clone()
        if swaps.min() <= others.min():
            a, b = divmod(int(swaps.argmin()), len(experts))
            experts[[a, b]] = experts[[b, a]]
        else:
            slot, expert = divmod(int(others.argmin()), len(given))
            experts[slot] = expert
    return [sorted(rank.tolist()) for rank in best.split(list(rooms))]


def _copied_seconds(experts: Tensor, loads: Tensor, cost: Cost) -> Tensor:
    """Predict seconds after a slot, whose expert has other copies, holds a copy of another one, [slots, experts]."""
    num_groups = int(cost.groups.max()) + 1
    held = torch.zeros(num_groups, len(loads), dtype=loads.dtype, device="cpu")
    held.index_put_((cost.groups, experts), torch.ones(len(experts), dtype=loads.dtype, device="cpu"), accumulate=True)
    copies = held.sum(0)
    share, fewer, more = loads / copies, loads / (copies - 1), loads / (copies + 1)
    seconds = torch.full((len(experts), len(loads)), torch.inf, dtype=loads.dtype, device="cpu")
    slots = torch.arange(len(experts), device="cpu")
    free = slots[copies[experts] > 1]
    gone, group = experts[free], cost.groups[free]
    rows = (held @ share)[None, :] + (held * (fewer - share))[:, gone].T
    rows[torch.arange(len(free), device="cpu"), group] -= fewer[gone]
    after = rows[:, None, :] + (held * (more - share)).T[None, :, :]
    after[torch.arange(len(free), device="cpu"), :, group] += more
    found = cost.seconds_per_row * _smooth_max(after, GAMMA)
    found[torch.arange(len(free), device="cpu"), gone] = torch.inf
    seconds[free] = found
    return seconds


def rows_of(chosen: Tensor, weights: Tensor, cost: Cost) -> Tensor:
    """Return the rows of each group, float64 [g]; see `seconds_of`."""
    counts = chosen @ one_hot(cost.groups).to(chosen.dtype)
    return (weights @ ((counts > 0).to(chosen.dtype) if cost.once else counts)).double()


def _changes(chosen: Tensor, weights: Tensor, cost: Cost) -> Tensor:
    """Return the rows that slot a's group gains by exchanging a and b, [a, b]; right where they differ in group."""
    if not cost.once:
        load = weights @ chosen
        return load[None, :] - load[:, None]
    group, weighted = cost.groups, chosen * weights[:, None]
    counts = chosen @ one_hot(group).to(chosen.dtype)
    plus = weighted.T @ (counts == 0).to(chosen.dtype)
    sole = weighted * (counts == 1)[:, group]
    return plus[:, group].T - (sole.sum(0)[:, None] - sole.T @ chosen)


def _exchanged(chosen: Tensor, a: int, b: int) -> Tensor:
    order = torch.arange(chosen.shape[1], device="cpu")
    order[[a, b]] = order[[b, a]]
    return chosen[:, order]


def _smooth_max(x: Tensor, gamma: float) -> Tensor:
    """The gamma-norm of x >= 0 [..., g], max(x) * (sum of (x_i / max(x))^gamma)^(1 / gamma)."""
    most = x.amax(-1, keepdim=True)
    powers = ((x / most.clamp(min=1e-30)) ** gamma).sum(-1) ** (1 / gamma)
    return most[..., 0] if gamma == torch.inf else most[..., 0] * powers
