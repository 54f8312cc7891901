"""Cuts the layers of a model into the chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.errors import PlanError

__all__ = ["balanced_split"]


def balanced_split(sizes: Sequence[int], num_chunks: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Layers per chunk such that the largest chunk is as small as it can be; of such splits, one of even counts.

    Args:
        sizes: of the layers.
        num_chunks: into how many consecutive chunks they are cut.
        first, last: size of what comes with the first chunk (embedding) and with the last (head).

    Raises:
        PlanError: there are fewer layers than chunks.
    """
    count = len(sizes)
    if count < num_chunks:
        raise PlanError(
            f"the model has {count} layers, but {num_chunks} chunks need at least one each; use fewer stages"
        )
    # best[n]: smallest possible largest chunk when n layers make the chunks so far, and how many the last of them has.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for chunk in range(1, num_chunks + 1):
        own = (first if chunk == 1 else 0) + (last if chunk == num_chunks else 0)
        found: dict[int, tuple[int, int]] = {}
        for done in range(chunk, count - (num_chunks - chunk) + 1):
            found[done] = min(
                (max(best[-1][done - take][0], own + sum(sizes[done - take : done])), take)
                for take in range(1, done + 1)
                if done - take in best[-1]
            )
        best.append(found)
    counts: list[int] = []
    done = count
    for chunk in range(num_chunks, 0, -1):
        counts.insert(0, best[chunk][done][1])
        done -= counts[0]
    return tuple(counts)
