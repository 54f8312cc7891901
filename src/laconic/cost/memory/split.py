"""Cuts the layers of a model into the chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laconic.errors import PlanError


def balanced_split(sizes: Sequence[int], num_chunks: int, last: int = 0) -> tuple[int, ...]:
    """Layers per chunk such that the largest chunk is as small as it can be; of such splits the most even one.

    Args:
        sizes: of the layers: their work, or parameters, which stand for it.
        last: size of what comes with the last chunk (head).
    """
    if len(sizes) < num_chunks:
        raise PlanError(
            f"the model has {len(sizes)} layers, but {num_chunks} chunks need at least one each; use fewer stages"
        )
    largest, _ = _cheapest(sizes, num_chunks, last, max)
    _, counts = _cheapest(sizes, num_chunks, last, lambda total, size: total + size * size, largest)
    return counts


def _cheapest(
    sizes: Sequence[int], num_chunks: int, last: int, add: Callable[[int, int], int], limit: int | None = None
) -> tuple[int, tuple[int, ...]]:
    """The smallest cost of a split whose chunks are no larger than `limit`, and its counts.

    `add` takes the cost of some chunks and the size of one more and gives the cost of all of them.
    """
    count = len(sizes)
    # found[n]: cost and counts of the best chunks so far that hold n layers.
    found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for chunk in range(num_chunks):
        own = last if chunk == num_chunks - 1 else 0
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for done, (cost, counts) in found.items():
            for end in range(done + 1, count - (num_chunks - chunk - 1) + 1):
                size = own + sum(sizes[done:end])
                if limit is not None and size > limit:
                    break
                option = (add(cost, size), (*counts, end - done))
                longer[end] = min(longer.get(end, option), option)
        found = longer
    return found[count]
