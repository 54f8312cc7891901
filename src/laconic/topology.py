"""Which ranks belong together: the groups of a grid, and the nested groups that an all-to-all in levels goes through.

A world of processes is seen twice, by the dense part of a model and by its experts:

    dense rank  = dp * N_MP + mp                    mp: ranks that share the dense part and have the same tokens
    expert rank = (edp * N_EP + ep) * N_ESP + esp   ep: experts spread; esp: one expert's hidden dimension spread

Both numbers are the global rank, so neither side knows of the other: N_MP, N_EP and N_ESP need not fit each other, only
the world. A *joint* group has all N_EP * N_ESP ranks that together hold every expert once; the ranks of an edp group
hold the same shards, whose gradients they add.

Levels cut an expert-parallel group into nested groups along slow links (HierMoE, arXiv 2508.09591, section 3): U[0] = 1
group of all, U[1] nodes, U[2] parts of nodes and so on, neighbours always together. Plain arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.errors import ConfigError

GROUPS = ("mp", "dp", "esp", "ep", "joint", "edp")
"""Groups of a grid: tensor and data parallel of the dense part; shards of an expert, experts, both together, and the
replicas of an expert shard."""


def groups_of_ranks(num_ranks: int, stride: int, size: int) -> list[list[int]]:
    """Ranks 0 ... num_ranks - 1 in groups of `size` that are `stride` apart, by their lowest rank."""
    span = stride * size
    firsts = (block + offset for block in range(0, num_ranks, span) for offset in range(stride))
    return [list(range(first, first + span, stride)) for first in firsts]


def are_nested(num_groups: Sequence[int], num_ranks: int) -> bool:
    """Whether each number of groups is a larger multiple of the one before, and the last divides the ranks."""
    growing = all(type(b) is int and 0 < a < b and b % a == 0 for a, b in pairwise((1, *num_groups)))
    return growing and num_ranks % (1, *num_groups)[-1] == 0


@dataclass(frozen=True)
class GridLayout:
    """How a world is divided into groups. Ranks are numbered node by node.

    Raises ConfigError unless both ways of dividing come out even.
    """

    num_ranks: int
    mp: int = 1
    """N_MP, ranks with the same tokens."""
    ep: int = 1
    """N_EP, ranks among which experts are spread."""
    esp: int = 1
    """N_ESP, ranks that share each expert's hidden dimension."""
    ranks_per_node: int | None = None
    """None: one node, as far as is known."""
    levels: tuple[int, ...] = ()
    """U[1], U[2], ...: groups of an EP group at each level, each a multiple of the one before and a divisor of N_EP."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "mp", "ep", "esp", "ranks_per_node"):
            value = getattr(self, name)
            if (value is not None or name != "ranks_per_node") and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}, but it must be a whole number of ranks, at least 1; change it")
        for name in ("mp", "ranks_per_node"):
            if self.num_ranks % (getattr(self, name) or 1):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but it must divide num_ranks = {self.num_ranks}; change one of"
                    " them"
                )
        if self.num_ranks % self.joint:
            raise ConfigError(
                f"ep is {self.ep} and esp is {self.esp}, but their product must divide num_ranks = {self.num_ranks};"
                " change one of them"
            )
        if not are_nested(self.levels, self.ep):
            raise ConfigError(
                f"levels are {self.levels}, but numbers of groups must grow, each a multiple of the one before (the"
                f" first of 1) and a divisor of ep, which is {self.ep}; change them"
            )

    @property
    def dp(self) -> int:
        """N_DP, replicas of the dense part."""
        return self.num_ranks // self.mp

    @property
    def edp(self) -> int:
        """N_EDP, replicas of the experts."""
        return self.num_ranks // self.joint

    @property
    def joint(self) -> int:
        """Ranks that together hold every expert once."""
        return self.ep * self.esp

    def stride_and_size(self, group: str) -> tuple[int, int]:
        """How far apart the ranks of a group of GROUPS are, and how many. Raises ConfigError for another name."""
        strides = {"mp": 1, "dp": self.mp, "esp": 1, "ep": self.esp, "joint": 1, "edp": self.joint}
        if group not in strides:
            raise ConfigError(f"group is {group!r}, but it must be one of {', '.join(GROUPS)}")
        size: int = getattr(self, group)
        return strides[group], size

    def ranks(self, group: str) -> list[list[int]]:
        """All groups of that name, each in the order of its ranks. Raises ConfigError for a name not in GROUPS."""
        return groups_of_ranks(self.num_ranks, *self.stride_and_size(group))

    def within(self, level: int) -> list[list[int]]:
        """The groups of `level`: ranks of one EP group that are in the same of its U[level] parts."""
        return groups_of_ranks(self.num_ranks, self.esp, self.ep // (1, *self.levels)[level])

    def across(self, level: int) -> list[list[int]]:
        """Ranks at the same place of the parts of `level` >= 1 that are in one part of the level before."""
        coarse, fine = (1, *self.levels)[level - 1 : level + 1]
        return groups_of_ranks(self.num_ranks, self.joint // fine, fine // coarse)


@dataclass(frozen=True)
class ExchangeStage:
    """One all-to-all of several: inside each of `num_parents` groups, to one of its `fanout` groups."""

    name: str
    """inter1, inter2, ...; the last one intra0 (between all ranks), intra1, ..."""
    num_parents: int
    """Groups inside which it runs."""
    num_groups: int
    """Groups that rows go to, of all parents; ranks in the last stage."""
    num_ranks: int
    """G."""

    @property
    def fanout(self) -> int:
        """Ranks that exchange rows with each other."""
        return self.num_groups // self.num_parents

    @property
    def stride(self) -> int:
        """Between ranks that exchange rows: ranks in each of the groups that the stage goes to, 1 in the last stage."""
        return self.num_ranks // self.num_groups

    @property
    def num_positions(self) -> int:
        """Ranks of a parent."""
        return self.num_ranks // self.num_parents

    def place(self, rank: int) -> int:
        """Which of its `peers` a rank is."""
        return rank // self.stride % self.fanout

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges rows with, by place: one of each group, at the same position in it."""
        first = rank - self.place(rank) * self.stride
        return tuple(range(first, first + self.fanout * self.stride, self.stride))


