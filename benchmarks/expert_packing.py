"""Experts on ranks by measured load, without replicas: what EPLB's packing does when there are no spare slots.

A baseline for the swaps of `laconic.moe.placement.search`: it evens out tokens, not the rows that are left without
duplicates, and moves many experts at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.errors import ConfigError
from laconic.moe.placement.search import packed


def rebalance(loads: Sequence[float], num_ranks: int, current: Sequence[int] | None = None) -> list[int]:
    """A slot for each expert, [E]; slot s lives on rank s // (E / num_ranks).

    loads: tokens of each expert [E].
    current: the slots now; packs then take the places where most of their experts are already, so that few move.

    Raises ConfigError for sizes that do not divide, or slots that are no permutation.
    """
    if current is not None and sorted(current) != list(range(len(loads))):
        raise ConfigError("current is no permutation of the slots; give every expert a slot of its own")
    if num_ranks < 1 or len(loads) % num_ranks:
        raise ConfigError(f"num_ranks is {num_ranks}, but it must divide the {len(loads)} experts")
    per_rank = len(loads) // num_ranks
    packs = packed(loads, [per_rank] * num_ranks)
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
