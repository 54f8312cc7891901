"""How a sequence is cut: the experts of a layer between workers, rows and experts between slices.

Planner and engine cut by the same function, so that a plan predicts what will run.
"""

from __future__ import annotations


def slice_ranges(length: int, count: int) -> list[range]:
    """Cut range(length) into `count` consecutive ranges whose lengths differ by at most one; some may be empty."""
    return [range(length * i // count, length * (i + 1) // count) for i in range(count)]


def largest_slice(length: int, count: int) -> int:
    """Return the length of the longest of `slice_ranges`."""
    return -(-length // count)
