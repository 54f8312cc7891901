"""A mixture-of-experts layer and the grid of ranks it runs on, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from laconic.cost.comm.seconds import World
from laconic.errors import ConfigError

__all__ = ["GROUPS", "GridShape", "LayerShape", "world_of_group"]

GROUPS = ("mp", "dp", "esp", "ep", "joint", "edp")
"""Groups of a grid: tensor and data parallel of the dense part; shards of an expert, experts, both together, and the
replicas of an expert shard."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer computes on the rows that one rank holds. Letters as in FSMoE and Parm.

    Raises ConfigError for a size that cannot be.
    """

    num_tokens: int
    """B*L: rows of the layer's input on a rank, the same rows on all ranks of an MP group. 0 is a rank without."""
    model_dim: int
    """M."""
    hidden_dim: int
    """H, of a whole expert."""
    num_experts: int
    """E."""
    top_k: int
    """k: experts of a token."""
    num_gemms: int = 3
    """Matrix products of an expert: 2, or 3 with a gate."""
    item_nbytes: int = 2
    """Of an element of a row."""
    capacity_factor: float | None = None
    """f: rows are padded or cut to f times the mean of an expert. None: dropless."""

    def __post_init__(self) -> None:
        _check_whole(self, "num_tokens", 0)
        for name in ("model_dim", "hidden_dim", "num_experts", "top_k", "num_gemms", "item_nbytes"):
            _check_whole(self, name, 1)
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k is {self.top_k}, but a token has at most num_experts = {self.num_experts} experts; lower top_k"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            raise ConfigError(
                f"capacity_factor is {self.capacity_factor}, but it must be positive and finite; None drops nothing"
            )

    @property
    def rows_per_token(self) -> float:
        """c = k*f: rows that travel for a token; k where nothing is dropped or padded."""
        return self.top_k * (1.0 if self.capacity_factor is None else self.capacity_factor)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.model_dim * self.item_nbytes

    @property
    def tokens_nbytes(self) -> int:
        """Bytes of the layer's input, B*L*M."""
        return self.num_tokens * self.row_nbytes

    @property
    def rows_nbytes(self) -> float:
        """Bytes of all rows that its tokens send to experts, E*T*M = k*f*B*L*M."""
        return self.rows_per_token * self.tokens_nbytes


@dataclass(frozen=True)
class GridShape:
    """How a world is divided: dense rank = dp * mp + (rank in its MP group), expert rank = (edp * ep + rank among
    experts) * esp + shard. Ranks are numbered node by node.

    Raises ConfigError unless both ways of dividing come out even.
    """

    num_ranks: int
    mp: int = 1
    """N_MP: ranks of a tensor (and sequence) parallel group."""
    ep: int = 1
    """N_EP: ranks over which experts are spread."""
    esp: int = 1
    """N_ESP: ranks over which one expert is sharded."""
    ranks_per_node: int | None = None
    """None: one node."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "mp", "ep", "esp"):
            _check_whole(self, name, 1)
        if self.num_ranks % self.mp:
            raise ConfigError(f"mp is {self.mp}, but it must divide num_ranks = {self.num_ranks}")
        if self.num_ranks % (self.ep * self.esp):
            raise ConfigError(
                f"ep * esp is {self.ep} * {self.esp}, but it must divide num_ranks = {self.num_ranks}; lower one"
            )
        if self.ranks_per_node is not None:
            _check_whole(self, "ranks_per_node", 1)
            if self.num_ranks % self.ranks_per_node:
                raise ConfigError(
                    f"ranks_per_node is {self.ranks_per_node}, but it must divide num_ranks = {self.num_ranks}"
                )

    def size(self, group: str) -> int:
        """Ranks of a group of GROUPS. Raises ConfigError for another name."""
        return self._stride_and_size(group)[1]

    def world(self, group: str) -> World:
        """The machines of a group; of the one that spans most nodes, where groups differ."""
        stride, size = self._stride_and_size(group)
        return world_of_group(self.num_ranks, stride, size, self.ranks_per_node or self.num_ranks)

    def check(self, shape: LayerShape) -> None:
        """Raises ConfigError if the layer cannot be divided over this grid."""
        rules = (
            ("num_experts", shape.num_experts, "ep", self.ep),
            ("hidden_dim", shape.hidden_dim, "esp", self.esp),
        )
        for name, value, divisor, number in rules:
            if value % number:
                raise ConfigError(f"{name} is {value}, but it must be a multiple of {divisor} = {number}; change one")

    def _stride_and_size(self, group: str) -> tuple[int, int]:
        joint = self.ep * self.esp
        found = {
            "mp": (1, self.mp),
            "dp": (self.mp, self.num_ranks // self.mp),
            "esp": (1, self.esp),
            "ep": (self.esp, self.ep),
            "joint": (1, joint),
            "edp": (joint, self.num_ranks // joint),
        }
        if group not in found:
            raise ConfigError(f"group is {group!r}, but it must be one of {', '.join(GROUPS)}")
        return found[group]


@lru_cache(maxsize=4096)
def world_of_group(num_ranks: int, stride: int, size: int, ranks_per_node: int) -> World:
    """The machines of groups of `size` ranks that stand `stride` apart and tile `num_ranks`.

    They are those of the group on most nodes. A group that does not lie evenly on its nodes counts as one rank per
    node, the slowest case.
    """
    most = max(_nodes(num_ranks, stride, size, ranks_per_node))
    return World(size, size // most if size % most == 0 else 1)


def _nodes(num_ranks: int, stride: int, size: int, ranks_per_node: int) -> Iterator[int]:
    span = stride * size
    for block in range(0, num_ranks, span):
        for first in range(block, block + stride):
            yield len({rank // ranks_per_node for rank in range(first, first + span, stride)})


def _check_whole(record: object, name: str, least: int) -> None:
    value = getattr(record, name)
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number from {least} on")
