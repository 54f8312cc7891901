"""HierMoE: all-to-alls of rows on several levels, each row crossing a level once per group that needs it.

Ranks 0 .. G-1 are divided into U[1] groups, each of those again, up to U[D-1]; U[0] = 1 (arXiv 2508.09591, section 3).
Depth d sends rows on the levels inter1 .. inter(d-1) and, to the ranks themselves, intra(d-1):

    inter i      in each of U[i-1] groups, to its U[i] / U[i-1] subgroups, keeping the position in the group
    intra d-1    in each of U[d-1] groups, to its G / U[d-1] ranks
    t_d = sum over i < d of (alpha + beta * sent_inter(i)) + alpha + beta * sent_intra(d-1)

Depth 1 is one all-to-all between all ranks. A row is kept once per destination before every level. So a rank's rows at
level i are those of all source ranks with its position in a group of U[i-1] that go to its group, and everything
follows from one table per number of groups g: rows of source rank s that have an expert in group j.

The paper takes the largest entry of that table times the number of peers; here bytes are those that the busiest
process sends or receives, which is the same where routing is balanced and closer where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any

from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe.rates import Coding, MoERates, Price
from laconic.cost.moe.shape import strided_group_shape
from laconic.errors import ConfigError
from laconic.topology import ExchangeStage, Levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]


def counted_groups(levels: Levels) -> tuple[int, ...]:
    """Return the numbers of groups that rows are counted for: U[1], ..., U[D-1], G."""
    return (*levels.num_groups[1:], levels.num_ranks)


def stage_shape(levels: Levels, stage: ExchangeStage) -> GroupShape:
    """Return number and nodes of the ranks that exchange rows in a stage."""
    return strided_group_shape(levels.num_ranks, stage.stride, stage.fanout, levels.node_size)


# --- rows ---


def hit_share(num_experts: int, top_k: int, num_groups: int) -> float:
    """Return the share of tokens that have an expert in a given one of `num_groups` groups: k of E experts, all alike.

    1 - C(E - E/R, K) / C(E, K).
    """
    if num_groups < 1 or num_experts % num_groups:
        raise ConfigError(f"num_groups is {num_groups}, but it must divide num_experts = {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k is {top_k}, but it must be from 1 to num_experts = {num_experts}")
    return 1 - comb(num_experts - num_experts // num_groups, top_k) / comb(num_experts, top_k)


def duplicate_rate(num_experts: int, top_k: int, num_groups: int) -> float:
    """Return the share of rows that go to a group which has them already: k of E experts, all alike (Table II)."""
    return 1 - num_groups * hit_share(num_experts, top_k, num_groups) / top_k


@dataclass(frozen=True)
class RowCounts:
    """Rows that every source rank has to send, counted once per group and once per expert."""

    levels: Levels
    rows: Mapping[int, Table]
    """By number of groups g of `counted_groups`: [G, g], rows of a source rank that have an expert in a group."""
    assignments: Table
    """[G, G]: the same to ranks, duplicates counted: rows of an all-to-all without de-duplication."""

    @classmethod
    def of_vectors(cls, vectors: Iterable[Sequence[float]], levels: Levels) -> RowCounts:
        """Make the counts from the vector of each rank, see `count_vector`, in order of ranks."""
        import numpy as np

        table = np.stack([np.asarray(vector) for vector in vectors])
        widths = (*counted_groups(levels), levels.num_ranks)
        if table.shape != (levels.num_ranks, sum(widths)):
            expected = (levels.num_ranks, sum(widths))
            raise ConfigError(f"counts have shape {table.shape}, but {expected} is needed: one vector of each rank")
        *rows, assignments = np.split(table, np.cumsum(widths)[:-1], axis=1)
        return cls(levels, dict(zip(counted_groups(levels), rows, strict=True)), assignments)

    @classmethod
    def uniform(cls, num_tokens: int, num_experts: int, top_k: int, levels: Levels) -> RowCounts:
        """Return the expected counts for `num_tokens` per rank, each with k of E experts that are all alike."""
        import numpy as np

        ranks = levels.num_ranks
        rows_of = {
            g: np.full((ranks, g), num_tokens * hit_share(num_experts, top_k, g)) for g in counted_groups(levels)
        }
        return cls(levels, rows_of, np.full((ranks, ranks), num_tokens * top_k / ranks))

    def duplicate_rate(self, num_groups: int) -> float:
        """Return the share of rows that go to a group which has them already. 0 without rows."""
        total = float(self.assignments.sum())
        return 1 - float(self.rows[num_groups].sum()) / total if total else 0.0


def count_vector(
    tokens: Sequence[int] | Table, experts: Sequence[int] | Table, num_experts: int, levels: Levels
) -> Table:
    """Count the rows of one rank: int64 [sum of g + G].

    For g of U[1], ..., U[D-1], G its rows to each of g groups; then its assignments to each rank.

    Args:
        tokens, experts: [a], entry i sends token tokens[i] to expert experts[i] (a slot, see
            laconic.moe.placement.expert_map).

    Raises:
        ConfigError: experts do not divide over the ranks, or an id is out of range.
    """
    import numpy as np

    token, expert = np.asarray(tokens, dtype=np.int64), np.asarray(experts, dtype=np.int64)
    if num_experts % levels.num_ranks:
        raise ConfigError(
            f"num_experts is {num_experts}, but it must be a multiple of {levels.num_ranks} ranks; change one"
        )
    if expert.size and not (expert.min() >= 0 and expert.max() < num_experts):
        raise ConfigError(f"experts go from {expert.min()} to {expert.max()}, but must be from 0 to {num_experts - 1}")
    parts = []
    for g in counted_groups(levels):
        pairs = np.unique(token * g + expert // (num_experts // g))
        parts.append(np.bincount(pairs % g, minlength=g))
    ranks = levels.num_ranks
    parts.append(np.bincount(expert // (num_experts // ranks), minlength=ranks))
    return np.concatenate(parts).astype(np.int64)


def level_rows(counts: RowCounts, stage: ExchangeStage) -> Table:
    """Return [parents, positions, peers]: rows that a rank has for each subgroup of its group, its own included."""
    table = counts.rows[stage.num_groups]
    at_position = table.reshape(stage.num_parents, stage.num_positions, stage.num_groups).sum(axis=0)
    return at_position.reshape(stage.num_positions, stage.num_parents, stage.fanout).transpose(1, 0, 2)


@dataclass(frozen=True)
class LevelRows:
    """Rows sent between ranks at a level; rows that stay on their rank are not counted."""

    total: float
    """Sum over all ranks."""
    busiest: float
    """Rows sent or received by the process that has most."""
    handled: float
    """Rows of the rank that has most before the level, those it keeps included: it sorts them."""


def wire_rows(counts: RowCounts, stage: ExchangeStage) -> LevelRows:
    """Count the rows that leave their rank at a level."""
    import numpy as np

    rows = level_rows(counts, stage)
    # Position p of a group lies in its subgroup p // stride, at position p % stride of it.
    to = rows.reshape(stage.num_parents, stage.fanout, stage.stride, stage.fanout)
    moved = to * (1 - np.eye(stage.fanout))[None, :, None, :]
    sent, received = moved.sum(axis=3), moved.sum(axis=1)
    return LevelRows(float(sent.sum()), float(max(sent.max(), received.max())), float(rows.sum(axis=2).max()))


def busiest_rows(assignments: Table) -> float:
    """Return the rows that the busiest process sends or receives in one exchange of all rows, duplicates included."""
    import numpy as np

    moved = assignments * (1 - np.eye(len(assignments)))
    return float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def level_nbytes(counts: RowCounts, depth: int, row_nbytes: float) -> dict[str, float]:
    """Sum the bytes sent by all ranks, by level of a depth."""
    return {stage.name: wire_rows(counts, stage).total * row_nbytes for stage in counts.levels.stages(depth)}


# --- seconds ---


@dataclass(frozen=True)
class DepthChoice:
    """The depth that is predicted to be fastest, and all depths compared."""

    depth: int
    seconds: float
    candidates: Mapping[int, Mapping[str, float]]
    """Seconds by depth, then level."""
    flat_seconds: float
    """Seconds of one all-to-all that sends duplicates."""


def depth_seconds(
    counts: RowCounts, depth: int, row_nbytes: float, rates: MoERates, coding: Coding | None = None
) -> dict[str, float]:
    """Predict the seconds of one direction (dispatch; combine mirrors it), by level. Their sum is t_d.

    Beside the links' time, a level sorts a rank's rows (`MoERates.copy`), which the paper leaves out.
    """
    seconds = {}
    for stage in counts.levels.stages(depth):
        rows = wire_rows(counts, stage)
        sorting = rates.copy.seconds(rows.handled * row_nbytes)
        wire = exchange_price(counts.levels, stage, rows.busiest * row_nbytes, rates, coding)
        seconds[stage.name] = sorting + wire.seconds
    return seconds


def flat_seconds(counts: RowCounts, row_nbytes: float, rates: MoERates, coding: Coding | None = None) -> float:
    """Predict one all-to-all that sends a row once per expert, in one direction."""
    (stage,) = counts.levels.stages(1)
    busiest = busiest_rows(counts.assignments)
    sorting = rates.copy.seconds(float(counts.assignments.sum(axis=1).max()) * row_nbytes)
    return sorting + exchange_price(counts.levels, stage, busiest * row_nbytes, rates, coding).seconds


def best_depth(counts: RowCounts, row_nbytes: float, rates: MoERates, coding: Coding | None = None) -> DepthChoice:
    """Choose the depth with the least predicted time; the smallest of equals.

    All ranks that pass equal counts and rates get equal answers on equal machines; where machines differ, one rank's
    answer should count for all.
    """
    candidates = {d: depth_seconds(counts, d, row_nbytes, rates, coding) for d in counts.levels.depths}
    totals = {depth: sum(levels.values()) for depth, levels in candidates.items()}
    depth = min(totals, key=lambda d: (totals[d], d))
    return DepthChoice(depth, totals[depth], candidates, flat_seconds(counts, row_nbytes, rates, coding))


@dataclass(frozen=True)
class LevelCost:
    """seconds = alpha_seconds + seconds_per_row * x of a level, x rows of all ranks that go to its fullest group."""

    num_groups: int
    alpha_seconds: float
    seconds_per_row: float


def level_costs(
    counts: RowCounts, depth: int, row_nbytes: float, rates: MoERates, coding: Coding | None = None
) -> tuple[LevelCost, ...]:
    """Return the `level_lines` of counted rows."""
    stages = counts.levels.stages(depth)
    fullest = {stage.num_groups: float(counts.rows[stage.num_groups].sum(axis=0).max()) for stage in stages}
    return level_lines(counts.levels, depth, fullest, row_nbytes, rates, coding)


def level_lines(
    levels: Levels,
    depth: int,
    fullest: Mapping[int, float],
    row_nbytes: float,
    rates: MoERates,
    coding: Coding | None = None,
) -> tuple[LevelCost, ...]:
    """Return a depth's levels as lines in the rows of their fullest group, for `laconic.moe.placement.search`.

    Each of a group's ranks receives its share from all peers but itself. With a code the line goes through the points
    of nothing sent and of what is sent now.

    Args:
        fullest: by `ExchangeStage.num_groups`, rows of all ranks that go to the fullest group now.
        row_nbytes: of a row with its ids and weights.
    """
    costs = []
    for stage in levels.stages(depth):
        share = (stage.fanout - 1) / stage.fanout / stage.stride
        rows = fullest[stage.num_groups]
        alpha = exchange_price(levels, stage, 0.0, rates, coding).seconds
        more = exchange_price(levels, stage, share * rows * row_nbytes, rates, coding).seconds - alpha
        costs.append(LevelCost(stage.num_groups, alpha, more / rows if rows else 0.0))
    return tuple(costs)


def exchange_price(
    levels: Levels,
    stage: ExchangeStage,
    sent_nbytes: float,
    rates: MoERates,
    coding: Coding | None,
    group: str | None = None,
) -> Price:
    """Predict one exchange of a level on the links of `group`, its own if None, whose busiest process sends so much."""
    nbytes = sent_nbytes * stage.fanout / max(1, stage.fanout - 1)
    return rates.price("all_to_all", group or stage.name, stage_shape(levels, stage), nbytes, coding)
