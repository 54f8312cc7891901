"""Shape of a mixture-of-experts layer, and the machines of the groups that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from laconic.cost.comm.seconds import GroupShape
from laconic.errors import ConfigError
from laconic.topology import GridLayout, groups_of_ranks


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer on the rows of one rank. Letters as in FSMoE and Parm.

    Raises:
        ConfigError: a size is impossible.
    """

    num_tokens: int
    """B*L: rows of the layer's input on a rank, the same on all ranks of an MP group. 0 is a rank without tokens."""
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
    """Bytes of an element of a row."""
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
        """c = k*f: rows sent for a token; k where nothing is dropped or padded."""
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

    def check(self, grid: GridLayout) -> None:
        """Check that the layer can be divided over this grid.

        Raises:
            ConfigError: it cannot.
        """
        rules = (("num_experts", self.num_experts, "ep", grid.ep), ("hidden_dim", self.hidden_dim, "esp", grid.esp))
        for name, value, divisor, number in rules:
            if value % number:
                raise ConfigError(f"{name} is {value}, but it must be a multiple of {divisor} = {number}; change one")


def group_shape(grid: GridLayout, group: str) -> GroupShape:
    """Return ranks and nodes of a group of GROUPS; of the one that spans most nodes, where groups differ."""
    return strided_group_shape(grid.num_ranks, *grid.stride_and_size(group), grid.ranks_per_node or grid.num_ranks)


@lru_cache(maxsize=4096)
def strided_group_shape(num_ranks: int, stride: int, size: int, ranks_per_node: int) -> GroupShape:
    """Return ranks and nodes of groups of `size` ranks that stand `stride` apart and tile `num_ranks`.

    They are those of the group on most nodes. A group that does not lie evenly on its nodes counts as one rank per
    node, the slowest case.
    """
    groups = groups_of_ranks(num_ranks, stride, size)
    most = max(len({rank // ranks_per_node for rank in group}) for group in groups)
    return GroupShape(size, size // most if size % most == 0 else 1)


def _check_whole(record: object, name: str, least: int) -> None:
    value = getattr(record, name)
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number from {least} on")