@dataclass(frozen=True)
class Levels:
    """The nested groups that the G ranks of an expert-parallel group lie in.

    Raises ConfigError when built, unless num_groups begins with 1, each number is a larger multiple of the one before,
    and the last divides num_ranks.
    """

    num_ranks: int
    """G."""
    num_groups: tuple[int, ...] = (1,)
    """U[0] = 1, U[1], ...: all ranks, nodes, sockets of nodes, ..., counted over all ranks."""
    ranks_per_node: int | None = None
    """None: G / U[1], or one node without levels."""

    def __post_init__(self) -> None:
        if type(self.num_ranks) is not int or self.num_ranks < 1:
            raise ConfigError(f"num_ranks is {self.num_ranks!r}, but it must be a whole number from 1 on")
        if self.num_groups[:1] != (1,) or not are_nested(self.num_groups[1:], self.num_ranks):
            raise ConfigError(
                f"num_groups is {self.num_groups}, but it must begin with 1, each number must be a larger multiple of"
                f" the one before, and the last must divide the {self.num_ranks} ranks, as (1, nodes) does"
            )
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or self.num_ranks % self.ranks_per_node):
            raise ConfigError(
                f"ranks_per_node is {self.ranks_per_node}, but it must divide the {self.num_ranks} ranks; use whole"
                " nodes"
            )

    @classmethod
    def of_groups(cls, num_ranks: int, num_groups: Iterable[int], ranks_per_node: int | None = None) -> Levels:
        """Of U[1], U[2], ... those levels that are neither all ranks nor single ones."""
        return cls(num_ranks, (1, *(number for number in num_groups if 1 < number < num_ranks)), ranks_per_node)

    @classmethod
    def of_nodes(cls, num_ranks: int, ranks_per_node: int) -> Levels:
        """Two levels, nodes and ranks; one where there is only one node or each node has only one rank.

        Raises ConfigError if the ranks do not fill whole nodes.
        """
        return cls.of_groups(num_ranks, (num_ranks // max(1, ranks_per_node),), ranks_per_node)

    @property
    def max_depth(self) -> int:
        """D, the number of levels."""
        return len(self.num_groups)

    @property
    def depths(self) -> range:
        """1 .. D."""
        return range(1, self.max_depth + 1)

    @property
    def node_size(self) -> int:
        """Ranks of a machine."""
        return self.ranks_per_node or self.num_ranks // (*self.num_groups, 1)[1]

    def stages(self, depth: int) -> tuple[ExchangeStage, ...]:
        """The stages of an all-to-all of this depth, in the order of dispatch.

        Stages 1 ... depth - 1 go from group to group of a level, the last from rank to rank inside of a group.

        Raises:
            ConfigError: the depth is not in `depths`.
        """
        if depth not in self.depths:
            raise ConfigError(
                f"depth is {depth}, but it must be from 1 to {self.max_depth}, the number of levels in num_groups"
                f" {self.num_groups}"
            )
        used = self.num_groups[:depth]
        inter = (ExchangeStage(f"inter{i}", *pair, self.num_ranks) for i, pair in enumerate(pairwise(used), 1))
        return (*inter, ExchangeStage(f"intra{depth - 1}", used[-1], self.num_ranks, self.num_ranks))
