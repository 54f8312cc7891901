"""The levels of an interconnect: which ranks talk to each other at each stage of a hierarchical all-to-all.

The G ranks of an expert-parallel group lie in nested groups: U[0] = 1 group of all, U[1] nodes, U[2] halves of nodes
and so on, neighbours always together. An all-to-all of depth d makes d stages (HierMoE, arXiv 2508.09591, section 3):
stages 1 ... d - 1 go from group to group inside of the next larger one, the last goes from rank to rank inside of a
group. Depth 1 is the flat all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from laconic.errors import ConfigError

__all__ = ["Levels", "Stage"]


@dataclass(frozen=True)
class Stage:
    """One step of a row: from a rank to one of `fanout` ranks that are `stride` apart, itself among them."""

    fanout: int
    stride: int
    """Ranks in each of the groups that the stage goes to; 1 in the last stage."""

    def place(self, rank: int) -> int:
        """Which of its `peers` a rank is."""
        return rank // self.stride % self.fanout

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges rows with, by place: one of each group, at the same position in it."""
        first = rank - self.place(rank) * self.stride
        return tuple(range(first, first + self.fanout * self.stride, self.stride))


@dataclass(frozen=True)
class Levels:
    """G ranks and U[i], the number of groups at each level.

    Raises ConfigError when built, unless num_groups begins with 1, each number is a larger multiple of the one before,
    and the last divides num_ranks.
    """

    num_ranks: int
    num_groups: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        first, last = self.num_groups[:1], self.num_groups[-1:]
        nested = all(0 < a < b and b % a == 0 for a, b in pairwise(self.num_groups))
        if first != (1,) or not nested or self.num_ranks < 1 or self.num_ranks % last[0]:
            raise ConfigError(
                f"num_groups is {self.num_groups}, but it must begin with 1, each number must be a larger multiple of"
                f" the one before, and the last must divide the {self.num_ranks} ranks, as (1, nodes) does"
            )

    @classmethod
    def of_nodes(cls, num_ranks: int, ranks_per_node: int) -> Levels:
        """Two levels, nodes and ranks; one where there is only one node or each node has only one rank.

        Raises ConfigError if the ranks do not fill whole nodes.
        """
        if ranks_per_node < 1 or num_ranks % ranks_per_node:
            raise ConfigError(
                f"ranks_per_node is {ranks_per_node}, but it must divide the {num_ranks} ranks; use whole nodes"
            )
        num_nodes = num_ranks // ranks_per_node
        return cls(num_ranks, (1, num_nodes) if 1 < num_nodes < num_ranks else (1,))

    @property
    def max_depth(self) -> int:
        """D, the number of levels."""
        return len(self.num_groups)

    def stages(self, depth: int) -> tuple[Stage, ...]:
        """The stages of an all-to-all of this depth, 1 ... `max_depth`. Raises ConfigError for another."""
        if not 1 <= depth <= self.max_depth:
            raise ConfigError(
                f"depth is {depth}, but it must be from 1 to {self.max_depth}, the number of levels in num_groups"
                f" {self.num_groups}"
            )
        chain = (*self.num_groups[:depth], self.num_ranks)
        return tuple(Stage(fanout=fine // coarse, stride=self.num_ranks // fine) for coarse, fine in pairwise(chain))
