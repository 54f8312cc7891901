"""Experts on ranks by measured load, without replicas: what EPLB's packing does when there are no spare slots.

A baseline for `laconic.moe.placement.swap_search`: it evens out tokens, not the rows that are left without duplicates,
and moves many experts at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.errors import ConfigError

__all__ = ["pack", "rebalance"]


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


def rebalance(loads: Sequence[float], num_ranks: int, current: Sequence[int] | None = None) -> list[int]:
    """A slot for each expert, [E]; slot s lives on rank s // (E / num_ranks).

    loads: tokens of each expert [E].
    current: the slots now; packs then take the places where most of their experts are already, so that few move.

    Raises ConfigError for sizes that do not divide, or slots that are no permutation.
    """
    if current is not None and sorted(current) != list(range(len(loads))):
        raise ConfigError("current is no permutation of the slots; give every expert a slot of its own")
    packs = pack(loads, num_ranks)
    per_rank = len(loads) // num_ranks
    slots = [0] * len(loads)
    for rank, experts in enumerate(_placed(packs, current, per_rank)):
        for expert, slot in _within(experts, current, rank * per_rank):
            slots[expert] = slot
    return slots


def _placed(packs: list[list[int]], current: Sequence[int] | None, size: int) -> list[list[int]]:
    """The packs in the order of ranks of `size` slots, each where most of it is already."""
    if current is None:
        return packs
    found: dict[tuple[int, int], int] = {}
    for number, experts in enumerate(packs):
        for expert in experts:
            key = number, current[expert] // size
            found[key] = found.get(key, 0) + 1
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
