"""Experts on ranks by measured load, without replicas: what EPLB's packing does when there are no spare slots.

A baseline for `laconic.moe.placement.swap_search`: it evens out tokens, not the rows that are left without duplicates,
and moves many experts at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.errors import ConfigError

__all__ = ["imbalance", "pack", "rebalance"]


def pack(loads: Sequence[float], num_packs: int) -> list[list[int]]:
    """Items in `num_packs` packs of equally many: heaviest first, each into the lightest pack with room.

    Ties go to the lower item and the lower pack. Raises ConfigError if the packs do not divide the items.
    """
    if num_packs < 1 or len(loads) % num_packs:
        raise ConfigError(f"num_packs is {num_packs}, but it must divide the {len(loads)} items")
    room = len(loads) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    weights = [0.0] * num_packs
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        lightest = min((p for p in range(num_packs) if len(packs[p]) < room), key=lambda p: weights[p])
        packs[lightest].append(item)
        weights[lightest] += loads[item]
    return packs


def rebalance(
    loads: Sequence[float],
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
    current: Sequence[int] | None = None,
) -> list[int]:
    """A slot for each expert, [E]; slot s lives on rank s // (E / num_ranks).

    loads: tokens of each expert [E]. Where the gate limits tokens to groups of experts (`num_groups`, neighbours) and
    the groups divide over the nodes, whole groups go to nodes and then experts to ranks, so that a token's experts
    stay together; otherwise experts go to ranks directly.
    current: the slots now; packs then take the places where most of their experts are already, so that few move.

    Raises ConfigError for sizes that do not divide, or slots that are no permutation.
    """
    num_experts = len(loads)
    if num_ranks < 1 or num_experts % num_ranks:
        raise ConfigError(f"num_ranks is {num_ranks}, but it must divide the {num_experts} experts")
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ConfigError(f"num_nodes is {num_nodes}, but it must divide num_ranks = {num_ranks}")
    if num_groups < 1 or num_experts % num_groups:
        raise ConfigError(f"num_groups is {num_groups}, but it must divide the {num_experts} experts")
    if current is not None and sorted(current) != list(range(num_experts)):
        raise ConfigError("current is no permutation of the slots; give every expert a slot of its own")
    nested = num_nodes > 1 and num_groups % num_nodes == 0
    nodes = _on_nodes(loads, num_nodes, num_groups) if nested else [list(range(num_experts))]
    per_rank = num_experts // num_ranks
    per_node = num_experts // len(nodes)
    slots = [0] * num_experts
    for node, experts in enumerate(_placed(nodes, current, per_node, 0)):
        packs = [[experts[i] for i in pack_] for pack_ in pack([loads[e] for e in experts], num_ranks // len(nodes))]
        first = node * per_node
        for rank, mine in enumerate(_placed(packs, current, per_rank, first)):
            for expert, slot in _within(mine, current, first + rank * per_rank):
                slots[expert] = slot
    return slots


def imbalance(loads: Sequence[float], slots: Sequence[int], num_ranks: int) -> float:
    """Load of the fullest rank over the mean; 1 is even, and so is no load at all."""
    sums = [0.0] * num_ranks
    for load, slot in zip(loads, slots, strict=True):
        sums[slot // (len(loads) // num_ranks)] += load
    return max(sums) * num_ranks / sum(sums) if sum(sums) else 1.0


def _on_nodes(loads: Sequence[float], num_nodes: int, num_groups: int) -> list[list[int]]:
    size = len(loads) // num_groups
    sums = [sum(loads[g * size : (g + 1) * size]) for g in range(num_groups)]
    return [[g * size + i for g in groups for i in range(size)] for groups in pack(sums, num_nodes)]


def _placed(packs: list[list[int]], current: Sequence[int] | None, size: int, first: int) -> list[list[int]]:
    """The packs in the order of places of `size` slots from `first` on, each where most of it is already."""
    if current is None:
        return packs
    found: dict[tuple[int, int], int] = {}
    for number, experts in enumerate(packs):
        for expert in experts:
            place = (current[expert] - first) // size
            if 0 <= place < len(packs):
                found[number, place] = found.get((number, place), 0) + 1
    placed: dict[int, int] = {}
    for number, place in sorted(found, key=lambda key: (-found[key], key)):
        if number not in placed.values() and place not in placed:
            placed[place] = number
    left = iter(number for number in range(len(packs)) if number not in placed.values())
    return [packs[placed[place] if place in placed else next(left)] for place in range(len(packs))]


def _within(experts: list[int], current: Sequence[int] | None, first: int) -> list[tuple[int, int]]:
    """Slots of a rank's experts; those that are there already stay."""
    slots = range(first, first + len(experts))
    stay = {e: current[e] for e in experts if current is not None and current[e] in slots}
    free = iter(slot for slot in slots if slot not in stay.values())
    return [(expert, stay[expert] if expert in stay else next(free)) for expert in experts]
