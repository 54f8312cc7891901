"""Traffic of a dispatch, stage by stage: rows, duplicates left out, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.moe.dispatch.hierarchical_exchange import StageExchange


@dataclass(frozen=True)
class LevelTraffic:
    """Rows that one rank sends in one stage of a dispatch; rows that stay on the rank are counted apart."""

    num_entries: int
    """Assignments; without de-duplication each would be a row."""
    num_rows: int
    """Rows passed to the next stage, including those that stayed on this rank."""
    num_sent_entries: int
    """Assignments whose rows went to another rank."""
    num_sent_rows: int
    """Rows that went to another rank."""
    row_nbytes: int
    """Bytes of the rows sent, before a codec; combine sends as many back in all, and so does backward for each."""
    id_nbytes: int
    """Bytes of ids, weights and sizes sent; combine sends none, backward the weights' gradients."""

    @property
    def duplicate_rate(self) -> float:
        """Share of assignments that needed no row of their own, 0 to 1 (HierMoE, table II); 0 if there were none."""
        return 1 - self.num_rows / self.num_entries if self.num_entries else 0.0


def traffic_of(exchange: StageExchange, rows: Tensor, weights: Tensor) -> LevelTraffic:
    """Count what a stage sends for rows [n, M] and weights [a] of these dtypes."""
    plan, me = exchange.plan, exchange.group.rank()
    num_rows, num_entries = sum(plan.row_splits), sum(plan.entry_splits)
    sent_rows, sent_entries = num_rows - plan.row_splits[me], num_entries - plan.entry_splits[me]
    others = len(plan.row_splits) - 1
    sizes = others * 8 * (1 + len(plan.row_splits))  # each message's length, and the rows to all places
    return LevelTraffic(
        num_entries=num_entries,
        num_rows=num_rows,
        num_sent_entries=sent_entries,
        num_sent_rows=sent_rows,
        row_nbytes=sent_rows * rows.shape[1] * rows.itemsize,
        id_nbytes=sent_entries * (plan.ids.itemsize + weights.itemsize) + sizes,
    )
